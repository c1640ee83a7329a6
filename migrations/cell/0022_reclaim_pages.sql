-- The longest idle engines are read by pages, and many became idle at the same time. Changes of tickets wait while an index is created: one
-- scan of the table.
DROP INDEX linkis_user_resource_idle_longest, linkis_user_resource_idle_user, linkis_user_resource_idle_since;
CREATE INDEX linkis_user_resource_idle_longest
    ON linkis_user_resource_meta_data (em_application_name, em_instance, idle_since, ticket_id) WHERE idle_since IS NOT NULL;
CREATE INDEX linkis_user_resource_idle_user ON linkis_user_resource_meta_data ("user", idle_since, ticket_id)
    WHERE idle_since IS NOT NULL;
CREATE INDEX linkis_user_resource_idle_since ON linkis_user_resource_meta_data (idle_since, ticket_id) WHERE idle_since IS NOT NULL;
