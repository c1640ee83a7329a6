-- Schema of the work of one grant on plain PostgreSQL: EMs with five amounts each, one limit per user, the tickets, and lock rows.

CREATE TABLE floor_em (
    id bigserial PRIMARY KEY,
    application text NOT NULL,
    instance text NOT NULL,
    total jsonb NOT NULL,
    protected jsonb NOT NULL,
    used jsonb NOT NULL,
    locked jsonb NOT NULL,
    remaining jsonb NOT NULL,
    UNIQUE (application, instance)
) WITH (fillfactor = 50);

CREATE TABLE floor_limit (
    label text PRIMARY KEY,
    most jsonb NOT NULL,
    used jsonb NOT NULL,
    locked jsonb NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE floor_ticket (
    id bigserial PRIMARY KEY,
    ticket uuid NOT NULL UNIQUE,
    holder text NOT NULL,
    creator text NOT NULL,
    em_application text NOT NULL,
    em_instance text NOT NULL,
    locked jsonb,
    used jsonb,
    locked_time timestamptz,
    used_time timestamptz
);
CREATE INDEX floor_ticket_em ON floor_ticket (em_application, em_instance);
CREATE INDEX floor_ticket_holder ON floor_ticket (holder, creator);

CREATE TABLE floor_lock (
    id bigserial PRIMARY KEY,
    scope text NOT NULL,
    holder text,
    application text,
    instance text,
    UNIQUE NULLS NOT DISTINCT (scope, holder, application, instance)
);

-- Inserts a lock row that all sessions see, after the row of another session has been removed.
CREATE PROCEDURE floor_poll_lock(p_scope text, p_holder text, p_application text, p_instance text, seconds float)
LANGUAGE plpgsql AS $$
DECLARE inserted int;
BEGIN
    LOOP
        PERFORM FROM floor_lock WHERE scope = p_scope AND holder IS NOT DISTINCT FROM p_holder
            AND application IS NOT DISTINCT FROM p_application AND instance IS NOT DISTINCT FROM p_instance;
        IF NOT FOUND THEN
            INSERT INTO floor_lock (scope, holder, application, instance)
                VALUES (p_scope, p_holder, p_application, p_instance) ON CONFLICT DO NOTHING;
            GET DIAGNOSTICS inserted = ROW_COUNT;
            COMMIT;
            IF inserted = 1 THEN
                RETURN;
            END IF;
        END IF;
        COMMIT;
        PERFORM pg_sleep(seconds);
    END LOOP;
END $$;

-- So large that nothing is ever refused.
INSERT INTO floor_em (application, instance, total, protected, used, locked, remaining)
SELECT 'ecm', 'host' || n || ':9102', huge, nothing, nothing, nothing, huge
FROM generate_series(1, 100) AS n,
    (SELECT '{"memory": 1000000000000000000, "cores": 1000000000, "instances": 1000000000}'::jsonb AS huge,
            '{"memory": 0, "cores": 0, "instances": 0}'::jsonb AS nothing) AS amounts;

INSERT INTO floor_limit (label, most, used, locked)
SELECT 'user' || n || '-IDE', huge, nothing, nothing
FROM generate_series(1, 1000) AS n,
    (SELECT '{"memory": 1000000000000000000, "cores": 1000000000, "instances": 1000000000}'::jsonb AS huge,
            '{"memory": 0, "cores": 0, "instances": 0}'::jsonb AS nothing) AS amounts;

ANALYZE;
