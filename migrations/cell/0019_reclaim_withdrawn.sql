-- An operator can withdraw a chosen ticket: its engine stays, and is not chosen again for an hour.
ALTER TABLE linkis_reclaim ADD COLUMN withdrawn_time timestamptz;

-- The withdrawal has a history line. The constraint is replaced as a whole, NOT VALID, as for the reclaim policies.
ALTER TABLE linkis_resource_action_record DROP CONSTRAINT linkis_resource_action_record_action;
ALTER TABLE linkis_resource_action_record ADD CONSTRAINT linkis_resource_action_record_action CHECK (
    (ticket_id IS NOT NULL AND num_nulls("user", creator, engine_type, labels, em_application_name, em_instance) = 0 AND scope IS NULL
        AND object IS NULL
        AND (action IN ('granted', 'adopted', 'inited', 'reported', 'released', 'forced', 'expired', 'unregistered', 'lost')
            OR action IN ('removed_from_queue', 'recalled', 'reclaim_withdrawn') AND reason IS NOT NULL))
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
