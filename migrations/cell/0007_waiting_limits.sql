-- A limit may name the number of waiting requests. A request that enters the queue is counted in the scopes whose limits name it: the
-- first 64 bits of the SHA-256 of each scope, null if there are none. An earlier release writes none.
ALTER TABLE linkis_resource_waiting ADD COLUMN waiting_scopes bigint[];
-- Counts of a scope. Without delayed insertion, so that a count reads no list of pending entries.
CREATE INDEX linkis_resource_waiting_scope ON linkis_resource_waiting USING gin (waiting_scopes)
    WITH (fastupdate = off) WHERE waiting_scopes IS NOT NULL;
