-- Of a cell: engines that are put into the books, what limits do, and the caps of requests that wait.

-- What was written before kept a narrower rule, so it need not be looked through.
ALTER TABLE linkis_resource_action_record DROP CONSTRAINT linkis_resource_action_record_action;
ALTER TABLE linkis_resource_action_record ADD CONSTRAINT linkis_resource_action_record_action CHECK (
    (ticket_id IS NOT NULL AND num_nulls("user", creator, engine_type, labels, em_application_name, em_instance) = 0 AND scope IS NULL
        AND action IN ('granted', 'adopted', 'inited', 'reported', 'released', 'expired', 'unregistered', 'lost'))
    OR (ticket_id IS NULL AND "user" IS NULL AND num_nulls(em_application_name, em_instance) = 0 AND scope IS NULL
        AND action IN ('registered', 'resized', 'unregistered', 'lost', 'repaired'))
    OR (ticket_id IS NULL AND "user" IS NULL AND num_nulls(em_application_name, em_instance) = 2 AND scope IS NOT NULL
        AND action IN ('repaired', 'limit_set', 'limit_deleted', 'limits_in_force'))
    OR (ticket_id IS NULL AND "user" IS NULL AND em_application_name IS NOT NULL AND em_instance IS NULL AND scope IS NOT NULL
        AND action = 'policy_set')
) NOT VALID;

-- Of a rule that was set or deleted, whether it is enforced, watched or off. What was written before tells nothing: enforced.
ALTER TABLE linkis_resource_action_record ADD COLUMN limit_mode text;

-- The caps that a request has of its own, as a JSON array of {"keys": [...], "max": {...}}.
ALTER TABLE linkis_resource_waiting ADD COLUMN caps jsonb NOT NULL DEFAULT '[]';
