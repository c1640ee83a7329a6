-- Limits, and what the scopes hold that they limit.

-- One row per rule.
CREATE TABLE linkis_resource_limit (
    -- The labels as a JSON object, each with its value, or null for each value on its own.
    pattern jsonb NOT NULL,
    -- The maximum by dimension, as a JSON object.
    max_resource jsonb NOT NULL,
    update_time timestamptz NOT NULL,
    -- The pattern may be longer than an index takes.
    pattern_hash bytea NOT NULL,
    CONSTRAINT linkis_resource_limit_key PRIMARY KEY (pattern_hash),
    CONSTRAINT linkis_resource_limit_hash CHECK (octet_length(pattern_hash) = 32),
    CONSTRAINT linkis_resource_limit_not_negative CHECK (NOT jsonb_path_exists(max_resource, '$.* ? (@ < 0)'))
);

-- One row: grows with every change of a rule. Every transaction that grants or gives back reads it, and so holds a shared lock on
-- this table until it ends; one that changes rules locks the table for itself. So no ticket is ever counted by rules that
-- are being changed.
CREATE TABLE linkis_resource_limit_version (
    only_row boolean NOT NULL DEFAULT true,
    version bigint NOT NULL,
    CONSTRAINT linkis_resource_limit_version_key PRIMARY KEY (only_row),
    CONSTRAINT linkis_resource_limit_version_one CHECK (only_row)
);
INSERT INTO linkis_resource_limit_version (version) VALUES (1);

-- One row per scope: labels with their values, for every label set that some rule has, and the sums over the live tickets that
-- carry them.
CREATE TABLE linkis_label_resource (
    -- The labels as a JSON object.
    scope jsonb NOT NULL,
    -- The names of the labels, as a JSON array in order.
    label_set jsonb NOT NULL,
    used_resource jsonb NOT NULL,
    locked_resource jsonb NOT NULL,
    -- SHA-256 of the scope, which may be longer than an index takes. Rows are locked in this order.
    scope_hash bytea NOT NULL,
    CONSTRAINT linkis_label_resource_key PRIMARY KEY (scope_hash),
    CONSTRAINT linkis_label_resource_hash CHECK (octet_length(scope_hash) = 32),
    CONSTRAINT linkis_label_resource_used_not_negative CHECK (NOT jsonb_path_exists(used_resource, '$.* ? (@ < 0)')),
    CONSTRAINT linkis_label_resource_locked_not_negative CHECK (NOT jsonb_path_exists(locked_resource, '$.* ? (@ < 0)'))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
-- Dropping the counters of a label set that no rule has any more.
CREATE INDEX linkis_label_resource_label_set ON linkis_label_resource (md5(label_set::text));
