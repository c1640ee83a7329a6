-- Tables of a cell: data that is found by its EM. No statement and no foreign key leads from here into the tables of home.
--
-- Amounts are JSON documents in Linkis's form. Keys compare by bytes (collation "C"), in the order in which the service sorts its
-- locks. All times are the database's.
--
-- Tables with frequent updates have their own autovacuum settings, and vacuum_truncate = off: a vacuum that returns the end of a table
-- to the file system locks the table for 20 ms and more, each time. A fillfactor leaves space to rewrite a row in place (HOT).

-- EMs and tickets ------------------------------------------------------------------------------------------------------------------

-- One row is the policy of one kind of EM.
CREATE TABLE linkis_em_meta_data (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    em_name text COLLATE "C" NOT NULL,
    -- Names of the checks of a request: "em" always, and those of "creator", "user" and "labels" whose limits apply to its tickets.
    resource_request_policy text NOT NULL,
    -- Names of the labels that a request must carry.
    required_labels text[] NOT NULL DEFAULT '{}',
    -- Placement: spread selects the EM with the largest free share, pack the one with the smallest.
    placement text NOT NULL DEFAULT 'spread',
    CONSTRAINT linkis_em_meta_data_em_name_key UNIQUE (em_name),
    CONSTRAINT linkis_em_meta_data_placement CHECK (placement IN ('spread', 'pack'))
);

-- One row is one registered EM: its capacity, and the sums of its live tickets.
CREATE TABLE linkis_em_resource_meta_data (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    em_application_name text COLLATE "C" NOT NULL,
    em_instance text COLLATE "C" NOT NULL,
    -- Type of the five amounts.
    resource_type text NOT NULL,
    total_resource jsonb NOT NULL,
    protected_resource jsonb NOT NULL,
    used_resource jsonb NOT NULL,
    locked_resource jsonb NOT NULL,
    -- Digest of the used tickets: their number, and the exclusive or of their ids. A report with the same digest lists exactly these
    -- tickets, and no ticket has to be read. The digest changes together with the sums.
    used_tickets bigint NOT NULL DEFAULT 0,
    used_tickets_xor uuid NOT NULL DEFAULT '00000000-0000-0000-0000-000000000000',
    -- total - protected - used - locked, for readers of the table. No decision uses it.
    left_resource jsonb NOT NULL,
    -- True while tickets exceed a lowered capacity. Only then may left_resource be negative.
    over_committed boolean NOT NULL,
    labels jsonb NOT NULL,
    epoch bigint NOT NULL,
    register_time timestamptz NOT NULL,
    -- Write counter. Each update states the version that it read.
    version bigint NOT NULL,
    -- End of an unregistered or lost EM: the tickets of the registrations up to going_epoch end in steps, in the order of their ids;
    -- going_after is the last ended one. The row is deleted last, unless the EM has registered again (epoch).
    going_epoch bigint,
    going_end text,
    going_after uuid,
    -- Label sets up to counted_to count all tickets of the EM. During a count, label sets up to counting_to count the tickets up to
    -- counted_after.
    counted_to bigint NOT NULL,
    counting_to bigint,
    counted_after uuid,
    -- Only requests that carry all of these labels are placed on the EM.
    reserved_labels jsonb NOT NULL DEFAULT '{}',
    CONSTRAINT linkis_em_resource_em_key UNIQUE (em_application_name, em_instance),
    CONSTRAINT linkis_em_resource_names CHECK (char_length(em_application_name) BETWEEN 1 AND 255 AND char_length(em_instance) BETWEEN 1 AND 255),
    CONSTRAINT linkis_em_resource_going CHECK (num_nulls(going_epoch, going_end, going_after) IN (0, 3)
        AND (going_end IS NULL OR going_end IN ('unregistered', 'lost')) AND going_epoch <= epoch),
    CONSTRAINT linkis_em_resource_counting CHECK (num_nulls(counting_to, counted_after) IN (0, 2) AND counted_to < counting_to),
    CONSTRAINT linkis_em_resource_used_not_negative CHECK (NOT jsonb_path_exists(used_resource, '$.** ? (@ < 0)')),
    CONSTRAINT linkis_em_resource_locked_not_negative CHECK (NOT jsonb_path_exists(locked_resource, '$.** ? (@ < 0)')),
    CONSTRAINT linkis_em_resource_never_over_committed CHECK (over_committed OR NOT jsonb_path_exists(left_resource, '$.** ? (@ < 0)'))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off);
-- EMs whose tickets end in steps.
CREATE INDEX linkis_em_resource_going ON linkis_em_resource_meta_data (em_application_name, em_instance) WHERE going_epoch IS NOT NULL;

-- One row is one EM that accepts no new tickets. The row stays when the EM registers again or is removed; Resume deletes it.
CREATE TABLE linkis_em_drain (
    em_application_name text COLLATE "C" NOT NULL,
    em_instance text COLLATE "C" NOT NULL,
    reason text NOT NULL,
    drained_by text COLLATE "C" NOT NULL,
    drain_time timestamptz NOT NULL,
    CONSTRAINT linkis_em_drain_key PRIMARY KEY (em_application_name, em_instance)
);

-- One row is one live ticket.
CREATE TABLE linkis_user_resource_meta_data (
    -- For display. Without an index, because each grant would write it.
    id bigint GENERATED ALWAYS AS IDENTITY,
    -- UUID of version 7: in the order of time.
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
    -- Number of successive reports without this used ticket.
    missed_reports smallint NOT NULL DEFAULT 0,
    -- Principal of the request.
    principal text COLLATE "C" NOT NULL DEFAULT 'anonymous',
    priority smallint NOT NULL DEFAULT 0,
    -- Registration of the EM at the time of the grant.
    em_epoch bigint NOT NULL DEFAULT 0,
    CONSTRAINT linkis_user_resource_ticket_key PRIMARY KEY (ticket_id),
    -- A ticket is locked, with a deadline and without an engine, or used, with an engine and without a deadline.
    CONSTRAINT linkis_user_resource_state CHECK (
        (user_locked_resource IS NOT NULL AND expires_at IS NOT NULL
            AND user_used_resource IS NULL AND used_time IS NULL AND engine_application_name IS NULL AND engine_instance IS NULL)
        OR (user_locked_resource IS NULL AND expires_at IS NULL
            AND user_used_resource IS NOT NULL AND used_time IS NOT NULL AND engine_application_name IS NOT NULL AND engine_instance IS NOT NULL)
    )
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0, vacuum_truncate = off);
-- Tickets of an EM, in steps and in lists.
CREATE INDEX linkis_user_resource_em ON linkis_user_resource_meta_data (em_application_name, em_instance, ticket_id);
-- Lists by user.
CREATE INDEX linkis_user_resource_user ON linkis_user_resource_meta_data ("user", ticket_id);
-- Lists by state. A grant writes only the first of these two indexes, at its end, because ticket ids are in the order of time.
CREATE INDEX linkis_user_resource_locked ON linkis_user_resource_meta_data (ticket_id) WHERE expires_at IS NOT NULL;
CREATE INDEX linkis_user_resource_used ON linkis_user_resource_meta_data (ticket_id) WHERE used_time IS NOT NULL;
-- Expiry: only locked tickets have a deadline.
CREATE INDEX linkis_user_resource_expiry ON linkis_user_resource_meta_data (expires_at, ticket_id) WHERE expires_at IS NOT NULL;
-- Tickets of an engine. Locked tickets have no engine, so that a grant does not write the index.
CREATE INDEX linkis_user_resource_engine ON linkis_user_resource_meta_data (engine_application_name, engine_instance, ticket_id)
    WHERE engine_instance IS NOT NULL;

-- One row is one request of a user that was granted under a request id.
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

-- One row is one resource lock. A transaction inserts a row for each EM and user that it changes, and deletes the row before it
-- commits: the primary key makes other transactions wait, and no other transaction sees the row. A visible row is a hold by an
-- operator. Names are never empty: an empty value means none.
CREATE TABLE linkis_resource_lock (
    scope text COLLATE "C" NOT NULL,
    "user" text COLLATE "C" NOT NULL DEFAULT '',
    em_application_name text COLLATE "C" NOT NULL DEFAULT '',
    em_instance text COLLATE "C" NOT NULL DEFAULT '',
    -- A hold that was taken by call: its reason, owner, start and deadline. After the deadline the next transaction that needs the key
    -- deletes the row, or a background task does. All null in a row of a transaction, or of a hold without end that was inserted by hand.
    reason text,
    held_by text COLLATE "C",
    hold_time timestamptz,
    hold_until timestamptz,
    CONSTRAINT linkis_resource_lock_key PRIMARY KEY (scope, "user", em_application_name, em_instance),
    CONSTRAINT linkis_resource_lock_scope CHECK (
        (scope = 'em' AND "user" = '' AND em_application_name <> '' AND em_instance <> '')
        OR (scope = 'user' AND "user" <> '' AND em_application_name = '' AND em_instance = '')
    ),
    CONSTRAINT linkis_resource_lock_hold CHECK (num_nulls(reason, held_by, hold_time, hold_until) IN (0, 4))
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 1000000000, vacuum_truncate = off);
-- Holds by deadline, without the rows of transactions.
CREATE INDEX linkis_resource_lock_hold ON linkis_resource_lock (hold_until) WHERE hold_until IS NOT NULL;

-- Reports of EMs -------------------------------------------------------------------------------------------------------------------

-- One row is the last report of one EM; it is deleted with the EM. Only the key and the rare state unhealthy are indexed, so that a
-- report rewrites its row in place.
CREATE TABLE linkis_em_report (
    em_application_name text COLLATE "C" NOT NULL,
    em_instance text COLLATE "C" NOT NULL,
    -- Registration of the report, and the report's number within it.
    epoch bigint NOT NULL,
    sequence bigint NOT NULL,
    health text NOT NULL,
    -- Load: all three values, or none if the report has none. Bytes, and thousandths of the machine's cores.
    memory_used bigint,
    memory_max bigint,
    cpu_permille smallint,
    report_time timestamptz NOT NULL,
    -- Whether a ticket of the EM may have missed_reports above 0.
    any_missed boolean NOT NULL DEFAULT true,
    CONSTRAINT linkis_em_report_key PRIMARY KEY (em_application_name, em_instance),
    CONSTRAINT linkis_em_report_sequence CHECK (sequence > 0),
    CONSTRAINT linkis_em_report_health CHECK (health IN ('healthy', 'warn', 'unhealthy')),
    CONSTRAINT linkis_em_report_load CHECK (
        num_nulls(memory_used, memory_max, cpu_permille) = 3
        OR (num_nulls(memory_used, memory_max, cpu_permille) = 0
            AND memory_used BETWEEN 0 AND memory_max AND cpu_permille BETWEEN 0 AND 1000)
    )
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off);
-- Unhealthy EMs, without a read of all reports.
CREATE INDEX linkis_em_report_unhealthy ON linkis_em_report (em_application_name, em_instance) WHERE health = 'unhealthy';

-- One row is the observed use of one EM's engines, from its last report with observations; it is deleted with the EM's report. For
-- display: no decision uses it. Only the key is indexed, so that a report rewrites its row in place.
CREATE TABLE linkis_em_observed (
    em_application_name text COLLATE "C" NOT NULL,
    em_instance text COLLATE "C" NOT NULL,
    -- The report of the observations.
    epoch bigint NOT NULL,
    sequence bigint NOT NULL,
    -- SHA-256 of the observed tickets, types and queues. While it is unchanged, no ticket has to be read.
    subject_hash bytea NOT NULL,
    -- Tickets with their amounts, packed.
    observed bytea NOT NULL,
    observed_time timestamptz NOT NULL,
    CONSTRAINT linkis_em_observed_key PRIMARY KEY (em_application_name, em_instance),
    CONSTRAINT linkis_em_observed_hash CHECK (octet_length(subject_hash) = 32)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off, toast.vacuum_truncate = off);
-- The value is packed already: no compression.
ALTER TABLE linkis_em_observed ALTER COLUMN observed SET STORAGE EXTERNAL;

-- Limits and counters --------------------------------------------------------------------------------------------------------------

-- One row: the limits fence. Each change of a rule, a policy or a counted label set changes the version. A transaction that grants or
-- ends tickets reads the row, and so has a shared lock on the table until it ends. A change of the limits takes the exclusive lock for a
-- moment, so that no ticket is counted by limits that are being changed.
CREATE TABLE linkis_resource_limit_version (
    only_row boolean NOT NULL DEFAULT true,
    -- Limits version. It never repeats, even in a database that was restored from a backup.
    version uuid NOT NULL,
    -- Oldest release, by its writer number, that counts correctly. An older release reads, and refuses to write.
    oldest_writer integer NOT NULL,
    -- Whether an operator holds a user. Resource locks of users are then taken even without a limit by user.
    users_held boolean NOT NULL DEFAULT false,
    CONSTRAINT linkis_resource_limit_version_key PRIMARY KEY (only_row),
    CONSTRAINT linkis_resource_limit_version_one CHECK (only_row)
);
INSERT INTO linkis_resource_limit_version (version, oldest_writer) VALUES (gen_random_uuid(), 1);

-- One row is one counted label set: the label names of some rule, counted for the kinds of EM whose policies include them. The
-- counters of a new label set are built in steps, EM by EM; its rules decide once all tickets are counted.
CREATE TABLE linkis_label_set (
    -- Increasing: the row of an EM states up to which label set its tickets are counted.
    label_set_id bigint GENERATED ALWAYS AS IDENTITY,
    -- Label names as a JSON array, in order.
    label_set jsonb NOT NULL,
    -- Kinds of EM whose tickets do not count, as a JSON array, in order.
    exempt jsonb NOT NULL,
    -- counting: tickets are being counted; counted: the rules decide; retired: the counters are being deleted.
    state text NOT NULL,
    CONSTRAINT linkis_label_set_key PRIMARY KEY (label_set_id),
    CONSTRAINT linkis_label_set_state CHECK (state IN ('counting', 'counted', 'retired'))
);

-- One row is the counter of one scope: the sums of the live tickets with its label values. A row with empty sums is deleted later.
CREATE TABLE linkis_label_resource (
    label_set_id bigint NOT NULL,
    -- Labels as a JSON object.
    scope jsonb NOT NULL,
    used_resource jsonb NOT NULL,
    locked_resource jsonb NOT NULL,
    -- SHA-256 of the label set's id and the scope, which may be longer than an index entry. Rows are locked in this order.
    scope_hash bytea NOT NULL,
    -- Write counter. A new row starts with the clock in microseconds, so that the version also increases when a deleted row returns, and
    -- when a label set is counted again.
    version bigint NOT NULL DEFAULT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
    CONSTRAINT linkis_label_resource_key PRIMARY KEY (scope_hash),
    CONSTRAINT linkis_label_resource_hash CHECK (octet_length(scope_hash) = 32),
    CONSTRAINT linkis_label_resource_used_not_negative CHECK (NOT jsonb_path_exists(used_resource, '$.* ? (@ < 0)')),
    CONSTRAINT linkis_label_resource_locked_not_negative CHECK (NOT jsonb_path_exists(locked_resource, '$.* ? (@ < 0)'))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off);
-- Pages of the counters of a label set.
CREATE INDEX linkis_label_resource_label_set ON linkis_label_resource (label_set_id, scope_hash);
-- Lists by user, creator and engine type. A changed sum changes no index entry.
CREATE INDEX linkis_label_resource_user ON linkis_label_resource ((scope ->> 'user'), scope_hash) WHERE scope ->> 'user' IS NOT NULL;
CREATE INDEX linkis_label_resource_creator ON linkis_label_resource ((scope ->> 'creator'), scope_hash) WHERE scope ->> 'creator' IS NOT NULL;
CREATE INDEX linkis_label_resource_engine_type ON linkis_label_resource ((scope ->> 'engine_type'), scope_hash)
    WHERE scope ->> 'engine_type' IS NOT NULL;

-- Wait queues ----------------------------------------------------------------------------------------------------------------------

-- One row is one instance with waiting callers. The instance renews its row. The queue entries of an instance whose row has expired are
-- ignored, and deleted later.
CREATE TABLE linkis_rm_instance (
    instance_id uuid NOT NULL,
    alive_until timestamptz NOT NULL,
    CONSTRAINT linkis_rm_instance_key PRIMARY KEY (instance_id)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, vacuum_truncate = off);

-- One row is one waiting request. Its position is written once and copied to all of its queue entries: with different orders, two wait
-- queues would wait for each other.
CREATE TABLE linkis_resource_waiting (
    -- Id of the ticket that will be granted.
    ticket_id uuid NOT NULL,
    instance_id uuid NOT NULL,
    -- Principal of the request.
    principal text COLLATE "C" NOT NULL,
    "user" text COLLATE "C" NOT NULL,
    creator text COLLATE "C" NOT NULL,
    engine_type text COLLATE "C" NOT NULL,
    -- EM of the last decision. If any_em, the request can be granted on any EM.
    em_application_name text COLLATE "C" NOT NULL,
    em_instance text COLLATE "C" NOT NULL,
    any_em boolean NOT NULL,
    resource_type text NOT NULL,
    resource jsonb NOT NULL,
    labels jsonb NOT NULL,
    priority smallint NOT NULL DEFAULT 0,
    waiting_since timestamptz NOT NULL,
    wait_until timestamptz NOT NULL,
    -- Bytes in the order of the queue: priority, entry time, ticket id.
    position bytea NOT NULL,
    -- Caps of the request, as a JSON array of {"keys": [...], "max": {...}}.
    caps jsonb NOT NULL DEFAULT '[]',
    CONSTRAINT linkis_resource_waiting_key PRIMARY KEY (ticket_id),
    -- Lists in order.
    CONSTRAINT linkis_resource_waiting_position_key UNIQUE (position),
    CONSTRAINT linkis_resource_waiting_position CHECK (octet_length(position) = 26)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off);
-- Lists by user, in order.
CREATE INDEX linkis_resource_waiting_user ON linkis_resource_waiting ("user", position);

-- One row is one queue entry: a waiting request at one EM, limited scope or external queue.
CREATE TABLE linkis_resource_waiting_entry (
    -- The EM, the labels of the scope, or the external queue, as a JSON object.
    wait_key jsonb NOT NULL,
    ticket_id uuid NOT NULL,
    -- Copies from the request, so that a queue is read without its requests.
    instance_id uuid NOT NULL,
    position bytea NOT NULL,
    resource_type text NOT NULL,
    resource jsonb NOT NULL,
    wait_until timestamptz NOT NULL,
    -- True if the request is short here. False if it only reserves capacity here, as the head of another queue.
    is_short boolean NOT NULL,
    -- SHA-256 of the wait key, which may be longer than an index entry.
    wait_key_hash bytea NOT NULL,
    -- By instance, so that the first entries of live instances are found behind any number of entries of dead ones.
    CONSTRAINT linkis_resource_waiting_entry_key PRIMARY KEY (wait_key_hash, instance_id, position),
    CONSTRAINT linkis_resource_waiting_entry_hash CHECK (octet_length(wait_key_hash) = 32)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off);
-- Entries of a request.
CREATE INDEX linkis_resource_waiting_entry_ticket ON linkis_resource_waiting_entry (ticket_id);
-- Entries at the external queues of a provider.
CREATE INDEX linkis_resource_waiting_entry_queue ON linkis_resource_waiting_entry ((wait_key -> 'queue' ->> 0)) WHERE wait_key ? 'queue';

-- History --------------------------------------------------------------------------------------------------------------------------

-- One row is one change, written in its transaction. Append-only; the retention drops whole partitions. A ticket ends once because its
-- row is deleted once: no constraint of a table that is partitioned by time can ensure it.
CREATE TABLE linkis_resource_action_record (
    -- In the order of time within an EM and a user.
    id bigint GENERATED ALWAYS AS IDENTITY,
    action text NOT NULL,
    -- Null in lines of EMs, rules and operators.
    ticket_id uuid,
    "user" text COLLATE "C",
    creator text COLLATE "C",
    engine_type text COLLATE "C",
    labels jsonb,
    engine_application_name text COLLATE "C",
    engine_instance text COLLATE "C",
    em_application_name text COLLATE "C",
    em_instance text COLLATE "C",
    -- Without an EM: the labels of a repaired scope, the pattern of a changed rule, the label set whose rules begin to decide (as the
    -- pattern of each of its labels), or the user of a hold. With an application alone: the checks of a policy.
    scope jsonb,
    resource_type text NOT NULL,
    -- Amount of the ticket after the change, or at its end; capacity of an EM; sum of the live tickets at a repair; maximum of a rule.
    -- For scopes and rules a Special, with the names of dimensions as in limits.
    resource jsonb NOT NULL,
    -- Principal; the service itself for its own changes.
    actor text COLLATE "C" NOT NULL,
    action_time timestamptz NOT NULL,
    -- Mode of a rule that was set or deleted.
    limit_mode text,
    -- Reason of an operator.
    reason text,
    -- Time of the grant, in lines of a ticket's end.
    held_since timestamptz,
    -- Object that no other column names: "token ID of NAME", "provider TYPE/NAME".
    object text,
    -- Network address of the call, or machine of the command.
    address text,
    -- State before and after the change as JSON, for display and programs: of bounded length, without secrets. Null for no state.
    before text,
    after text,
    CONSTRAINT linkis_resource_action_record_key PRIMARY KEY (id, action_time),
    CONSTRAINT linkis_resource_action_record_action CHECK (
        (ticket_id IS NOT NULL AND num_nulls("user", creator, engine_type, labels, em_application_name, em_instance) = 0 AND scope IS NULL
            AND object IS NULL
            AND action IN ('granted', 'adopted', 'inited', 'reported', 'released', 'forced', 'expired', 'unregistered', 'lost'))
        OR (ticket_id IS NULL AND "user" IS NULL AND num_nulls(em_application_name, em_instance) = 0 AND scope IS NULL AND object IS NULL
            AND action IN ('registered', 'resized', 'unregistered', 'lost', 'repaired', 'drained', 'resumed', 'held', 'hold_ended'))
        OR (ticket_id IS NULL AND "user" IS NULL AND num_nulls(em_application_name, em_instance) = 2 AND scope IS NOT NULL
            AND object IS NULL AND action IN ('repaired', 'limit_set', 'limit_deleted', 'limits_in_force', 'held', 'hold_ended'))
        OR (ticket_id IS NULL AND "user" IS NULL AND em_application_name IS NOT NULL AND em_instance IS NULL AND scope IS NOT NULL
            AND object IS NULL AND action = 'policy_set')
        OR (ticket_id IS NULL AND "user" IS NULL AND num_nulls(em_application_name, em_instance) = 2 AND scope IS NULL
            AND object IS NOT NULL AND action IN ('provider_put', 'provider_deleted', 'token_created', 'token_revoked'))
    )
) PARTITION BY RANGE (action_time);
-- The life of a ticket.
CREATE INDEX linkis_resource_action_record_ticket ON linkis_resource_action_record (ticket_id, id) WHERE ticket_id IS NOT NULL;

-- Rows without a partition, after a jump of a clock or a missed creation: no change is lost. It is small, and has the indexes of closed
-- partitions at all times.
CREATE TABLE linkis_resource_action_record_rest PARTITION OF linkis_resource_action_record DEFAULT;
CREATE INDEX linkis_resource_action_record_rest_user ON linkis_resource_action_record_rest ("user", id) WHERE "user" IS NOT NULL;
CREATE INDEX linkis_resource_action_record_rest_em ON linkis_resource_action_record_rest (em_instance, id) WHERE em_instance IS NOT NULL;
CREATE INDEX linkis_resource_action_record_rest_actor ON linkis_resource_action_record_rest (actor, id) WHERE actor IS NOT NULL;

-- One row: the identity of this history and its deleted part, for followers. A position of a follower contains history_id, so that a
-- position of another or a recreated database is recognized.
CREATE TABLE linkis_resource_action_horizon (
    only_row boolean NOT NULL DEFAULT true,
    history_id uuid NOT NULL DEFAULT gen_random_uuid(),
    -- Largest id of a deleted row.
    forgotten bigint NOT NULL DEFAULT 0,
    CONSTRAINT linkis_resource_action_horizon_key PRIMARY KEY (only_row),
    CONSTRAINT linkis_resource_action_horizon_row CHECK (only_row)
);
INSERT INTO linkis_resource_action_horizon DEFAULT VALUES;

-- Functions with which a service that may not change the schema creates, indexes and drops history partitions. They run with the rights
-- of the role that migrates, in the schema of these tables. Their privilege is granted like all others (docs/SECURITY.md).
-- - make creates an empty partition of whole hours; the number of partitions is bounded.
-- - index creates an index of a closed partition, which no grant writes any more; it uses one core.
-- - drop drops a partition that ended longer ago than the shortest retention.
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
                RAISE 'no history partition can be from %% until %%', begins, ends USING ERRCODE = 'invalid_parameter_value';
            END IF;
            EXECUTE format(
                'CREATE TABLE %%I PARTITION OF linkis_resource_action_record FOR VALUES FROM (%%L) TO (%%L)',
                'linkis_resource_action_record_' || to_char(begins, 'YYYYMMDDHH24') || '_' || to_char(ends, 'YYYYMMDDHH24'),
                begins, ends);
        END $body$
    $function$, current_schema());
    EXECUTE format($function$
        CREATE FUNCTION %1$I.linkis_rm_index_history_part(part text, key text) RETURNS void
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = %1$I, pg_temp SET timezone = 'UTC'
        SET max_parallel_maintenance_workers = 0 AS $body$
        DECLARE
            key_column text := CASE key WHEN 'user' THEN '"user"' WHEN 'em' THEN 'em_instance' WHEN 'actor' THEN 'actor' END;
        BEGIN
            IF part !~ '^linkis_resource_action_record_[0-9]{10}_[0-9]{10}$' OR key_column IS NULL
                OR to_timestamp(right(part, 10), 'YYYYMMDDHH24') > clock_timestamp() - interval '10 minutes' THEN
                RAISE '%% is not a closed history partition, or %% is not a key', part, key USING ERRCODE = 'invalid_parameter_value';
            END IF;
            EXECUTE format('CREATE INDEX IF NOT EXISTS %%I ON %%I (%%s, id) WHERE %%s IS NOT NULL', part || '_' || key, part, key_column,
                key_column);
        END $body$
    $function$, current_schema());
    EXECUTE format($function$
        CREATE FUNCTION %1$I.linkis_rm_drop_history_part(part text) RETURNS void
        LANGUAGE plpgsql SECURITY DEFINER SET search_path = %1$I, pg_temp SET timezone = 'UTC' AS $body$
        BEGIN
            IF part !~ '^linkis_resource_action_record_[0-9]{10}_[0-9]{10}$'
                OR to_timestamp(right(part, 10), 'YYYYMMDDHH24') > clock_timestamp() - interval '1 hour' THEN
                RAISE '%% is not a closed history partition', part USING ERRCODE = 'invalid_parameter_value';
            END IF;
            EXECUTE format('DROP TABLE IF EXISTS %%I', part);
        END $body$
    $function$, current_schema());
END $migration$;
REVOKE ALL ON FUNCTION linkis_rm_make_history_part(bigint, bigint), linkis_rm_index_history_part(text, text),
    linkis_rm_drop_history_part(text) FROM PUBLIC;

-- Use and refusals over time -------------------------------------------------------------------------------------------------------

-- One row is the use of one user, creator, engine type or EM by the tickets that ended in one hour. The number of names per hour and kind
-- is bounded; the other names share one row.
CREATE TABLE linkis_resource_usage_hour (
    used_by text COLLATE "C" NOT NULL,
    -- True in the row of the other names.
    is_rest boolean NOT NULL,
    -- Name; the application name of an EM.
    name text COLLATE "C" NOT NULL,
    -- Instance of an EM; else empty.
    em_instance text COLLATE "C" NOT NULL,
    hour timestamptz NOT NULL,
    tickets bigint NOT NULL,
    -- Amount at the end of a ticket, times the time from its grant to its end; exact.
    core_seconds numeric NOT NULL,
    byte_seconds numeric NOT NULL,
    queue_core_seconds numeric NOT NULL,
    queue_byte_seconds numeric NOT NULL,
    -- The order of a page of names.
    CONSTRAINT linkis_resource_usage_hour_key PRIMARY KEY (used_by, is_rest, name, em_instance, hour),
    CONSTRAINT linkis_resource_usage_hour_by CHECK (used_by IN ('user', 'creator', 'engine_type', 'em')),
    CONSTRAINT linkis_resource_usage_hour_rest CHECK (NOT is_rest OR (name = '' AND em_instance = ''))
) WITH (fillfactor = 70, vacuum_truncate = off);
-- Number of names of an hour, and retention.
CREATE INDEX linkis_resource_usage_hour_hour ON linkis_resource_usage_hour (hour, used_by);

-- One row: the summed part of the history. It changes in the transaction that sums, and only from the expected value, so that each ticket
-- is summed once.
CREATE TABLE linkis_resource_usage_progress (
    only_row boolean NOT NULL DEFAULT true,
    -- Id of the last summed row of the history.
    last_number bigint NOT NULL,
    -- All tickets that ended before this time are summed.
    complete_until timestamptz NOT NULL,
    CONSTRAINT linkis_resource_usage_progress_key PRIMARY KEY (only_row),
    CONSTRAINT linkis_resource_usage_progress_one CHECK (only_row)
) WITH (fillfactor = 50);
INSERT INTO linkis_resource_usage_progress (last_number, complete_until) VALUES (0, 'epoch');

-- One row is the number of refusals of one kind in one period, as counted by one instance so far: a repeated write changes nothing.
-- Readers add the rows up. The number of kinds per period and instance is bounded; the other kinds share a row with an empty user.
CREATE TABLE linkis_resource_refusal (
    period_start timestamptz NOT NULL,
    -- SHA-256 of the columns that identify a kind, which may be longer than an index entry.
    key_hash bytea NOT NULL,
    instance_id uuid NOT NULL,
    "user" text COLLATE "C" NOT NULL,
    -- First shortfall, as in the reply.
    scope_kind text NOT NULL,
    scope text NOT NULL,
    dimension text NOT NULL,
    -- Empty for an EM.
    rule text NOT NULL,
    refusals bigint NOT NULL,
    -- Amounts and time of the last refusal.
    last_requested bigint NOT NULL,
    last_available bigint NOT NULL,
    last_time timestamptz NOT NULL,
    CONSTRAINT linkis_resource_refusal_key PRIMARY KEY (period_start, key_hash, instance_id),
    CONSTRAINT linkis_resource_refusal_hash CHECK (octet_length(key_hash) = 32),
    CONSTRAINT linkis_resource_refusal_count CHECK (refusals > 0),
    CONSTRAINT linkis_resource_refusal_kind CHECK (scope_kind IN ('em', 'creator', 'user', 'labels', 'queue'))
) WITH (fillfactor = 50, vacuum_truncate = off);
-- Lists by user.
CREATE INDEX linkis_resource_refusal_user ON linkis_resource_refusal ("user", period_start, key_hash);

-- Instances and background tasks ---------------------------------------------------------------------------------------------------

-- One row is one instance that serves the cell. The instance renews its row. An expired row is ignored, and deleted later.
CREATE TABLE linkis_rm_server (
    instance_id uuid NOT NULL,
    version text NOT NULL,
    -- Address at which it serves.
    address text NOT NULL,
    start_time timestamptz NOT NULL,
    alive_until timestamptz NOT NULL,
    -- Recent rates of its replies.
    grants_per_second double precision NOT NULL,
    refusals_per_second double precision NOT NULL,
    -- State of its background tasks, as a JSON array.
    tasks jsonb NOT NULL,
    CONSTRAINT linkis_rm_server_key PRIMARY KEY (instance_id)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, vacuum_truncate = off);

-- One row is the lease of one background task that one instance runs for all. The instance renews its row. No result depends on it: after
-- a lost lease, work is done twice or later.
CREATE TABLE linkis_rm_lease (
    name text COLLATE "C" NOT NULL,
    instance_id uuid NOT NULL,
    held_until timestamptz NOT NULL,
    CONSTRAINT linkis_rm_lease_key PRIMARY KEY (name)
) WITH (fillfactor = 50);

-- One row is one figure of the cluster that one instance computes for all, as JSON. For display: no decision uses it.
CREATE TABLE linkis_rm_cluster_figure (
    name text COLLATE "C" NOT NULL,
    figures jsonb NOT NULL,
    work_time timestamptz NOT NULL,
    CONSTRAINT linkis_rm_cluster_figure_key PRIMARY KEY (name)
) WITH (fillfactor = 50, vacuum_truncate = off);

-- External queues ------------------------------------------------------------------------------------------------------------------

-- One row is one provider, as a copy of home's row, so that a decision reads only the cell. The row is the lock of all that is counted in
-- the cluster: a transaction that changes the next table, or tickets in it, locks the row after its resource locks and its scopes.
CREATE TABLE linkis_external_cluster (
    -- A provider that is put again after its deletion has a new id, so that no earlier count applies to it.
    cluster_id bigint GENERATED ALWAYS AS IDENTITY,
    resource_type text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    -- Labels of the requests that it serves, as a JSON object.
    labels jsonb NOT NULL,
    etag uuid NOT NULL,
    -- Reply to requests without a snapshot younger than max_age. Durations in milliseconds.
    when_away text NOT NULL,
    max_age bigint NOT NULL,
    last_known_for bigint NOT NULL,
    refresh_interval bigint NOT NULL,
    -- Present snapshot, the start of its fetch, and whether queues have names without a path; null before the first snapshot.
    generation bigint,
    begun timestamptz,
    by_last_name boolean NOT NULL DEFAULT false,
    -- Number of changes of tickets in the cluster: the version of its counts.
    changes bigint NOT NULL DEFAULT 0,
    CONSTRAINT linkis_external_cluster_key PRIMARY KEY (cluster_id),
    CONSTRAINT linkis_external_cluster_name UNIQUE (resource_type, name),
    CONSTRAINT linkis_external_cluster_snapshot CHECK (num_nulls(generation, begun) IN (0, 2)),
    CONSTRAINT linkis_external_cluster_away CHECK (when_away IN ('refuse', 'allow', 'last_known'))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off);

-- One row is one queue with live tickets, or an ancestor of one: the part of their use that the present snapshot does not contain.
CREATE TABLE linkis_external_queue (
    cluster_id bigint NOT NULL,
    path text COLLATE "C" NOT NULL,
    -- Bytes.
    unseen_memory bigint NOT NULL,
    unseen_cores bigint NOT NULL,
    CONSTRAINT linkis_external_queue_key PRIMARY KEY (cluster_id, path),
    CONSTRAINT linkis_external_queue_unseen CHECK (unseen_memory >= 0 AND unseen_cores >= 0)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off);

-- Numbers of snapshots.
CREATE SEQUENCE linkis_external_generation AS bigint;

-- One row is one queue in one snapshot: written once, and deleted after a later snapshot.
CREATE TABLE linkis_external_snapshot (
    cluster_id bigint NOT NULL,
    generation bigint NOT NULL,
    path text COLLATE "C" NOT NULL,
    -- Part of the path after the last dot.
    last_name text COLLATE "C" NOT NULL,
    max_memory bigint NOT NULL,
    max_cores bigint NOT NULL,
    used_memory bigint NOT NULL,
    used_cores bigint NOT NULL,
    state text NOT NULL,
    CONSTRAINT linkis_external_snapshot_key PRIMARY KEY (cluster_id, generation, path)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, vacuum_truncate = off);
-- Names without a path.
CREATE INDEX linkis_external_snapshot_last_name ON linkis_external_snapshot (cluster_id, generation, last_name);

-- One row is one application in one snapshot: written once, and deleted after a later snapshot.
CREATE TABLE linkis_external_application (
    cluster_id bigint NOT NULL,
    generation bigint NOT NULL,
    application_id text COLLATE "C" NOT NULL,
    memory bigint NOT NULL,
    cores bigint NOT NULL,
    CONSTRAINT linkis_external_application_key PRIMARY KEY (cluster_id, generation, application_id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, vacuum_truncate = off);

-- One row is one ticket in an external queue. After the ticket's end the row stays until no snapshot in preparation needs it.
CREATE TABLE linkis_external_ticket (
    ticket_id uuid NOT NULL,
    cluster_id bigint NOT NULL,
    path text COLLATE "C" NOT NULL,
    memory bigint NOT NULL,
    cores bigint NOT NULL,
    -- Time of the confirmation; null while the ticket is locked.
    used_since timestamptz,
    application_id text COLLATE "C",
    -- Number of its last change among the changes of the cluster.
    change bigint NOT NULL,
    ended boolean NOT NULL,
    CONSTRAINT linkis_external_ticket_key PRIMARY KEY (ticket_id)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off);
-- Changes since a number, and all tickets of a cluster.
CREATE INDEX linkis_external_ticket_change ON linkis_external_ticket (cluster_id, change);
-- Ended tickets to delete.
CREATE INDEX linkis_external_ticket_ended ON linkis_external_ticket (cluster_id) WHERE ended;
-- Ticket of an application.
CREATE INDEX linkis_external_ticket_application ON linkis_external_ticket (application_id) WHERE application_id IS NOT NULL;

-- One row is the refresh of one cluster: the instance that fetches, and the time of the next fetch. In a table of its own, so that no
-- decision waits for it.
CREATE TABLE linkis_external_refresh (
    cluster_id bigint NOT NULL,
    lease uuid,
    leased_until timestamptz,
    next_refresh timestamptz NOT NULL,
    failures integer NOT NULL DEFAULT 0,
    -- True after the provider's deletion: its counts are deleted in steps, and this row with the last.
    gone boolean NOT NULL DEFAULT false,
    CONSTRAINT linkis_external_refresh_key PRIMARY KEY (cluster_id),
    CONSTRAINT linkis_external_refresh_lease CHECK (num_nulls(lease, leased_until) IN (0, 2))
) WITH (fillfactor = 50);
