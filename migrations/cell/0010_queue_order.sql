-- The order of waiting requests is data: all instances follow the same one.

-- One row, versioned with the limits: a change of the row changes the limits version.
CREATE TABLE linkis_queue_order (
    only_row boolean NOT NULL DEFAULT true,
    -- Labels by which requests take turns; empty for the order in which they enter.
    fair_by text[] COLLATE "C" NOT NULL DEFAULT '{user}',
    -- Time for which the position of an absent caller is kept; 0: not kept.
    position_kept_ms integer NOT NULL DEFAULT 60000,
    CONSTRAINT linkis_queue_order_key PRIMARY KEY (only_row),
    CONSTRAINT linkis_queue_order_one CHECK (only_row),
    CONSTRAINT linkis_queue_order_bounds CHECK (cardinality(fair_by) <= 8 AND position_kept_ms BETWEEN 0 AND 3600000)
);
INSERT INTO linkis_queue_order DEFAULT VALUES;

-- A change of the order has a history line. The constraint is replaced as a whole, NOT VALID: reading all lines would stop all writes
-- meanwhile, and the earlier constraint has checked them. An earlier release writes no such line.
ALTER TABLE linkis_resource_action_record DROP CONSTRAINT linkis_resource_action_record_action;
ALTER TABLE linkis_resource_action_record ADD CONSTRAINT linkis_resource_action_record_action CHECK (
    (ticket_id IS NOT NULL AND num_nulls("user", creator, engine_type, labels, em_application_name, em_instance) = 0 AND scope IS NULL
        AND object IS NULL
        AND (action IN ('granted', 'adopted', 'inited', 'reported', 'released', 'forced', 'expired', 'unregistered', 'lost')
            OR action = 'removed_from_queue' AND reason IS NOT NULL))
    OR (ticket_id IS NULL AND "user" IS NULL AND num_nulls(em_application_name, em_instance) = 0 AND scope IS NULL AND object IS NULL
        AND action IN ('registered', 'resized', 'unregistered', 'lost', 'repaired', 'drained', 'resumed', 'held', 'hold_ended'))
    OR (ticket_id IS NULL AND "user" IS NULL AND num_nulls(em_application_name, em_instance) = 2 AND scope IS NOT NULL
        AND object IS NULL AND action IN ('repaired', 'limit_set', 'limit_deleted', 'limits_in_force', 'held', 'hold_ended'))
    OR (ticket_id IS NULL AND "user" IS NULL AND em_application_name IS NOT NULL AND em_instance IS NULL AND scope IS NOT NULL
        AND object IS NULL AND action = 'policy_set')
    OR (ticket_id IS NULL AND "user" IS NULL AND num_nulls(em_application_name, em_instance) = 2 AND scope IS NULL
        AND object IS NOT NULL AND action IN ('order_set', 'provider_put', 'provider_deleted', 'token_created', 'token_revoked'))
) NOT VALID;
