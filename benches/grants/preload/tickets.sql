-- 100 tickets on each of 10,000 EMs, 20 of each of 50,000 users; half of them are used. The first EM is the
-- "hot" EM of the load, and the next 100 are also EMs of the load.
INSERT INTO linkis_user_resource_meta_data (ticket_id, "user", creator, engine_type, em_application_name, em_instance,
    engine_application_name, engine_instance, resource_type, user_locked_resource, user_used_resource, labels,
    locked_time, used_time, expires_at)
SELECT
    -- Version 7: in the order of time.
    (lpad(to_hex((extract(epoch FROM now()) * 1000)::bigint - 3600000 + n), 12, '0') || '70008000' || lpad(to_hex(n), 12, '0'))::uuid,
    'user' || n % 50000 + 1, 'IDE', 'spark-3.2.1', 'ecm',
    CASE n % 10000 WHEN 0 THEN 'hot:9102' ELSE 'host' || n % 10000 || ':9102' END,
    CASE WHEN is_used THEN 'engine' END,
    CASE WHEN is_used THEN 'engine' || n END,
    'LoadInstance',
    CASE WHEN NOT is_used THEN one_engine END,
    CASE WHEN is_used THEN one_engine END,
    '{}', now(),
    CASE WHEN is_used THEN now() END,
    CASE WHEN NOT is_used THEN now() + interval '1 day' END
FROM generate_series(1, 1000000) AS n,
    (SELECT '{"memory": 1073741824, "cores": 1, "instances": 1}'::jsonb AS one_engine) AS amounts,
    LATERAL (SELECT n / 10000 % 2 = 0 AS is_used) AS states;
