-- Of a cell: EMs that are drained, tickets that an operator ends, and holds that end by themselves.

-- One row per EM on which nothing new is granted. It stays when the EM registers again, and when it goes; Resume removes it.
CREATE TABLE linkis_em_drain (
    em_application_name text COLLATE "C" NOT NULL,
    em_instance text COLLATE "C" NOT NULL,
    reason text NOT NULL,
    drained_by text COLLATE "C" NOT NULL,
    drain_time timestamptz NOT NULL,
    CONSTRAINT linkis_em_drain_key PRIMARY KEY (em_application_name, em_instance)
);

-- A hold that the service took for an operator: why, who wanted it, since when, and until when it counts. Whoever needs its key afterwards
-- removes the row, and so does a task. A row without these is a transaction's own, or was put there by hand: it has no end.
ALTER TABLE linkis_resource_lock
    ADD COLUMN reason text,
    ADD COLUMN held_by text COLLATE "C",
    ADD COLUMN hold_time timestamptz,
    ADD COLUMN hold_until timestamptz;
ALTER TABLE linkis_resource_lock ADD CONSTRAINT linkis_resource_lock_hold
    CHECK (num_nulls(reason, held_by, hold_time, hold_until) IN (0, 4)) NOT VALID;

-- What an operator gave as the reason.
ALTER TABLE linkis_resource_action_record ADD COLUMN reason text;

-- What was written before kept a narrower rule, so it need not be looked through.
ALTER TABLE linkis_resource_action_record DROP CONSTRAINT linkis_resource_action_record_action;
ALTER TABLE linkis_resource_action_record ADD CONSTRAINT linkis_resource_action_record_action CHECK (
    (ticket_id IS NOT NULL AND num_nulls("user", creator, engine_type, labels, em_application_name, em_instance) = 0 AND scope IS NULL
        AND action IN ('granted', 'adopted', 'inited', 'reported', 'released', 'forced', 'expired', 'unregistered', 'lost'))
    OR (ticket_id IS NULL AND "user" IS NULL AND num_nulls(em_application_name, em_instance) = 0 AND scope IS NULL
        AND action IN ('registered', 'resized', 'unregistered', 'lost', 'repaired', 'drained', 'resumed', 'held', 'hold_ended'))
    OR (ticket_id IS NULL AND "user" IS NULL AND num_nulls(em_application_name, em_instance) = 2 AND scope IS NOT NULL
        AND action IN ('repaired', 'limit_set', 'limit_deleted', 'limits_in_force', 'held', 'hold_ended'))
    OR (ticket_id IS NULL AND "user" IS NULL AND em_application_name IS NOT NULL AND em_instance IS NULL AND scope IS NOT NULL
        AND action = 'policy_set')
) NOT VALID;

-- Finding holds, and those that are over; a transaction's own rows are not in it.
CREATE INDEX linkis_resource_lock_hold ON linkis_resource_lock (hold_until) WHERE hold_until IS NOT NULL;
