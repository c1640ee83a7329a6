-- Of a cell: what operators and administrators do, from where, and how that to which they did it stood before and after.

-- Of what no other column names: "token ID of NAME", "provider TYPE/NAME".
ALTER TABLE linkis_resource_action_record ADD COLUMN object text;
-- The address that the call came from, or the machine where a command was typed.
ALTER TABLE linkis_resource_action_record ADD COLUMN address text;
-- JSON, for people and programs; never a secret, and of bounded length. None where there was, or is, nothing.
ALTER TABLE linkis_resource_action_record ADD COLUMN before text;
ALTER TABLE linkis_resource_action_record ADD COLUMN after text;

-- What was written before kept a narrower rule, so it need not be looked through.
ALTER TABLE linkis_resource_action_record DROP CONSTRAINT linkis_resource_action_record_action;
ALTER TABLE linkis_resource_action_record ADD CONSTRAINT linkis_resource_action_record_action CHECK (
    (ticket_id IS NOT NULL AND num_nulls("user", creator, engine_type, labels, em_application_name, em_instance) = 0 AND scope IS NULL
        AND object IS NULL
        AND action IN ('granted', 'adopted', 'inited', 'reported', 'released', 'forced', 'expired', 'unregistered', 'lost'))
    OR (ticket_id IS NULL AND "user" IS NULL AND num_nulls(em_application_name, em_instance) = 0 AND scope IS NULL AND object IS NULL
        AND action IN ('registered', 'resized', 'unregistered', 'lost', 'repaired', 'drained', 'resumed', 'held', 'hold_ended'))
    OR (ticket_id IS NULL AND "user" IS NULL AND num_nulls(em_application_name, em_instance) = 2 AND scope IS NOT NULL
        AND object IS NULL AND action IN ('repaired', 'limit_set', 'limit_deleted', 'limits_in_force', 'held', 'hold_ended'))
    OR (ticket_id IS NULL AND "user" IS NULL AND em_application_name IS NOT NULL AND em_instance IS NULL AND scope IS NOT NULL
        AND object IS NULL AND action = 'policy_set')
    OR (ticket_id IS NULL AND "user" IS NULL AND num_nulls(em_application_name, em_instance) = 2 AND scope IS NULL
        AND object IS NOT NULL AND action IN ('provider_put', 'provider_deleted', 'token_created', 'token_revoked'))
) NOT VALID;
