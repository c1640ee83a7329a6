-- Holds are rows of their own, which each transaction reads under its locks. A request that may wait enters the queue at a held EM or
-- user; before, a hold was a committed resource lock, and each operation waited for the lock.

-- No transaction of an earlier release runs meanwhile, and none writes afterwards: it does not read the new table, and would change what
-- is held.
LOCK TABLE linkis_resource_lock IN ACCESS EXCLUSIVE MODE;
LOCK TABLE linkis_resource_limit_version IN ACCESS EXCLUSIVE MODE;
UPDATE linkis_resource_limit_version SET oldest_writer = 2, users_held = false;

-- One row is a hold of an EM or a user by an operator. It counts until its deadline; a task deletes it afterwards. Names are never empty:
-- an empty value means none. Calls make about 100 rows at most.
CREATE TABLE linkis_resource_hold (
    scope text COLLATE "C" NOT NULL,
    "user" text COLLATE "C" NOT NULL DEFAULT '',
    em_application_name text COLLATE "C" NOT NULL DEFAULT '',
    em_instance text COLLATE "C" NOT NULL DEFAULT '',
    reason text NOT NULL,
    held_by text COLLATE "C" NOT NULL,
    hold_time timestamptz NOT NULL,
    hold_until timestamptz NOT NULL,
    CONSTRAINT linkis_resource_hold_key PRIMARY KEY (scope, "user", em_application_name, em_instance),
    CONSTRAINT linkis_resource_hold_scope CHECK (
        (scope = 'em' AND "user" = '' AND em_application_name <> '' AND em_instance <> '')
        OR (scope = 'user' AND "user" <> '' AND em_application_name = '' AND em_instance = '')
    )
);
WITH moved AS (
    DELETE FROM linkis_resource_lock WHERE hold_until IS NOT NULL
    RETURNING scope, "user", em_application_name, em_instance, reason, held_by, hold_time, hold_until
)
INSERT INTO linkis_resource_hold SELECT * FROM moved;

-- An earlier release still reads the columns, and can set no hold there any more.
DROP INDEX linkis_resource_lock_hold;
ALTER TABLE linkis_resource_lock DROP CONSTRAINT linkis_resource_lock_hold;
ALTER TABLE linkis_resource_lock ADD CONSTRAINT linkis_resource_lock_no_hold
    CHECK (num_nulls(reason, held_by, hold_time, hold_until) = 4);
