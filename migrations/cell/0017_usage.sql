-- Of a cell: who serves it, and indexes for what operators look for.

-- One row per instance of the service that serves the cell: it renews its row while it lives, and what is told of one that does not is
-- ignored, and soon removed.
CREATE TABLE linkis_rm_server (
    instance_id uuid NOT NULL,
    version text NOT NULL,
    -- Where it listens.
    address text NOT NULL,
    start_time timestamptz NOT NULL,
    alive_until timestamptz NOT NULL,
    -- What it answered to requests, lately.
    grants_per_second double precision NOT NULL,
    refusals_per_second double precision NOT NULL,
    -- How its background tasks fare, as a JSON array.
    tasks jsonb NOT NULL,
    CONSTRAINT linkis_rm_server_key PRIMARY KEY (instance_id)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, vacuum_truncate = off);

-- Who waits, by user; in the order of the line.
CREATE INDEX linkis_resource_waiting_user ON linkis_resource_waiting ("user", position);

-- Nothing of these changes while a counter counts, so that counting costs no more.
CREATE INDEX linkis_label_resource_creator ON linkis_label_resource ((scope ->> 'creator'), scope_hash) WHERE scope ->> 'creator' IS NOT NULL;
CREATE INDEX linkis_label_resource_engine_type ON linkis_label_resource ((scope ->> 'engine_type'), scope_hash)
    WHERE scope ->> 'engine_type' IS NOT NULL;
