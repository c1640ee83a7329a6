-- A limit may guarantee amounts: dimensions and amounts as a JSON object, at most those of max_resource. An earlier release neither reads
-- nor changes it.
ALTER TABLE linkis_resource_limit ADD COLUMN guarantee jsonb NOT NULL DEFAULT '{}';
-- Null in rows of an earlier release, and of deleted limits.
ALTER TABLE linkis_resource_limit_change ADD COLUMN guarantee jsonb;
