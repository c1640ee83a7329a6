-- The longest idle engines are read by pages, and many became idle at the same time. Changes of tickets wait while the indexes are created:
-- three scans of the table.
CREATE INDEX linkis_user_resource_idle_at_em
    ON linkis_user_resource_meta_data (em_application_name, em_instance, idle_since, ticket_id) WHERE idle_since IS NOT NULL;
CREATE INDEX linkis_user_resource_idle_of_user ON linkis_user_resource_meta_data ("user", idle_since, ticket_id)
    WHERE idle_since IS NOT NULL;
CREATE INDEX linkis_user_resource_idle_in_cell ON linkis_user_resource_meta_data (idle_since, ticket_id) WHERE idle_since IS NOT NULL;
