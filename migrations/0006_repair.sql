-- Repairs in the history: the counters of an EM, or of a scope, were brought in line with the tickets.

-- A scope is on no EM: its repairs name its labels, and no EM. Every other line names its EM, as before.
ALTER TABLE linkis_resource_action_record
    ALTER COLUMN em_application_name DROP NOT NULL,
    ALTER COLUMN em_instance DROP NOT NULL,
    -- The labels of a repaired scope, as a JSON object. The resource of a repair is what the live tickets hold together, used and
    -- locked; of a scope it is a Special, with the dimensions named as limits name them.
    ADD COLUMN scope jsonb;

-- What is there already satisfied the narrower check, and is not read again.
ALTER TABLE linkis_resource_action_record DROP CONSTRAINT linkis_resource_action_record_action;
ALTER TABLE linkis_resource_action_record ADD CONSTRAINT linkis_resource_action_record_action CHECK (
    (ticket_id IS NOT NULL AND "user" IS NOT NULL AND num_nulls(em_application_name, em_instance) = 0 AND scope IS NULL
        AND action IN ('granted', 'inited', 'released', 'expired', 'unregistered', 'lost'))
    OR (ticket_id IS NULL AND "user" IS NULL AND num_nulls(em_application_name, em_instance) = 0 AND scope IS NULL
        AND action IN ('registered', 'resized', 'unregistered', 'lost', 'repaired'))
    OR (ticket_id IS NULL AND "user" IS NULL AND num_nulls(em_application_name, em_instance) = 2 AND scope IS NOT NULL
        AND action = 'repaired')
) NOT VALID;
