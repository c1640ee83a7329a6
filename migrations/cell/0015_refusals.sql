-- Of a cell: who was refused by what, how often.

-- One row per period, kind of refusal, and instance: what that instance has counted so far, so that writing it twice changes nothing. They are
-- added up when they are asked for. Each instance writes so many kinds per period and no more; the rest are others, whose user is empty.
CREATE TABLE linkis_resource_refusal (
    period_start timestamptz NOT NULL,
    -- SHA-256 of all that kinds are told apart by, which may be longer than an index takes.
    key_hash bytea NOT NULL,
    instance_id uuid NOT NULL,
    "user" text COLLATE "C" NOT NULL,
    -- What was short first, as the answers said.
    scope_kind text NOT NULL,
    scope text NOT NULL,
    dimension text NOT NULL,
    -- Empty for an EM.
    rule text NOT NULL,
    refusals bigint NOT NULL,
    -- Of the last of them.
    last_requested bigint NOT NULL,
    last_available bigint NOT NULL,
    last_time timestamptz NOT NULL,
    CONSTRAINT linkis_resource_refusal_key PRIMARY KEY (period_start, key_hash, instance_id),
    CONSTRAINT linkis_resource_refusal_hash CHECK (octet_length(key_hash) = 32),
    CONSTRAINT linkis_resource_refusal_count CHECK (refusals > 0),
    CONSTRAINT linkis_resource_refusal_kind CHECK (scope_kind IN ('em', 'creator', 'user', 'labels', 'queue'))
) WITH (fillfactor = 50, vacuum_truncate = off);
-- fillfactor: sums are rewritten in place (HOT) as long as their period runs.

-- Listing by user.
CREATE INDEX linkis_resource_refusal_user ON linkis_resource_refusal ("user", period_start, key_hash);
