-- Creates the schema {cell}_local on the worker that owns the cell {cell}: views with the names of the cell's tables.
--
-- On the worker, each table is a shard whose name is the table's name and a number. A view over the shard has the table's name; a write
-- into the view is a write into the shard, with the shard's defaults. The schema is local to this worker: Citus neither distributes nor
-- moves it, and drops the views with the shards that a move of the cell leaves behind.
DO $make$
DECLARE
    here constant int := (SELECT groupid FROM pg_catalog.pg_dist_local_group);
    shards record;
    seen text[];
    is_seen boolean;
    numbered record;
    numbers text;
    lock_shard bigint;
BEGIN
    PERFORM set_config('citus.enable_ddl_propagation', 'off', true), set_config('citus.enable_manual_changes_to_shards', 'on', true),
        set_config('citus.override_table_visibility', 'off', true), set_config('lock_timeout', '2s', true),
        set_config('client_min_messages', 'warning', true),
        set_config('search_path', 'pg_catalog', true);
    SELECT shardid INTO STRICT lock_shard FROM pg_dist_shard WHERE logicalrelid = '{cell}.linkis_resource_lock'::regclass;
    -- One instance at a time.
    EXECUTE format('LOCK TABLE %s IN SHARE ROW EXCLUSIVE MODE', (
        SELECT shard_name(logicalrelid, shardid) FROM pg_dist_shard WHERE logicalrelid = '{cell}.linkis_rm_migration_cell'::regclass));
    CREATE SCHEMA IF NOT EXISTS {cell}_local;
    -- Each write takes the lock that Citus takes for its own writes. A move of the cell waits for its owners and then keeps it until the cell
    -- is on the other worker. A later write here would be lost, so it is refused.
    EXECUTE format($function$
        CREATE OR REPLACE FUNCTION {cell}_local.linkis_rm_writes() RETURNS trigger LANGUAGE plpgsql AS $body$
        BEGIN
            -- Once per transaction; the setting ends with the transaction.
            IF pg_catalog.current_setting('linkis_rm.writes', true) = 'here' THEN
                RETURN NULL;
            END IF;
            PERFORM pg_catalog.lock_shard_metadata(5, '{%1$s}');
            IF NOT EXISTS (SELECT FROM pg_catalog.pg_dist_placement WHERE shardid = %1$s AND groupid = %2$s) THEN
                RAISE 'the cell {cell} is on another worker now' USING ERRCODE = 'read_only_sql_transaction';
            END IF;
            PERFORM pg_catalog.set_config('linkis_rm.writes', 'here', true);
            RETURN NULL;
        END $body$
    $function$, lock_shard, here);
    FOR shards IN
        SELECT c.relname AS name, c.oid AS distributed, shard_name(c.oid, s.shardid) AS shard, ARRAY (
                SELECT attname::text FROM pg_attribute
                WHERE attrelid = shard_name(c.oid, s.shardid)::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum) AS columns
        FROM pg_dist_shard s JOIN pg_dist_placement p USING (shardid) JOIN pg_class c ON c.oid = s.logicalrelid
        WHERE c.relnamespace = '{cell}'::regnamespace AND p.groupid = here
            -- Statements name no partition of a table but the default one.
            AND (NOT c.relispartition OR EXISTS (SELECT FROM pg_partitioned_table WHERE partdefid = c.oid))
        ORDER BY c.relname
    LOOP
        seen := ARRAY (SELECT attname::text FROM pg_attribute
            WHERE attrelid = to_regclass(format('{cell}_local.%I', shards.name)) AND attnum > 0 AND NOT attisdropped ORDER BY attnum);
        is_seen := cardinality(seen) > 0;
        CONTINUE WHEN is_seen AND seen = 'ctid'::text || shards.columns;
        EXECUTE format('CREATE OR REPLACE VIEW {cell}_local.%I AS SELECT ctid, %s FROM %s', shards.name, (
            SELECT string_agg(quote_ident(name), ', ' ORDER BY number)
            FROM unnest(shards.columns) WITH ORDINALITY AS u (name, number)), shards.shard);
        -- A shard does not number its rows. New numbers are above all earlier ones of any worker, deleted rows included, because they start
        -- at the microseconds of the clock and fewer than a million are used per second.
        FOR numbered IN
            SELECT attname::text AS name FROM pg_attribute
            WHERE attrelid = shards.distributed AND attidentity <> '' AND attname <> ALL (seen)
        LOOP
            numbers := format('{cell}_local.%I', shards.name || '_' || numbered.name || '_seq');
            EXECUTE format('DROP SEQUENCE IF EXISTS %s', numbers);
            EXECUTE format('CREATE SEQUENCE %s', numbers);
            EXECUTE format('SELECT setval(%L, greatest((SELECT max(%I) FROM %s), (extract(epoch FROM clock_timestamp()) * 1000000)::bigint))',
                numbers, numbered.name, shards.shard);
            EXECUTE format('ALTER VIEW {cell}_local.%I ALTER COLUMN %I SET DEFAULT nextval(%L)', shards.name, numbered.name, numbers);
        END LOOP;
        CONTINUE WHEN is_seen;
        EXECUTE format('CREATE TRIGGER linkis_rm_writes BEFORE INSERT OR UPDATE OR DELETE ON %s
            FOR EACH STATEMENT EXECUTE FUNCTION {cell}_local.linkis_rm_writes()', shards.shard);
    END LOOP;
END $make$
