-- Of a cell: use over time, and what is told of the cluster as a whole.

-- Of a line that tells of a ticket's end, when it was granted. What an earlier release writes leaves it out; then its grant is looked up.
ALTER TABLE linkis_resource_action_record ADD COLUMN held_since timestamptz;

-- One row per hour, way to sum, and name: what the tickets held that ended in that hour. Of so many names per hour and way, the rest are one
-- row.
CREATE TABLE linkis_resource_usage_hour (
    used_by text COLLATE "C" NOT NULL,
    -- The others, who have no name.
    is_rest boolean NOT NULL,
    -- Of an EM, its application's.
    name text COLLATE "C" NOT NULL,
    -- Of an EM; otherwise empty.
    em_instance text COLLATE "C" NOT NULL,
    hour timestamptz NOT NULL,
    tickets bigint NOT NULL,
    -- What was held at the end, times the time from the grant to the end; exact.
    core_seconds numeric NOT NULL,
    byte_seconds numeric NOT NULL,
    queue_core_seconds numeric NOT NULL,
    queue_byte_seconds numeric NOT NULL,
    -- In this order a page of names is read.
    CONSTRAINT linkis_resource_usage_hour_key PRIMARY KEY (used_by, is_rest, name, em_instance, hour),
    CONSTRAINT linkis_resource_usage_hour_by CHECK (used_by IN ('user', 'creator', 'engine_type', 'em')),
    CONSTRAINT linkis_resource_usage_hour_rest CHECK (NOT is_rest OR (name = '' AND em_instance = ''))
) WITH (fillfactor = 70, vacuum_truncate = off);
-- Counting the names of an hour, and removing old hours.
CREATE INDEX linkis_resource_usage_hour_hour ON linkis_resource_usage_hour (hour, used_by);

-- One row: how far the history is summed. It moves in the transaction that counts, and only from where that began: so each end counts once.
CREATE TABLE linkis_resource_usage_progress (
    only_row boolean NOT NULL DEFAULT true,
    -- The last line of the history that is counted, and all before it.
    last_number bigint NOT NULL,
    -- All tickets that ended before this are counted.
    complete_until timestamptz NOT NULL,
    CONSTRAINT linkis_resource_usage_progress_key PRIMARY KEY (only_row),
    CONSTRAINT linkis_resource_usage_progress_one CHECK (only_row)
) WITH (fillfactor = 50);
INSERT INTO linkis_resource_usage_progress (last_number, complete_until) VALUES (0, 'epoch');

-- What one instance works out of the cluster for all of them, by name: as JSON, because it is only told, and never decided upon.
CREATE TABLE linkis_rm_cluster_figure (
    name text COLLATE "C" NOT NULL,
    figures jsonb NOT NULL,
    work_time timestamptz NOT NULL,
    CONSTRAINT linkis_rm_cluster_figure_key PRIMARY KEY (name)
) WITH (fillfactor = 50, vacuum_truncate = off);
