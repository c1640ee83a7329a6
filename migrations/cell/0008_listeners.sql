-- The PostgreSQL processes of two connections of an instance, on which it listens and renews this row. Both end at once when the instance
-- dies. Null while the instance does not listen, and in rows of an earlier release: it then counts as alive until alive_until.
ALTER TABLE linkis_rm_instance
    ADD COLUMN listener_pid integer,
    ADD COLUMN listener_start timestamptz,
    ADD COLUMN renewer_pid integer,
    ADD COLUMN renewer_start timestamptz,
    -- Start of the server that has the processes.
    ADD COLUMN server_start timestamptz,
    ADD CONSTRAINT linkis_rm_instance_processes
        CHECK (num_nulls(listener_pid, listener_start, renewer_pid, renewer_start, server_start) IN (0, 5));
