-- Reclaim policies are data: all instances take back idle engines by the same ones.

-- One row is one policy, versioned with the limits: a change of a row changes the limits version.
CREATE TABLE linkis_reclaim_policy (
    -- Hash of the pattern: patterns can be longer than an index entry.
    pattern_hash bytea NOT NULL,
    -- Labels, each with a value, or null for each value.
    pattern jsonb NOT NULL,
    mode text COLLATE "C" NOT NULL,
    -- Time without a task after which a ticket can be chosen.
    idle_after_ms bigint NOT NULL,
    -- Time from the choice of a ticket to its recall.
    grace_ms bigint NOT NULL,
    -- Maximum number of tickets that are recalled within a minute.
    per_minute integer NOT NULL,
    CONSTRAINT linkis_reclaim_policy_key PRIMARY KEY (pattern_hash),
    CONSTRAINT linkis_reclaim_policy_mode CHECK (mode IN ('OFF', 'OBSERVE', 'ADVISE', 'STOP')),
    CONSTRAINT linkis_reclaim_policy_bounds CHECK (idle_after_ms BETWEEN 1000 AND 86400000 AND grace_ms BETWEEN 1000 AND 86400000
        AND per_minute BETWEEN 1 AND 100000)
);

-- A change of a policy has a history line, and a ticket one whose engine shall end. The constraint is replaced as a whole, NOT VALID, as
-- for the order of waiting requests.
ALTER TABLE linkis_resource_action_record DROP CONSTRAINT linkis_resource_action_record_action;
ALTER TABLE linkis_resource_action_record ADD CONSTRAINT linkis_resource_action_record_action CHECK (
    (ticket_id IS NOT NULL AND num_nulls("user", creator, engine_type, labels, em_application_name, em_instance) = 0 AND scope IS NULL
        AND object IS NULL
        AND (action IN ('granted', 'adopted', 'inited', 'reported', 'released', 'forced', 'expired', 'unregistered', 'lost')
            OR action = 'removed_from_queue' AND reason IS NOT NULL
            OR action = 'recalled' AND reason IS NOT NULL))
    OR (ticket_id IS NULL AND "user" IS NULL AND num_nulls(em_application_name, em_instance) = 0 AND scope IS NULL AND object IS NULL
        AND action IN ('registered', 'resized', 'unregistered', 'lost', 'repaired', 'drained', 'resumed', 'held', 'hold_ended'))
    OR (ticket_id IS NULL AND "user" IS NULL AND num_nulls(em_application_name, em_instance) = 2 AND scope IS NOT NULL
        AND object IS NULL AND action IN ('repaired', 'limit_set', 'limit_deleted', 'limits_in_force', 'held', 'hold_ended'))
    OR (ticket_id IS NULL AND "user" IS NULL AND em_application_name IS NOT NULL AND em_instance IS NULL AND scope IS NOT NULL
        AND object IS NULL AND action = 'policy_set')
    OR (ticket_id IS NULL AND "user" IS NULL AND num_nulls(em_application_name, em_instance) = 2 AND scope IS NULL
        AND object IS NOT NULL AND action IN ('order_set', 'priority_set', 'priority_deleted', 'reclaim_policy_set',
            'reclaim_policy_deleted', 'provider_put', 'provider_deleted', 'token_created', 'token_revoked'))
) NOT VALID;
