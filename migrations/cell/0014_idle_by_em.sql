-- Tickets of idle engines on an EM, compared with a report. Changes of tickets wait while the index is created: one scan of the table.
CREATE INDEX linkis_user_resource_idle_em ON linkis_user_resource_meta_data (em_application_name, em_instance, ticket_id)
    WHERE idle_since IS NOT NULL;
