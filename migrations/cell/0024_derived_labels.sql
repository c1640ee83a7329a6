-- Of a cell: where a ticket counts that lacks a derived label: an engine family, a queue or a namespace. Locks one table of at most 64 rows.

-- skipped: nowhere in the label set, as before; empty: in the scope with the value "" there. What is skipped is counted anew beside it, in
-- steps like every label set that is new. Label sets without derived labels are counted alike both ways.
ALTER TABLE linkis_label_set ADD COLUMN derived text NOT NULL DEFAULT 'skipped';
ALTER TABLE linkis_label_set ADD CONSTRAINT linkis_label_set_derived CHECK (derived IN ('skipped', 'empty'));
UPDATE linkis_label_set SET derived = 'empty'
WHERE lacking = 'empty' AND NOT label_set ?| ARRAY['engine_family', 'queue', 'namespace'];
