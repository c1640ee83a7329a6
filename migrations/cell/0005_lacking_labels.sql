-- Of a cell: where a ticket counts that lacks a label.

-- skipped: nowhere in the label set, as all were counted before; empty: in the scope with the value "" there. What is skipped is counted
-- anew beside it, in steps like every label set that is new, and goes when that is done.
ALTER TABLE linkis_label_set ADD COLUMN lacking text NOT NULL DEFAULT 'skipped';
ALTER TABLE linkis_label_set ADD CONSTRAINT linkis_label_set_lacking CHECK (lacking IN ('skipped', 'empty'));
