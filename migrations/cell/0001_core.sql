-- Of a cell: everything that is found by its EM. No statement and no foreign key reaches from here into the tables of home.
--
-- The tables of the resource manager's core. Amounts are JSON documents in Linkis's form; keys compare by bytes (collation "C"),
-- in the order in which the service sorts its locks. All times are the database's.

-- One row per kind of EM: which checks the requests to it go through, by name: "em" always, and those of "creator", "user" and
-- "labels" whose limits its tickets count in.
CREATE TABLE linkis_em_meta_data (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    em_name text COLLATE "C" NOT NULL,
    resource_request_policy text NOT NULL,
    CONSTRAINT linkis_em_meta_data_em_name_key UNIQUE (em_name)
);

-- One row per registered EM: what it provides, and the sums over its live tickets.
CREATE TABLE linkis_em_resource_meta_data (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    em_application_name text COLLATE "C" NOT NULL,
    em_instance text COLLATE "C" NOT NULL,
    -- The type in which all five amounts are counted.
    resource_type text NOT NULL,
    total_resource jsonb NOT NULL,
    protected_resource jsonb NOT NULL,
    used_resource jsonb NOT NULL,
    locked_resource jsonb NOT NULL,
    -- The digest of the used tickets: how many there are, and their ids xored. A report with the same digest names just these, and
    -- no ticket has to be read for it. A counter like the sums: it moves with them.
    used_tickets bigint NOT NULL DEFAULT 0,
    used_tickets_xor uuid NOT NULL DEFAULT '00000000-0000-0000-0000-000000000000',
    -- total - protected - used - locked: written for readers, never decided upon.
    left_resource jsonb NOT NULL,
    -- True while a capacity that was lowered under live tickets drains; only then may left_resource be negative.
    over_committed boolean NOT NULL,
    labels jsonb NOT NULL,
    epoch bigint NOT NULL,
    register_time timestamptz NOT NULL,
    -- Every write states the version that it read.
    version bigint NOT NULL,
    -- An EM that goes: the tickets of its registrations up to this one end in steps, as told, in the order of their ids; those up
    -- to going_after have been seen. If it has not registered again since (epoch), its row goes last.
    going_epoch bigint,
    going_end text,
    going_after uuid,
    -- The counters of label sets up to this one count all of its tickets; while it is being counted, those up to counting_to count
    -- the tickets up to counted_after.
    counted_to bigint NOT NULL,
    counting_to bigint,
    counted_after uuid,
    CONSTRAINT linkis_em_resource_em_key UNIQUE (em_application_name, em_instance),
    CONSTRAINT linkis_em_resource_names CHECK (char_length(em_application_name) BETWEEN 1 AND 255 AND char_length(em_instance) BETWEEN 1 AND 255),
    CONSTRAINT linkis_em_resource_going CHECK (num_nulls(going_epoch, going_end, going_after) IN (0, 3)
        AND (going_end IS NULL OR going_end IN ('unregistered', 'lost')) AND going_epoch <= epoch),
    CONSTRAINT linkis_em_resource_counting CHECK (num_nulls(counting_to, counted_after) IN (0, 2) AND counted_to < counting_to),
    CONSTRAINT linkis_em_resource_used_not_negative CHECK (NOT jsonb_path_exists(used_resource, '$.** ? (@ < 0)')),
    CONSTRAINT linkis_em_resource_locked_not_negative CHECK (NOT jsonb_path_exists(locked_resource, '$.** ? (@ < 0)')),
    CONSTRAINT linkis_em_resource_never_over_committed CHECK (over_committed OR NOT jsonb_path_exists(left_resource, '$.** ? (@ < 0)'))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
-- fillfactor: counters are rewritten in place (HOT) at every commit.

-- Finding those that go.
CREATE INDEX linkis_em_resource_going ON linkis_em_resource_meta_data (em_application_name, em_instance) WHERE going_epoch IS NOT NULL;

-- One row per live ticket.
CREATE TABLE linkis_user_resource_meta_data (
    -- For people; without an index, which every grant would pay for.
    id bigint GENERATED ALWAYS AS IDENTITY,
    -- Version 7: in the order of time.
    ticket_id uuid NOT NULL,
    "user" text COLLATE "C" NOT NULL,
    creator text COLLATE "C" NOT NULL,
    engine_type text COLLATE "C" NOT NULL,
    em_application_name text COLLATE "C" NOT NULL,
    em_instance text COLLATE "C" NOT NULL,
    engine_application_name text COLLATE "C",
    engine_instance text COLLATE "C",
    resource_type text NOT NULL,
    user_locked_resource jsonb,
    user_used_resource jsonb,
    labels jsonb NOT NULL,
    locked_time timestamptz NOT NULL,
    used_time timestamptz,
    expires_at timestamptz,
    -- In how many reports in a row a used ticket was missing.
    missed_reports smallint NOT NULL DEFAULT 0,
    -- Who asked for it.
    principal text COLLATE "C" NOT NULL DEFAULT 'anonymous',
    priority smallint NOT NULL DEFAULT 0,
    -- Tickets that were asked for together.
    group_id uuid,
    -- The registration of its EM under which it was granted.
    em_epoch bigint NOT NULL DEFAULT 0,
    CONSTRAINT linkis_user_resource_ticket_key PRIMARY KEY (ticket_id),
    -- A ticket is locked, with a deadline and without an engine, or used, with an engine and without a deadline.
    CONSTRAINT linkis_user_resource_state CHECK (
        (user_locked_resource IS NOT NULL AND expires_at IS NOT NULL
            AND user_used_resource IS NULL AND used_time IS NULL AND engine_application_name IS NULL AND engine_instance IS NULL)
        OR (user_locked_resource IS NULL AND expires_at IS NULL
            AND user_used_resource IS NOT NULL AND used_time IS NOT NULL AND engine_application_name IS NOT NULL AND engine_instance IS NOT NULL)
    )
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

-- Going through an EM's tickets in steps, and listing by EM.
CREATE INDEX linkis_user_resource_em ON linkis_user_resource_meta_data (em_application_name, em_instance, ticket_id);
-- Listing by user.
CREATE INDEX linkis_user_resource_user ON linkis_user_resource_meta_data ("user", ticket_id);
-- Listing by state. A grant pays for the first alone: its tickets are in the order of time, so it grows at its end only.
CREATE INDEX linkis_user_resource_locked ON linkis_user_resource_meta_data (ticket_id) WHERE expires_at IS NOT NULL;
CREATE INDEX linkis_user_resource_used ON linkis_user_resource_meta_data (ticket_id) WHERE used_time IS NOT NULL;
-- Expiry: only locked tickets have a deadline.
CREATE INDEX linkis_user_resource_expiry ON linkis_user_resource_meta_data (expires_at, ticket_id) WHERE expires_at IS NOT NULL;

-- Makes requests repeatable. In a table of its own, because its key is not the tickets'.
CREATE TABLE linkis_request_id (
    request_id text COLLATE "C" NOT NULL,
    -- SHA-256 of the request's body.
    body_hash bytea NOT NULL,
    ticket_id uuid NOT NULL,
    em_application_name text COLLATE "C" NOT NULL,
    em_instance text COLLATE "C" NOT NULL,
    expires_at timestamptz NOT NULL,
    create_time timestamptz NOT NULL,
    CONSTRAINT linkis_request_id_key PRIMARY KEY (request_id),
    CONSTRAINT linkis_request_id_hash CHECK (octet_length(body_hash) = 32)
);
-- Retention.
CREATE INDEX linkis_request_id_create_time ON linkis_request_id (create_time);

-- The history: one row per change, written with it. Append-only; retention drops whole parts. A ticket ends once, because its row
-- is deleted once: a history parted by time can have no constraint that says so.
CREATE TABLE linkis_resource_action_record (
    -- In the order of time, within an EM and a user.
    id bigint GENERATED ALWAYS AS IDENTITY,
    action text NOT NULL,
    -- Not of an EM that registers or goes, nor of a rule.
    ticket_id uuid,
    "user" text COLLATE "C",
    creator text COLLATE "C",
    engine_type text COLLATE "C",
    labels jsonb,
    engine_application_name text COLLATE "C",
    engine_instance text COLLATE "C",
    em_application_name text COLLATE "C",
    em_instance text COLLATE "C",
    -- A scope has no EM: its repairs name its labels. Nor has a rule: its changes name its pattern. A label set whose rules begin to decide
    -- is the pattern of each of its labels. Of a policy, what it checks.
    scope jsonb,
    resource_type text NOT NULL,
    -- What the ticket holds after it, or held when it ended; of an EM, what it provides; of a repair, what the live tickets hold
    -- together, used and locked; of a rule, its maximum. Of scopes and rules a Special, with the dimensions named as limits name them.
    resource jsonb NOT NULL,
    -- Who did it; the service itself where nobody asked.
    actor text COLLATE "C" NOT NULL,
    action_time timestamptz NOT NULL,
    CONSTRAINT linkis_resource_action_record_key PRIMARY KEY (id, action_time),
    CONSTRAINT linkis_resource_action_record_action CHECK (
        (ticket_id IS NOT NULL AND num_nulls("user", creator, engine_type, labels, em_application_name, em_instance) = 0 AND scope IS NULL
            AND action IN ('granted', 'inited', 'released', 'expired', 'unregistered', 'lost'))
        OR (ticket_id IS NULL AND "user" IS NULL AND num_nulls(em_application_name, em_instance) = 0 AND scope IS NULL
            AND action IN ('registered', 'resized', 'unregistered', 'lost', 'repaired'))
        OR (ticket_id IS NULL AND "user" IS NULL AND num_nulls(em_application_name, em_instance) = 2 AND scope IS NOT NULL
            AND action IN ('repaired', 'limit_set', 'limit_deleted', 'limits_in_force'))
        OR (ticket_id IS NULL AND "user" IS NULL AND em_application_name IS NOT NULL AND em_instance IS NULL AND scope IS NOT NULL
            AND action = 'policy_set')
    )
) PARTITION BY RANGE (action_time);
-- The life of a ticket.
CREATE INDEX linkis_resource_action_record_ticket ON linkis_resource_action_record (ticket_id, id) WHERE ticket_id IS NOT NULL;
-- What falls into no part, because a clock jumped or nobody made one in time: nothing is lost for that.
CREATE TABLE linkis_resource_action_record_rest PARTITION OF linkis_resource_action_record DEFAULT;

-- Resource locks: one row per key that a transaction touches, inserted first and deleted before it commits, so that the primary key
-- makes others wait and no row is ever seen. A row that *is* seen is a hold put there by an operator's hand. Names are never
-- empty: an empty one is none.
CREATE TABLE linkis_resource_lock (
    scope text COLLATE "C" NOT NULL,
    "user" text COLLATE "C" NOT NULL DEFAULT '',
    em_application_name text COLLATE "C" NOT NULL DEFAULT '',
    em_instance text COLLATE "C" NOT NULL DEFAULT '',
    CONSTRAINT linkis_resource_lock_key PRIMARY KEY (scope, "user", em_application_name, em_instance),
    CONSTRAINT linkis_resource_lock_scope CHECK (
        (scope = 'em' AND "user" = '' AND em_application_name <> '' AND em_instance <> '')
        OR (scope = 'user' AND "user" <> '' AND em_application_name = '' AND em_instance = '')
    )
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 1000000000);
