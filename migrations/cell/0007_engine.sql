-- Of a cell: finding tickets by the engine that uses them.

-- Locked tickets have no engine, so that a grant does not pay for it. Writes wait while it is built: some two seconds for a million
-- tickets that are in use. Not built concurrently: that waits for every older snapshot, those of instances included that wait for
-- their turn to migrate, and leaves an invalid index behind when it is given up.
CREATE INDEX linkis_user_resource_engine ON linkis_user_resource_meta_data (engine_application_name, engine_instance, ticket_id)
    WHERE engine_instance IS NOT NULL;
