-- Of a cell: what external clusters show of their queues, and what was granted in these that they do not show yet.

-- One row per provider, which repeats what home says of it, so that nobody who decides has to look there. It is the lock on all that is
-- counted of the cluster: whoever changes a row of the next table, or of tickets in it, has it; after the resource locks and the scopes' rows.
CREATE TABLE linkis_external_cluster (
    -- Another for a provider that is put again after it was removed: nothing that was counted for the one before is counted for it.
    cluster_id bigint GENERATED ALWAYS AS IDENTITY,
    resource_type text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    -- Of the requests that it is for, as a JSON object.
    labels jsonb NOT NULL,
    etag uuid NOT NULL,
    -- What requests get while no snapshot is younger than max_age, all in milliseconds.
    when_away text NOT NULL,
    max_age bigint NOT NULL,
    last_known_for bigint NOT NULL,
    refresh_interval bigint NOT NULL,
    -- The snapshot in force, when the cluster was begun to be asked for it, and whether queues are known by their last names; none yet.
    generation bigint,
    begun timestamptz,
    by_last_name boolean NOT NULL DEFAULT false,
    -- How many changes there were of what tickets hold: the version of all that is counted.
    changes bigint NOT NULL DEFAULT 0,
    CONSTRAINT linkis_external_cluster_key PRIMARY KEY (cluster_id),
    CONSTRAINT linkis_external_cluster_name UNIQUE (resource_type, name),
    CONSTRAINT linkis_external_cluster_snapshot CHECK (num_nulls(generation, begun) IN (0, 2)),
    CONSTRAINT linkis_external_cluster_away CHECK (when_away IN ('refuse', 'allow', 'last_known'))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off);

-- One row per queue that live tickets are in, and per queue that these are in: what the snapshot in force does not show of them.
CREATE TABLE linkis_external_queue (
    cluster_id bigint NOT NULL,
    path text COLLATE "C" NOT NULL,
    -- Bytes.
    unseen_memory bigint NOT NULL,
    unseen_cores bigint NOT NULL,
    CONSTRAINT linkis_external_queue_key PRIMARY KEY (cluster_id, path),
    CONSTRAINT linkis_external_queue_unseen CHECK (unseen_memory >= 0 AND unseen_cores >= 0)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off);

-- What a snapshot says of a queue; written once, and removed when another is in force.
CREATE TABLE linkis_external_snapshot (
    cluster_id bigint NOT NULL,
    generation bigint NOT NULL,
    path text COLLATE "C" NOT NULL,
    -- What stands behind the last dot.
    last_name text COLLATE "C" NOT NULL,
    max_memory bigint NOT NULL,
    max_cores bigint NOT NULL,
    used_memory bigint NOT NULL,
    used_cores bigint NOT NULL,
    state text NOT NULL,
    CONSTRAINT linkis_external_snapshot_key PRIMARY KEY (cluster_id, generation, path)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, vacuum_truncate = off);
-- Names without a path.
CREATE INDEX linkis_external_snapshot_last_name ON linkis_external_snapshot (cluster_id, generation, last_name);

-- What a snapshot's use includes of applications that have anything; likewise.
CREATE TABLE linkis_external_application (
    cluster_id bigint NOT NULL,
    generation bigint NOT NULL,
    application_id text COLLATE "C" NOT NULL,
    memory bigint NOT NULL,
    cores bigint NOT NULL,
    CONSTRAINT linkis_external_application_key PRIMARY KEY (cluster_id, generation, application_id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, vacuum_truncate = off);

CREATE SEQUENCE linkis_external_generation AS bigint;

-- One row per ticket that is counted in a queue; after its end it stays until no snapshot is prepared that needs it.
CREATE TABLE linkis_external_ticket (
    ticket_id uuid NOT NULL,
    cluster_id bigint NOT NULL,
    path text COLLATE "C" NOT NULL,
    memory bigint NOT NULL,
    cores bigint NOT NULL,
    -- Since when it is used; null while it is locked.
    used_since timestamptz,
    application_id text COLLATE "C",
    -- The number of its last change among all changes of the cluster.
    change bigint NOT NULL,
    ended boolean NOT NULL,
    CONSTRAINT linkis_external_ticket_key PRIMARY KEY (ticket_id)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off);
-- What has changed since, and all tickets of a cluster.
CREATE INDEX linkis_external_ticket_change ON linkis_external_ticket (cluster_id, change);
-- What nobody needs any more.
CREATE INDEX linkis_external_ticket_ended ON linkis_external_ticket (cluster_id) WHERE ended;
-- Whose an application is.
CREATE INDEX linkis_external_ticket_application ON linkis_external_ticket (application_id) WHERE application_id IS NOT NULL;

-- One row per cluster: who asks it, and when it is asked again. Apart, so that nobody who counts waits for it.
CREATE TABLE linkis_external_refresh (
    cluster_id bigint NOT NULL,
    lease uuid,
    leased_until timestamptz,
    next_refresh timestamptz NOT NULL,
    failures integer NOT NULL DEFAULT 0,
    -- There is no such provider any more: what was counted is removed in steps, and this row with the rest.
    gone boolean NOT NULL DEFAULT false,
    CONSTRAINT linkis_external_refresh_key PRIMARY KEY (cluster_id),
    CONSTRAINT linkis_external_refresh_lease CHECK (num_nulls(lease, leased_until) IN (0, 2))
) WITH (fillfactor = 50);

-- Who waits at queues of a provider: nobody else is in it.
CREATE INDEX linkis_resource_waiting_entry_queue ON linkis_resource_waiting_entry ((wait_key -> 'queue' ->> 0)) WHERE wait_key ? 'queue';
