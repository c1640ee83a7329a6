-- Of a cell: which requests an EM is kept for, and how the EMs of a kind are chosen.

-- Only requests that carry all of these labels come in.
ALTER TABLE linkis_em_resource_meta_data ADD COLUMN reserved_labels jsonb NOT NULL DEFAULT '{}';

-- The labels that requests have to carry, and which EM with room is chosen: spread, the one with the largest free share; pack, the
-- one with the smallest.
ALTER TABLE linkis_em_meta_data ADD COLUMN required_labels text[] NOT NULL DEFAULT '{}';
ALTER TABLE linkis_em_meta_data ADD COLUMN placement text NOT NULL DEFAULT 'spread';
ALTER TABLE linkis_em_meta_data ADD CONSTRAINT linkis_em_meta_data_placement CHECK (placement IN ('spread', 'pack'));
