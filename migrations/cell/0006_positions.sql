-- A position in the wait queue belongs to a request id: a later call with the same id takes it over, and it is kept for a while if the
-- caller is gone. An earlier release writes none of these columns: its positions end with their calls.
ALTER TABLE linkis_resource_waiting
    -- Call that owns the position. Null while the caller is absent, and in rows of an earlier release.
    ADD COLUMN claim uuid,
    ADD COLUMN request_id text COLLATE "C",
    -- SHA-256 of the request's body.
    ADD COLUMN body_hash bytea,
    -- Only while the caller is absent: the position is kept until then, and has no queue entries.
    ADD COLUMN kept_until timestamptz,
    ADD CONSTRAINT linkis_resource_waiting_request CHECK (num_nulls(request_id, body_hash) IN (0, 2) AND octet_length(body_hash) = 32),
    ADD CONSTRAINT linkis_resource_waiting_kept CHECK (kept_until IS NULL OR (claim IS NULL AND request_id IS NOT NULL));
CREATE UNIQUE INDEX linkis_resource_waiting_request_id ON linkis_resource_waiting ("user", request_id) WHERE request_id IS NOT NULL;
CREATE UNIQUE INDEX linkis_resource_waiting_claim ON linkis_resource_waiting (claim) WHERE claim IS NOT NULL;
