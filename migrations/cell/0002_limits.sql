-- Of a cell: which label sets are counted, and what their scopes hold. The rules themselves are home's.

-- One row: changes with every change of a rule, a policy, or a label set that is counted. Every transaction that grants or gives back
-- reads it, and so holds a shared lock on this table until it ends; one that changes any of these locks the table for itself,
-- for a moment. So no ticket is ever counted by what is just being changed.
CREATE TABLE linkis_resource_limit_version (
    only_row boolean NOT NULL DEFAULT true,
    -- Never repeated, not even by a database that was restored from a backup.
    version uuid NOT NULL,
    -- The oldest release that counts rightly: an older one may read, and refuses to write.
    oldest_writer integer NOT NULL,
    -- Whether an operator holds users: then their resource locks are taken although no rule counts by user.
    users_held boolean NOT NULL DEFAULT false,
    CONSTRAINT linkis_resource_limit_version_key PRIMARY KEY (only_row),
    CONSTRAINT linkis_resource_limit_version_one CHECK (only_row)
);
INSERT INTO linkis_resource_limit_version (version, oldest_writer) VALUES (gen_random_uuid(), 1);

-- One row per way to count: a label set that some rule has, counted for the kinds of EMs whose policies say so. Counters that are
-- new are made in steps beside the running ones, EM by EM; no rule decides by them until all tickets are counted.
CREATE TABLE linkis_label_set (
    -- Grows: an EM's row says up to which its tickets are counted.
    label_set_id bigint GENERATED ALWAYS AS IDENTITY,
    -- The names of the labels, as a JSON array in order.
    label_set jsonb NOT NULL,
    -- The kinds of EMs whose tickets do not count, as a JSON array in order.
    exempt jsonb NOT NULL,
    -- counting: counts beside the others; counted: decides; retired: counts no more, and its counters go.
    state text NOT NULL,
    CONSTRAINT linkis_label_set_key PRIMARY KEY (label_set_id),
    CONSTRAINT linkis_label_set_state CHECK (state IN ('counting', 'counted', 'retired'))
);

-- One row per scope: labels with their values, for every label set that is counted, and the sums over the live tickets that
-- carry them. A row of nothing is removed after a while.
CREATE TABLE linkis_label_resource (
    label_set_id bigint NOT NULL,
    -- The labels as a JSON object.
    scope jsonb NOT NULL,
    used_resource jsonb NOT NULL,
    locked_resource jsonb NOT NULL,
    -- SHA-256 of the label set's number and the scope, which may be longer than an index takes. Rows are locked in this order.
    scope_hash bytea NOT NULL,
    CONSTRAINT linkis_label_resource_key PRIMARY KEY (scope_hash),
    CONSTRAINT linkis_label_resource_hash CHECK (octet_length(scope_hash) = 32),
    CONSTRAINT linkis_label_resource_used_not_negative CHECK (NOT jsonb_path_exists(used_resource, '$.* ? (@ < 0)')),
    CONSTRAINT linkis_label_resource_locked_not_negative CHECK (NOT jsonb_path_exists(locked_resource, '$.* ? (@ < 0)'))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
-- Going through the counters of a label set in pages.
CREATE INDEX linkis_label_resource_label_set ON linkis_label_resource (label_set_id, scope_hash);

-- Who drives the background work that one instance does for all: it renews its row while it lives. Nothing is right or wrong by it,
-- only done twice or a moment later.
CREATE TABLE linkis_rm_lease (
    name text COLLATE "C" NOT NULL,
    instance_id uuid NOT NULL,
    held_until timestamptz NOT NULL,
    CONSTRAINT linkis_rm_lease_key PRIMARY KEY (name)
) WITH (fillfactor = 50);
