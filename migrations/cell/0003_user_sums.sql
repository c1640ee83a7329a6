-- The use of each user, for the list of the users with the most use. A background task writes both tables; no grant does.

-- One row is the use of one user in one dimension: sums of the live tickets. A row without use is deleted.
CREATE TABLE linkis_user_sum (
    "user" text COLLATE "C" NOT NULL,
    -- Name of the dimension, as in limits; empty for the number of tickets.
    dimension text COLLATE "C" NOT NULL,
    used bigint NOT NULL,
    locked bigint NOT NULL,
    -- used + locked, negative: an index in ascending order lists the largest first.
    rank bigint NOT NULL,
    CONSTRAINT linkis_user_sum_key PRIMARY KEY ("user", dimension),
    CONSTRAINT linkis_user_sum_amounts CHECK (used >= 0 AND locked >= 0 AND rank < 0)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off);
-- Pages of users by their use in one dimension.
CREATE INDEX linkis_user_sum_rank ON linkis_user_sum (dimension, rank, "user");

-- One row: the writer of the sums, and the summed part of the history. It changes in the transaction that writes the sums, and only from
-- the expected value.
CREATE TABLE linkis_user_sum_progress (
    only_row boolean NOT NULL DEFAULT true,
    -- Identifies one run of the task, which has all live tickets in memory.
    writer uuid NOT NULL DEFAULT gen_random_uuid(),
    -- Id of the last row of the history that the sums include.
    last_number bigint NOT NULL DEFAULT 0,
    -- The sums include all changes before this time.
    complete_until timestamptz NOT NULL DEFAULT 'epoch',
    CONSTRAINT linkis_user_sum_progress_key PRIMARY KEY (only_row),
    CONSTRAINT linkis_user_sum_progress_one CHECK (only_row)
) WITH (fillfactor = 50);
INSERT INTO linkis_user_sum_progress DEFAULT VALUES;
