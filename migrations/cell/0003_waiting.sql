-- Of a cell: the waiting line: requests that wait for resources, on whatever instance of the service their callers wait.

-- One row per instance that has callers waiting. It renews its row while it lives; what waits on one that does not is ignored,
-- and soon removed.
CREATE TABLE linkis_rm_instance (
    instance_id uuid NOT NULL,
    alive_until timestamptz NOT NULL,
    CONSTRAINT linkis_rm_instance_key PRIMARY KEY (instance_id)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- One row per waiting request. Who waits stands in the order of one key, its position, which is written once and copied to every spot
-- where it stands: two spots with different orders would wait for each other.
CREATE TABLE linkis_resource_waiting (
    -- The ticket that will be granted.
    ticket_id uuid NOT NULL,
    instance_id uuid NOT NULL,
    -- Who asked.
    principal text COLLATE "C" NOT NULL,
    "user" text COLLATE "C" NOT NULL,
    creator text COLLATE "C" NOT NULL,
    engine_type text COLLATE "C" NOT NULL,
    -- Where it was judged last; any other EM will do as well if any_em.
    em_application_name text COLLATE "C" NOT NULL,
    em_instance text COLLATE "C" NOT NULL,
    any_em boolean NOT NULL,
    resource_type text NOT NULL,
    resource jsonb NOT NULL,
    labels jsonb NOT NULL,
    -- Whoever has the higher one stands first.
    priority smallint NOT NULL DEFAULT 0,
    -- Those who are granted together.
    group_id uuid,
    waiting_since timestamptz NOT NULL,
    wait_until timestamptz NOT NULL,
    -- Bytes in the order of the line: the priority, the time since when it waits, the ticket.
    position bytea NOT NULL,
    CONSTRAINT linkis_resource_waiting_key PRIMARY KEY (ticket_id),
    -- Listing in order.
    CONSTRAINT linkis_resource_waiting_position_key UNIQUE (position),
    CONSTRAINT linkis_resource_waiting_position CHECK (octet_length(position) = 26)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

-- One row per EM or limited scope where a request stands in line.
CREATE TABLE linkis_resource_waiting_entry (
    -- An EM, or the labels of a scope, as a JSON object.
    wait_key jsonb NOT NULL,
    ticket_id uuid NOT NULL,
    -- Those of the request, so that who stands at a spot is read without looking each request up.
    instance_id uuid NOT NULL,
    position bytea NOT NULL,
    resource_type text NOT NULL,
    resource jsonb NOT NULL,
    wait_until timestamptz NOT NULL,
    -- Whether it is short there; otherwise it is first in line elsewhere, and keeps its room here.
    is_short boolean NOT NULL,
    -- SHA-256 of the spot, which may be longer than an index takes.
    wait_key_hash bytea NOT NULL,
    -- By instance, so that however many stand there whose instances are dead, the first of those who live are found at once.
    CONSTRAINT linkis_resource_waiting_entry_key PRIMARY KEY (wait_key_hash, instance_id, position),
    CONSTRAINT linkis_resource_waiting_entry_hash CHECK (octet_length(wait_key_hash) = 32)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
-- Leaving the line.
CREATE INDEX linkis_resource_waiting_entry_ticket ON linkis_resource_waiting_entry (ticket_id);
