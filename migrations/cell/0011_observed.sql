-- Of a cell: what EMs observe of the engines of their tickets. Nothing is decided by it.

-- One row per EM that has ever told; it goes with the EM's report. Besides the key nothing is indexed, so that it is rewritten in place.
CREATE TABLE linkis_em_observed (
    em_application_name text COLLATE "C" NOT NULL,
    em_instance text COLLATE "C" NOT NULL,
    -- The report that told it: the last one that told any.
    epoch bigint NOT NULL,
    sequence bigint NOT NULL,
    -- SHA-256 of the tickets, and of the types and queues that are told of: while it stays the same, no ticket need be read.
    subject_hash bytea NOT NULL,
    -- The tickets with their amounts, packed.
    observed bytea NOT NULL,
    observed_time timestamptz NOT NULL,
    CONSTRAINT linkis_em_observed_key PRIMARY KEY (em_application_name, em_instance),
    CONSTRAINT linkis_em_observed_hash CHECK (octet_length(subject_hash) = 32)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
-- It is packed already.
ALTER TABLE linkis_em_observed ALTER COLUMN observed SET STORAGE EXTERNAL;
