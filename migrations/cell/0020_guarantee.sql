-- A request within the guarantees of its scopes is entitled: class 0. The scopes with guarantees: the first 64 bits of the SHA-256 of each,
-- null if there are none. An earlier release writes none, and its requests are not entitled.
ALTER TABLE linkis_resource_waiting ADD COLUMN guaranteed_scopes bigint[];
-- Amounts that entitled requests of a scope wait for. Without delayed insertion, so that a sum reads no list of pending entries.
CREATE INDEX linkis_resource_waiting_entitled ON linkis_resource_waiting USING gin (guaranteed_scopes)
    WITH (fastupdate = off) WHERE class = 0 AND guaranteed_scopes IS NOT NULL;
