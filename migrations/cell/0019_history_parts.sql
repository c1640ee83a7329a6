-- Of a cell: how a service that may not change the schema has the parts of the history made and dropped.
--
-- Both functions run with the rights of whoever migrates, in the schema of these tables, and do nothing else: the one makes an empty part
-- of whole hours, of which there are never many; the other drops one that is over for longer than the shortest history reaches back.
-- Who may call them is granted, like all else (docs/SECURITY.md).
DO $migration$
BEGIN
    EXECUTE format($function$
        CREATE FUNCTION %1$I.linkis_rm_make_history_part(from_second bigint, until_second bigint) RETURNS void
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = %1$I, pg_temp SET timezone = 'UTC' AS $body$
        DECLARE
            begins timestamptz := to_timestamp(from_second);
            ends timestamptz := to_timestamp(until_second);
        BEGIN
            IF from_second %% 3600 <> 0 OR until_second %% 3600 <> 0 OR from_second >= until_second
                OR (SELECT count(*) FROM pg_inherits WHERE inhparent = 'linkis_resource_action_record'::regclass) >= 100 THEN
                RAISE 'no part of the history can be from %% until %%', begins, ends USING ERRCODE = 'invalid_parameter_value';
            END IF;
            EXECUTE format(
                'CREATE TABLE %%I PARTITION OF linkis_resource_action_record FOR VALUES FROM (%%L) TO (%%L)',
                'linkis_resource_action_record_' || to_char(begins, 'YYYYMMDDHH24') || '_' || to_char(ends, 'YYYYMMDDHH24'),
                begins, ends);
        END $body$
    $function$, current_schema());
    EXECUTE format($function$
        CREATE FUNCTION %1$I.linkis_rm_drop_history_part(part text) RETURNS void
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = %1$I, pg_temp SET timezone = 'UTC' AS $body$
        BEGIN
            IF part !~ '^linkis_resource_action_record_[0-9]{10}_[0-9]{10}$'
                OR to_timestamp(right(part, 10), 'YYYYMMDDHH24') > clock_timestamp() - interval '1 hour' THEN
                RAISE '%% is no part of the history that is over', part USING ERRCODE = 'invalid_parameter_value';
            END IF;
            EXECUTE format('DROP TABLE IF EXISTS %%I', part);
        END $body$
    $function$, current_schema());
END $migration$;
REVOKE ALL ON FUNCTION linkis_rm_make_history_part(bigint, bigint), linkis_rm_drop_history_part(text) FROM PUBLIC;
