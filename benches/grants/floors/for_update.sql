-- One grant as a good engineer writes it by default: both counters locked by SELECT ... FOR UPDATE in one transaction.
\set em random(1, :ems)
\set holder random(1, 1000)
BEGIN;
SELECT total, protected, used, locked, remaining FROM floor_em
    WHERE application = 'ecm' AND instance = 'host' || :em || ':9102' FOR UPDATE;
SELECT most, used, locked FROM floor_limit
    WHERE label = 'user' || :holder || '-IDE' FOR UPDATE;
INSERT INTO floor_ticket (ticket, holder, creator, em_application, em_instance, locked, locked_time)
    VALUES (gen_random_uuid(), 'user' || :holder, 'IDE', 'ecm', 'host' || :em || ':9102',
        '{"memory": 1073741824, "cores": 1, "instances": 1}', now());
UPDATE floor_em SET locked = jsonb_set(locked, '{cores}', to_jsonb((locked ->> 'cores')::bigint + 1))
    WHERE application = 'ecm' AND instance = 'host' || :em || ':9102';
UPDATE floor_limit SET locked = jsonb_set(locked, '{cores}', to_jsonb((locked ->> 'cores')::bigint + 1))
    WHERE label = 'user' || :holder || '-IDE';
COMMIT;
