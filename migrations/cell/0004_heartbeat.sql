-- Of a cell: reports of EMs: who lives, how well, and which engines it has.

-- One row per EM that has ever reported; it goes with the EM. No column but the key is indexed: a report rewrites its row in place
-- (HOT), which is worth more than finding the silent ones by an index.
CREATE TABLE linkis_em_report (
    em_application_name text COLLATE "C" NOT NULL,
    em_instance text COLLATE "C" NOT NULL,
    -- The registration that the last report was for, and the report's number within it.
    epoch bigint NOT NULL,
    sequence bigint NOT NULL,
    health text NOT NULL,
    -- The load: all three, or none if the report did not tell it. Bytes, and thousandths of the host's cores.
    memory_used bigint,
    memory_max bigint,
    cpu_permille smallint,
    report_time timestamptz NOT NULL,
    -- Whether some ticket of the EM may have missed_reports above 0. While nothing is known yet, some may.
    any_missed boolean NOT NULL DEFAULT true,
    CONSTRAINT linkis_em_report_key PRIMARY KEY (em_application_name, em_instance),
    CONSTRAINT linkis_em_report_sequence CHECK (sequence > 0),
    CONSTRAINT linkis_em_report_health CHECK (health IN ('healthy', 'warn', 'unhealthy')),
    CONSTRAINT linkis_em_report_load CHECK (
        num_nulls(memory_used, memory_max, cpu_permille) = 3
        OR (num_nulls(memory_used, memory_max, cpu_permille) = 0
            AND memory_used BETWEEN 0 AND memory_max AND cpu_permille BETWEEN 0 AND 1000)
    )
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
