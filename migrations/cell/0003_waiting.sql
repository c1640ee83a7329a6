-- Of a cell: the waiting line: requests that wait for resources, on whatever instance of the service their callers wait.

-- One row per instance that has callers waiting. It renews its row while it lives; what waits on one that does not is ignored,
-- and soon removed.
CREATE TABLE linkis_rm_instance (
    instance_id uuid NOT NULL,
    alive_until timestamptz NOT NULL,
    CONSTRAINT linkis_rm_instance_key PRIMARY KEY (instance_id)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- One row per waiting request. Who came first stands first: by waiting_since, then ticket_id.
CREATE TABLE linkis_resource_waiting (
    -- The ticket that will be granted.
    ticket_id uuid NOT NULL,
    instance_id uuid NOT NULL,
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
    waiting_since timestamptz NOT NULL,
    wait_until timestamptz NOT NULL,
    CONSTRAINT linkis_resource_waiting_key PRIMARY KEY (ticket_id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
-- Listing in order.
CREATE INDEX linkis_resource_waiting_place ON linkis_resource_waiting (waiting_since, ticket_id);

-- One row per EM or limited scope where a request stands in line.
CREATE TABLE linkis_resource_waiting_spot (
    -- An EM, or the labels of a scope, as a JSON object.
    spot jsonb NOT NULL,
    ticket_id uuid NOT NULL,
    -- As of the request: who came first stands first.
    waiting_since timestamptz NOT NULL,
    -- Whether it is short there; otherwise it is first in line elsewhere, and keeps its room here.
    is_short boolean NOT NULL,
    -- SHA-256 of the spot, which may be longer than an index takes.
    spot_hash bytea NOT NULL,
    CONSTRAINT linkis_resource_waiting_spot_key PRIMARY KEY (spot_hash, waiting_since, ticket_id),
    CONSTRAINT linkis_resource_waiting_spot_hash CHECK (octet_length(spot_hash) = 32)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
-- Leaving the line.
CREATE INDEX linkis_resource_waiting_spot_ticket ON linkis_resource_waiting_spot (ticket_id);
