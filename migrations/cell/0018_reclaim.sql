-- Idle engines that are to end because requests wait. A background task writes the rows; no grant does.

-- One row is one ticket that is chosen for a waiting request.
CREATE TABLE linkis_reclaim (
    -- The ticket. Its row may be gone: the task then deletes this row.
    ticket_id uuid NOT NULL,
    -- Ticket id of the waiting request.
    for_ticket_id uuid NOT NULL,
    -- EM at which the request fits after the end.
    for_em_application_name text COLLATE "C" NOT NULL,
    for_em_instance text COLLATE "C" NOT NULL,
    -- Mode of the policy at the choice.
    mode text COLLATE "C" NOT NULL,
    chosen_time timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- End of the grace period.
    due_time timestamptz NOT NULL,
    -- Time of the recall: the engine is to end. Null before.
    recall_time timestamptz,
    CONSTRAINT linkis_reclaim_key PRIMARY KEY (ticket_id),
    CONSTRAINT linkis_reclaim_mode CHECK (mode IN ('OBSERVE', 'ADVISE', 'STOP')),
    CONSTRAINT linkis_reclaim_recalled CHECK (recall_time IS NULL OR mode <> 'OBSERVE')
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, vacuum_truncate = off);

-- Conditions on the EM of a waiting request that names none: {"application_name": ..., "required": {...}}.
ALTER TABLE linkis_resource_waiting ADD COLUMN em_selector jsonb;

-- One row: the run of the task that may write. Each write locks it.
CREATE TABLE linkis_reclaim_writer (
    only_row boolean NOT NULL DEFAULT true,
    writer uuid NOT NULL DEFAULT gen_random_uuid(),
    CONSTRAINT linkis_reclaim_writer_key PRIMARY KEY (only_row),
    CONSTRAINT linkis_reclaim_writer_one CHECK (only_row)
) WITH (fillfactor = 50);
INSERT INTO linkis_reclaim_writer DEFAULT VALUES;

-- The engines on an EM, of a user, and of all, that have been idle for the longest time. Changes of tickets wait while an index is created: one
-- scan of the table.
CREATE INDEX linkis_user_resource_idle_longest ON linkis_user_resource_meta_data (em_application_name, em_instance, idle_since)
    WHERE idle_since IS NOT NULL;
CREATE INDEX linkis_user_resource_idle_user ON linkis_user_resource_meta_data ("user", idle_since) WHERE idle_since IS NOT NULL;
CREATE INDEX linkis_user_resource_idle_since ON linkis_user_resource_meta_data (idle_since) WHERE idle_since IS NOT NULL;
