-- Digest of the tickets of idle engines, as the rows of the tickets show them: a report with an equal digest writes nothing.
ALTER TABLE linkis_em_report ADD COLUMN idle_tickets bigint NOT NULL DEFAULT 0,
    ADD COLUMN idle_tickets_xor uuid NOT NULL DEFAULT '00000000-0000-0000-0000-000000000000';
