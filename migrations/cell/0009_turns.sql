-- Users take turns: the order of waiting requests. An earlier release writes none of these columns: its requests have no turns, and go
-- by entry time.
ALTER TABLE linkis_resource_waiting
    -- The labels whose requests take turns, as user=alice; constant while the request waits.
    ADD COLUMN turn text COLLATE "C",
    -- 0: a first within its guarantees; 1: a first; 2: behind an own request.
    ADD COLUMN class smallint NOT NULL DEFAULT 1,
    -- Start of waiting at a key where other turns wait, too. Null in rows of an earlier release: waiting_since.
    ADD COLUMN entered timestamptz,
    -- Time by which a first goes.
    ADD COLUMN rank_time timestamptz,
    -- Whether the request has been short at a key where other turns wait, too.
    ADD COLUMN was_shared boolean NOT NULL DEFAULT true,
    -- SHA-256 of the conditions on the EM, if the request names none.
    ADD COLUMN em_conditions bytea,
    ADD CONSTRAINT linkis_resource_waiting_class CHECK (class BETWEEN 0 AND 2),
    ADD CONSTRAINT linkis_resource_waiting_rank CHECK (num_nulls(entered, rank_time) IN (0, 2) AND rank_time >= entered),
    ADD CONSTRAINT linkis_resource_waiting_conditions CHECK (octet_length(em_conditions) = 32);
-- The latest rank time.
CREATE INDEX linkis_resource_waiting_rank_time ON linkis_resource_waiting (rank_time);
-- Firsts of a turn.
CREATE INDEX linkis_resource_waiting_firsts ON linkis_resource_waiting (turn) WHERE class < 2;
ALTER TABLE linkis_resource_waiting_entry
    -- SHA-256 of the turn and of the key at which its requests take turns. Null where the request is not short.
    ADD COLUMN turn_key bytea,
    -- Entry time less the head start: the order of own requests.
    ADD COLUMN own_time timestamptz,
    ADD CONSTRAINT linkis_resource_waiting_entry_turn CHECK (num_nulls(turn_key, own_time) IN (0, 2) AND octet_length(turn_key) = 32);
CREATE INDEX linkis_resource_waiting_entry_own ON linkis_resource_waiting_entry (turn_key, own_time, ticket_id) WHERE turn_key IS NOT NULL;
