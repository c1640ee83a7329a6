-- One grant with every statement a transaction of its own: both checks, lock rows inserted and polled for every 10 ms, both checks
-- again, the writes, and the lock rows deleted.
\set em random(1, :ems)
\set holder random(1, 1000)
SELECT total, protected, used, locked, remaining FROM floor_em
    WHERE application = 'ecm' AND instance = 'host' || :em || ':9102';
SELECT most, used, locked FROM floor_limit
    WHERE label = 'user' || :holder || '-IDE';
CALL floor_poll_lock('em', NULL, 'ecm', 'host' || :em || ':9102', 0.01);
CALL floor_poll_lock('user', 'user' || :holder, 'ecm', 'host' || :em || ':9102', 0.01);
SELECT total, protected, used, locked, remaining FROM floor_em
    WHERE application = 'ecm' AND instance = 'host' || :em || ':9102';
SELECT most, used, locked FROM floor_limit
    WHERE label = 'user' || :holder || '-IDE';
INSERT INTO floor_ticket (ticket, holder, creator, em_application, em_instance, locked, locked_time)
    VALUES (gen_random_uuid(), 'user' || :holder, 'IDE', 'ecm', 'host' || :em || ':9102',
        '{"memory": 1073741824, "cores": 1, "instances": 1}', now());
UPDATE floor_em SET locked = jsonb_set(locked, '{cores}', to_jsonb((locked ->> 'cores')::bigint + 1))
    WHERE application = 'ecm' AND instance = 'host' || :em || ':9102';
UPDATE floor_limit SET locked = jsonb_set(locked, '{cores}', to_jsonb((locked ->> 'cores')::bigint + 1))
    WHERE label = 'user' || :holder || '-IDE';
DELETE FROM floor_lock
    WHERE scope = 'user' AND holder = 'user' || :holder AND application = 'ecm' AND instance = 'host' || :em || ':9102';
DELETE FROM floor_lock
    WHERE scope = 'em' AND holder IS NULL AND application = 'ecm' AND instance = 'host' || :em || ':9102';
