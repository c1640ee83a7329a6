-- Of a cell: what somebody needs who keeps a copy of what is there: which of two states of a scope is the newer one, and whether a position in
-- the history is still good.

-- Grows with each commit that changes what is held. A row that is new begins with the clock, in microseconds: so it also grows over a row
-- that was removed because nothing was held, and over a recount; nobody counts a million times a second in one scope.
ALTER TABLE linkis_label_resource ADD COLUMN version bigint NOT NULL DEFAULT 0;
ALTER TABLE linkis_label_resource ALTER COLUMN version SET DEFAULT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;

-- One row. Positions carry the name, so that one of another database, or of one that was put up anew, is told from these.
CREATE TABLE linkis_resource_action_horizon (
    only_row boolean NOT NULL DEFAULT true,
    history_id uuid NOT NULL DEFAULT gen_random_uuid(),
    -- The largest number of a line that was forgotten.
    forgotten bigint NOT NULL DEFAULT 0,
    CONSTRAINT linkis_resource_action_horizon_key PRIMARY KEY (only_row),
    CONSTRAINT linkis_resource_action_horizon_row CHECK (only_row)
);
INSERT INTO linkis_resource_action_horizon DEFAULT VALUES;
-- What was forgotten before is unknown; nobody has a position as old as that.
