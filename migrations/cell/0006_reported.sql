-- Of a cell: the history tells what engines report while they run.

-- An earlier release counts rightly what was reported, and may write beside a later one. What was written before kept a narrower
-- rule, so it need not be looked through.
ALTER TABLE linkis_resource_action_record DROP CONSTRAINT linkis_resource_action_record_action;
ALTER TABLE linkis_resource_action_record ADD CONSTRAINT linkis_resource_action_record_action CHECK (
    (ticket_id IS NOT NULL AND num_nulls("user", creator, engine_type, labels, em_application_name, em_instance) = 0 AND scope IS NULL
        AND action IN ('granted', 'inited', 'reported', 'released', 'expired', 'unregistered', 'lost'))
    OR (ticket_id IS NULL AND "user" IS NULL AND num_nulls(em_application_name, em_instance) = 0 AND scope IS NULL
        AND action IN ('registered', 'resized', 'unregistered', 'lost', 'repaired'))
    OR (ticket_id IS NULL AND "user" IS NULL AND num_nulls(em_application_name, em_instance) = 2 AND scope IS NOT NULL
        AND action IN ('repaired', 'limit_set', 'limit_deleted', 'limits_in_force'))
    OR (ticket_id IS NULL AND "user" IS NULL AND em_application_name IS NOT NULL AND em_instance IS NULL AND scope IS NOT NULL
        AND action = 'policy_set')
) NOT VALID;
