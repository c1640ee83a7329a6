-- Adds linkis_user_request_id: a request id is the name of a request of one user, and no longer one name for all users. No lock on existing
-- tables.
--
-- linkis_request_id, which earlier releases write, stays as it is: it is read until its rows expire. The first instance that would write the
-- new table keeps earlier releases from writing, after their batches have ended.

-- One row is one request of a user that was granted under an id.
CREATE TABLE linkis_user_request_id (
    "user" text COLLATE "C" NOT NULL,
    request_id text COLLATE "C" NOT NULL,
    -- SHA-256 of the request's body.
    body_hash bytea NOT NULL,
    ticket_id uuid NOT NULL,
    em_application_name text COLLATE "C" NOT NULL,
    em_instance text COLLATE "C" NOT NULL,
    expires_at timestamptz NOT NULL,
    create_time timestamptz NOT NULL,
    CONSTRAINT linkis_user_request_id_key PRIMARY KEY ("user", request_id),
    CONSTRAINT linkis_user_request_id_hash CHECK (octet_length(body_hash) = 32)
) WITH (vacuum_truncate = off);
-- Retention.
CREATE INDEX linkis_user_request_id_create_time ON linkis_user_request_id (create_time);
