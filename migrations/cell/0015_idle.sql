-- Lists of tickets of idle engines. Changes of tickets wait while the index is created: one scan of the table.
CREATE INDEX linkis_user_resource_idle ON linkis_user_resource_meta_data (ticket_id) WHERE idle_since IS NOT NULL;
