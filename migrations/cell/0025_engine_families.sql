-- Of a cell: where a ticket counts that has no engine family. Locks one table of at most 64 rows.

-- skipped: nowhere in the label set, as before; empty: in the scope with the value "" there. What is skipped is counted anew beside it, in
-- steps like every label set that is new. Label sets without the engine family are counted alike both ways.
ALTER TABLE linkis_label_set ADD COLUMN family text NOT NULL DEFAULT 'skipped';
ALTER TABLE linkis_label_set ADD CONSTRAINT linkis_label_set_family CHECK (family IN ('skipped', 'empty'));
UPDATE linkis_label_set SET family = 'empty' WHERE lacking = 'empty' AND NOT label_set ? 'engine_family';
