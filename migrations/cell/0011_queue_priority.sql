-- Priorities of waiting requests are data: all instances follow the same rules.

-- One row is one priority rule, versioned with the limits: a change of a row changes the limits version.
CREATE TABLE linkis_queue_priority (
    -- Hash of the pattern: patterns can be longer than an index entry.
    pattern_hash bytea NOT NULL,
    -- Labels, each with a value, or null for each value.
    pattern jsonb NOT NULL,
    -- Priority of requests that name none, in seconds.
    default_priority smallint NOT NULL,
    max_priority smallint NOT NULL,
    CONSTRAINT linkis_queue_priority_key PRIMARY KEY (pattern_hash),
    CONSTRAINT linkis_queue_priority_bounds CHECK (default_priority >= -600 AND default_priority <= max_priority AND max_priority <= 600)
);

-- A change of a rule has a history line. The constraint is replaced as a whole, NOT VALID, as for the order of waiting requests.
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
        AND object IS NOT NULL AND action IN ('order_set', 'priority_set', 'priority_deleted', 'provider_put', 'provider_deleted',
            'token_created', 'token_revoked'))
) NOT VALID;
