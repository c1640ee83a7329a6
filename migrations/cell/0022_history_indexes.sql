-- Of a cell: how what was done to a user's tickets, on an EM, or by somebody, is found in a long history: by indexes of the parts that are
-- over. Nobody writes these any more, so that no grant pays for them; of the part that is being written, the last lines are looked through.
--
-- The function runs with the rights of whoever migrates, as those do that make and drop parts, and does nothing else.
DO $migration$
BEGIN
    EXECUTE format($function$
        CREATE FUNCTION %1$I.linkis_rm_index_history_part(part text, key text) RETURNS void
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = %1$I, pg_temp SET timezone = 'UTC'
        -- One core is enough for what nobody waits for.
        SET max_parallel_maintenance_workers = 0 AS $body$
        DECLARE
            key_column text := CASE key WHEN 'user' THEN '"user"' WHEN 'em' THEN 'em_instance' WHEN 'actor' THEN 'actor' END;
        BEGIN
            IF part !~ '^linkis_resource_action_record_[0-9]{10}_[0-9]{10}$' OR key_column IS NULL
                OR to_timestamp(right(part, 10), 'YYYYMMDDHH24') > clock_timestamp() - interval '10 minutes' THEN
                RAISE '%% is no part of the history that is over, or %% no key', part, key USING ERRCODE = 'invalid_parameter_value';
            END IF;
            EXECUTE format('CREATE INDEX IF NOT EXISTS %%I ON %%I (%%s, id) WHERE %%s IS NOT NULL', part || '_' || key, part, key_column,
                key_column);
        END $body$
    $function$, current_schema());
END $migration$;
REVOKE ALL ON FUNCTION linkis_rm_index_history_part(text, text) FROM PUBLIC;

-- What falls into no part is little, and over at any time.
CREATE INDEX linkis_resource_action_record_rest_user ON linkis_resource_action_record_rest ("user", id) WHERE "user" IS NOT NULL;
CREATE INDEX linkis_resource_action_record_rest_em ON linkis_resource_action_record_rest (em_instance, id) WHERE em_instance IS NOT NULL;
CREATE INDEX linkis_resource_action_record_rest_actor ON linkis_resource_action_record_rest (actor, id) WHERE actor IS NOT NULL;
