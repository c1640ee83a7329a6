-- Placement bounds the grants on an EM whose registration is younger than this, in milliseconds; 0 for no bound. An earlier release
-- neither reads nor changes it.
ALTER TABLE linkis_em_meta_data
    ADD COLUMN em_new_after_ms integer NOT NULL DEFAULT 60000,
    ADD CONSTRAINT linkis_em_meta_data_em_new_after CHECK (em_new_after_ms = 0 OR em_new_after_ms BETWEEN 1000 AND 86400000);
