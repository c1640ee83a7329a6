-- Of home: what is said once for all cells.

-- One row per rule.
CREATE TABLE linkis_resource_limit (
    -- The labels as a JSON object, each with its value, or null for each value on its own.
    pattern jsonb NOT NULL,
    -- The same for people and metrics: "user=hadoop,each creator".
    name text COLLATE "C" NOT NULL,
    -- The names of its labels, as a JSON array in order.
    label_set jsonb NOT NULL,
    -- The maximum by dimension, as a JSON object.
    max_resource jsonb NOT NULL,
    update_time timestamptz NOT NULL,
    -- Who set it last.
    updated_by text COLLATE "C" NOT NULL,
    -- The pattern may be longer than an index takes.
    pattern_hash bytea NOT NULL,
    CONSTRAINT linkis_resource_limit_key PRIMARY KEY (pattern_hash),
    CONSTRAINT linkis_resource_limit_hash CHECK (octet_length(pattern_hash) = 32),
    CONSTRAINT linkis_resource_limit_not_negative CHECK (NOT jsonb_path_exists(max_resource, '$.* ? (@ < 0)'))
);
