-- Reports of EMs: who lives, how well, and which engines it has.

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

-- In how many reports in a row a used ticket was missing.
ALTER TABLE linkis_user_resource_meta_data ADD COLUMN missed_reports smallint NOT NULL DEFAULT 0;

-- The digest of an EM's used tickets: how many there are, and their ids xored. A report with the same digest names just these, and
-- no ticket has to be read for it. A counter like the sums: it moves with them.
ALTER TABLE linkis_em_resource_meta_data
    ADD COLUMN used_tickets bigint NOT NULL DEFAULT 0,
    ADD COLUMN used_tickets_xor uuid NOT NULL DEFAULT '00000000-0000-0000-0000-000000000000';
UPDATE linkis_em_resource_meta_data e SET used_tickets = d.count,
    used_tickets_xor = (lpad(to_hex(d.high), 16, '0') || lpad(to_hex(d.low), 16, '0'))::uuid
FROM (
    SELECT em_application_name, em_instance, count(*),
        bit_xor(('x' || left(hex, 16))::bit(64)::bigint) AS high, bit_xor(('x' || right(hex, 16))::bit(64)::bigint) AS low
    FROM linkis_user_resource_meta_data, replace(ticket_id::text, '-', '') AS hex
    WHERE used_time IS NOT NULL GROUP BY em_application_name, em_instance
) AS d
WHERE e.em_application_name = d.em_application_name AND e.em_instance = d.em_instance;

-- A ticket or an EM can be lost, and an EM resized. What is there already satisfied the narrower check, and is not read again.
ALTER TABLE linkis_resource_action_record DROP CONSTRAINT linkis_resource_action_record_action;
ALTER TABLE linkis_resource_action_record ADD CONSTRAINT linkis_resource_action_record_action CHECK (
    (ticket_id IS NOT NULL AND "user" IS NOT NULL AND action IN ('granted', 'inited', 'released', 'expired', 'unregistered', 'lost'))
    OR (ticket_id IS NULL AND "user" IS NULL AND action IN ('registered', 'resized', 'unregistered', 'lost'))
) NOT VALID;
-- A ticket ends once.
DROP INDEX linkis_resource_action_record_end;
CREATE UNIQUE INDEX linkis_resource_action_record_end ON linkis_resource_action_record (ticket_id)
    WHERE action IN ('released', 'expired', 'unregistered', 'lost') AND ticket_id IS NOT NULL;
