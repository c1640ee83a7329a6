-- One grant with lock rows that are inserted and deleted inside one transaction, so that the unique index does the waiting.
\set em random(1, :ems)
\set holder random(1, 1000)
BEGIN;
INSERT INTO floor_lock (scope, holder, application, instance)
    VALUES ('em', NULL, 'ecm', 'host' || :em || ':9102') ON CONFLICT DO NOTHING;
INSERT INTO floor_lock (scope, holder, application, instance)
    VALUES ('user', 'user' || :holder, NULL, NULL) ON CONFLICT DO NOTHING;
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
    WHERE scope = 'em' AND holder IS NULL AND application = 'ecm' AND instance = 'host' || :em || ':9102';
DELETE FROM floor_lock
    WHERE scope = 'user' AND holder = 'user' || :holder AND application IS NULL AND instance IS NULL;
COMMIT;
