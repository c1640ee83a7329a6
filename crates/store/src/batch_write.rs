//! Batch write: one SQL statement that writes all deltas of a batch, so that a batch costs one round trip.
//!
//! The statement has one part (CTE) per kind of delta and omits empty parts. PostgreSQL plans each combination of parts
//! once. Each part states the number of rows that it must change; any other number fails the batch (invariant 13 of
//! ARCHITECTURE.md).
//!
//! Never: decides; the deltas come from the ledger. Callers: the batch of the committer, and the repair of an audit.

use sqlx::{PgConnection, Postgres, QueryBuilder};
use time::OffsetDateTime;
use uuid::Uuid;

use rm_model::{
    action::Action,
    em::Em,
    external::{ClusterDelta, ClusterTicketDelta, TicketPhase},
    ledger::Deltas,
    scope::{ScopeCounter, ScopeHoldings},
    ticket::{Ticket, TicketState},
};

use super::{
    StoreError, action_record, em_resource, expect_rows,
    external_queue::QueueColumns,
    label_resource,
    resource_lock::Locks,
    rows::{em_columns, labels_json},
};

/// Name of the part that writes the history.
const RECORDED: &str = "recorded";

/// Columns of a history line of a batch.
const LINE_COLUMNS: &str = r#"action, ticket_id, "user", creator, engine_type, labels, engine_application_name, engine_instance,
    em_application_name, em_instance, resource_type, resource, actor, reason, held_since, address, before, after, action_time"#;

/// Result of the batch write.
#[derive(Debug)]
pub struct WriteResult {
    /// Whether another live instance may have waiters, which must then be notified.
    pub others_wait: bool,
    /// Number of the first history line; `None` if the batch wrote none.
    pub first_line: Option<i64>,
}

/// Writes `deltas` and their history at time `now`, and deletes the rows of `locks`.
///
/// EM counters are updated by version; scope rows are locked by the caller. The lock rows were inserted in the same
/// transaction, so no other transaction has seen them. [`WriteResult::others_wait`] excludes the instance `own`.
///
/// # Errors
/// [`StoreError::RowCount`] if a part changed another number of rows; database errors.
pub async fn write(
    connection: &mut PgConnection,
    deltas: &Deltas,
    now: OffsetDateTime,
    locks: Option<Locks>,
    own: Option<Uuid>,
) -> Result<WriteResult, StoreError> {
    let mut statement = Statement::new();
    statement.counted(&deltas.ems_counted)?;
    statement.in_use(&deltas.in_use);
    statement.ended(deltas.ended.iter().filter(|ended| ended.stored).map(|ended| ended.ticket.id).collect());
    statement.granted(&deltas.granted);
    statement.new_in_use(&deltas.new_in_use);
    let (records, granted) = action_record::ActionColumns::of(deltas);
    statement.history(records, granted, now);
    statement.scopes(&deltas.scopes);
    statement.clusters(&deltas.clusters);
    statement.cluster_tickets(&deltas.cluster_tickets);
    if let Some(locks) = locks {
        statement.dropped(locks);
    }
    statement.execute(connection, own).await
}

/// A statement under construction. Each part changes a known number of rows.
struct Statement {
    sql: QueryBuilder<Postgres>,
    parts: Vec<StatementPart>,
}

/// A part (CTE) with the number of rows that it must change.
struct StatementPart {
    name: &'static str,
    table: &'static str,
    rows: usize,
}

impl Statement {
    fn new() -> Self {
        Self { sql: QueryBuilder::new("-- settlement::write\n"), parts: Vec::new() }
    }

    /// Adds a part that must change `rows` rows of `table`. Adds nothing if `rows` is 0.
    fn part(
        &mut self,
        name: &'static str,
        table: &'static str,
        rows: usize,
        write: impl FnOnce(&mut QueryBuilder<Postgres>),
    ) {
        if rows == 0 {
            return;
        }
        self.sql.push(if self.parts.is_empty() { "WITH " } else { ", " }).push(name).push(" AS (");
        write(&mut self.sql);
        self.sql.push(")");
        self.parts.push(StatementPart { name, table, rows });
    }

    fn counted(&mut self, ems: &[Em]) -> Result<(), StoreError> {
        let ems = em_resource::EmColumns::of(ems)?;
        self.part("counted", "linkis_em_resource_meta_data", ems.version.len(), |sql| {
            sql.push(
                "UPDATE linkis_em_resource_meta_data e SET
                    used_resource = d.used::jsonb, locked_resource = d.locked::jsonb, left_resource = d.rest::jsonb,
                    -- Only a registration or an adoption sets it, and both write the whole row; the constraint refuses a grant that
                    -- over-commits.
                    over_committed = e.over_committed AND d.over_committed, version = e.version + 1,
                    used_tickets = d.used_tickets, used_tickets_xor = d.used_tickets_xor
                FROM unnest(",
            );
            sql.separated(", ")
                .push_bind(ems.em_application_name)
                .push_bind(ems.em_instance)
                .push_bind(ems.used)
                .push_bind(ems.locked)
                .push_bind(ems.left)
                .push_bind(ems.over_committed)
                .push_bind(ems.version)
                .push_bind(ems.used_tickets)
                .push_bind(ems.used_tickets_xor);
            sql.push(
                ") AS d (em_application_name, em_instance, used, locked, rest, over_committed, version, used_tickets,
                    used_tickets_xor)
                WHERE e.em_application_name = d.em_application_name AND e.em_instance = d.em_instance
                    AND e.version = d.version
                RETURNING 1",
            );
        });
        Ok(())
    }

    fn in_use(&mut self, tickets: &[Ticket]) {
        let in_use = UsedTicketColumns::of(tickets);
        self.part("in_use", "linkis_user_resource_meta_data", tickets.len(), |sql| {
            sql.push(
                "UPDATE linkis_user_resource_meta_data t SET
                    user_locked_resource = NULL, expires_at = NULL, user_used_resource = d.used::jsonb,
                    used_time = d.used_time, engine_application_name = d.engine_application_name,
                    engine_instance = d.engine_instance
                FROM unnest(",
            );
            sql.separated(", ")
                .push_bind(in_use.ticket_id)
                .push_bind(in_use.used)
                .push_bind(in_use.used_time)
                .push_bind(in_use.engine_application_name)
                .push_bind(in_use.engine_instance);
            sql.push(
                ") AS d (ticket_id, used, used_time, engine_application_name, engine_instance)
                WHERE t.ticket_id = d.ticket_id
                RETURNING 1",
            );
        });
    }

    fn ended(&mut self, ticket_ids: Vec<Uuid>) {
        self.part("ended", "linkis_user_resource_meta_data", ticket_ids.len(), |sql| {
            sql.push("DELETE FROM linkis_user_resource_meta_data WHERE ticket_id = ANY (").push_bind(ticket_ids);
            sql.push(") RETURNING 1");
        });
    }

    fn granted(&mut self, tickets: &[Ticket]) {
        let (application_names, instances) = em_columns(tickets.iter().map(|ticket| &ticket.em));
        self.part("granted", "linkis_user_resource_meta_data", tickets.len(), |sql| {
            sql.push(
                r#"INSERT INTO linkis_user_resource_meta_data (ticket_id, "user", creator, engine_type, em_application_name,
                    em_instance, resource_type, user_locked_resource, labels, locked_time, expires_at, principal, em_epoch)
                SELECT ticket_id, "user", creator, engine_type, em_application_name, em_instance, resource_type,
                    locked::jsonb, labels::jsonb, locked_time, expires_at, principal, em_epoch
                FROM unnest("#,
            );
            sql.separated(", ")
                .push_bind(tickets.iter().map(|ticket| ticket.id).collect::<Vec<_>>())
                .push_bind(tickets.iter().map(|ticket| ticket.user.as_str()).collect::<Vec<_>>())
                .push_bind(tickets.iter().map(|ticket| ticket.creator.as_str()).collect::<Vec<_>>())
                .push_bind(tickets.iter().map(|ticket| ticket.engine_type.as_str()).collect::<Vec<_>>())
                .push_bind(application_names)
                .push_bind(instances)
                .push_bind(tickets.iter().map(|ticket| ticket.resource_type().as_str()).collect::<Vec<_>>())
                .push_bind(tickets.iter().map(|ticket| ticket.resource().to_json()).collect::<Vec<_>>())
                .push_bind(tickets.iter().map(|ticket| labels_json(&ticket.labels)).collect::<Vec<_>>())
                .push_bind(tickets.iter().map(|ticket| ticket.locked_time).collect::<Vec<_>>())
                .push_bind(tickets.iter().map(expires_at).collect::<Vec<_>>())
                .push_bind(tickets.iter().map(|ticket| ticket.principal.as_str()).collect::<Vec<_>>())
                .push_bind(tickets.iter().map(|ticket| ticket.em_epoch).collect::<Vec<_>>());
            sql.push(
                r#") AS d (ticket_id, "user", creator, engine_type, em_application_name, em_instance, resource_type, locked,
                    labels, locked_time, expires_at, principal, em_epoch)
                -- Returned for the history lines.
                RETURNING ticket_id, "user", creator, engine_type, labels, em_application_name, em_instance, resource_type,
                    user_locked_resource, principal, locked_time"#,
            );
        });
    }

    fn new_in_use(&mut self, tickets: &[Ticket]) {
        let (application_names, instances) = em_columns(tickets.iter().map(|ticket| &ticket.em));
        let in_use = UsedTicketColumns::of(tickets);
        self.part("new_in_use", "linkis_user_resource_meta_data", tickets.len(), |sql| {
            sql.push(
                r#"INSERT INTO linkis_user_resource_meta_data (ticket_id, "user", creator, engine_type, em_application_name,
                    em_instance, resource_type, user_used_resource, labels, locked_time, used_time, engine_application_name,
                    engine_instance, principal, em_epoch)
                SELECT ticket_id, "user", creator, engine_type, em_application_name, em_instance, resource_type,
                    used::jsonb, labels::jsonb, locked_time, used_time, engine_application_name, engine_instance, principal,
                    em_epoch
                FROM unnest("#,
            );
            sql.separated(", ")
                .push_bind(in_use.ticket_id)
                .push_bind(tickets.iter().map(|ticket| ticket.user.as_str()).collect::<Vec<_>>())
                .push_bind(tickets.iter().map(|ticket| ticket.creator.as_str()).collect::<Vec<_>>())
                .push_bind(tickets.iter().map(|ticket| ticket.engine_type.as_str()).collect::<Vec<_>>())
                .push_bind(application_names)
                .push_bind(instances)
                .push_bind(tickets.iter().map(|ticket| ticket.resource_type().as_str()).collect::<Vec<_>>())
                .push_bind(in_use.used)
                .push_bind(tickets.iter().map(|ticket| labels_json(&ticket.labels)).collect::<Vec<_>>())
                .push_bind(tickets.iter().map(|ticket| ticket.locked_time).collect::<Vec<_>>())
                .push_bind(in_use.used_time)
                .push_bind(in_use.engine_application_name)
                .push_bind(in_use.engine_instance)
                .push_bind(tickets.iter().map(|ticket| ticket.principal.as_str()).collect::<Vec<_>>())
                .push_bind(tickets.iter().map(|ticket| ticket.em_epoch).collect::<Vec<_>>());
            sql.push(
                r#") AS d (ticket_id, "user", creator, engine_type, em_application_name, em_instance, resource_type, used,
                    labels, locked_time, used_time, engine_application_name, engine_instance, principal, em_epoch)
                RETURNING 1"#,
            );
        });
    }

    /// Adds the history lines in the order of the decisions: `records`, interleaved with the granted tickets at the
    /// line numbers `granted`. The ids of the rows ascend in that order.
    fn history(&mut self, records: action_record::ActionColumns<'_>, granted: Vec<i32>, now: OffsetDateTime) {
        let rows = records.line.len() + granted.len();
        self.part(RECORDED, "linkis_resource_action_record", rows, |sql| {
            sql.push("INSERT INTO linkis_resource_action_record (").push(LINE_COLUMNS).push(") ");
            match (records.line.is_empty(), granted.is_empty()) {
                (true, _) => push_granted(sql),
                (false, true) => push_records(sql, records, now, false),
                (false, false) => {
                    sql.push("SELECT ").push(LINE_COLUMNS).push(" FROM (");
                    push_records(sql, records, now, true);
                    sql.push(" UNION ALL SELECT g.*, (")
                        .push_bind(granted)
                        .push(")[(row_number() OVER ())::int] FROM (");
                    push_granted(sql);
                    sql.push(") g) l (").push(LINE_COLUMNS).push(", line) ORDER BY line");
                }
            }
            sql.push(" RETURNING id");
        });
    }

    fn scopes(&mut self, counters: &[(ScopeCounter, ScopeHoldings)]) {
        let scopes = label_resource::ScopeColumns::of(counters);
        self.part("scopes", "linkis_label_resource", counters.len(), |sql| {
            sql.push(
                "UPDATE linkis_label_resource s SET
                    used_resource = d.used::jsonb, locked_resource = d.locked::jsonb, version = s.version + 1
                FROM unnest(",
            );
            sql.separated(", ").push_bind(scopes.scope_hash).push_bind(scopes.used).push_bind(scopes.locked);
            sql.push(") AS d (scope_hash, used, locked) WHERE s.scope_hash = d.scope_hash RETURNING 1");
        });
    }

    /// Adds the unseen use of external queues. The caller has locked the cluster rows.
    fn clusters(&mut self, clusters: &[ClusterDelta]) {
        let queues = QueueColumns::of(clusters);
        self.part("clusters", "linkis_external_cluster", clusters.len(), |sql| {
            sql.push("UPDATE linkis_external_cluster c SET changes = d.changes FROM unnest(");
            sql.separated(", ")
                .push_bind(clusters.iter().map(|cluster| cluster.cluster_id).collect::<Vec<_>>())
                .push_bind(clusters.iter().map(|cluster| cluster.changes_before).collect::<Vec<_>>())
                .push_bind(clusters.iter().map(|cluster| cluster.changes).collect::<Vec<_>>());
            sql.push(
                ") AS d (cluster_id, before, changes) WHERE c.cluster_id = d.cluster_id AND c.changes = d.before RETURNING 1",
            );
        });
        self.part("queues", "linkis_external_queue", queues.path.len(), |sql| {
            sql.push(
                "INSERT INTO linkis_external_queue (cluster_id, path, unseen_memory, unseen_cores) SELECT * FROM unnest(",
            );
            sql.separated(", ")
                .push_bind(queues.cluster_id)
                .push_bind(queues.path)
                .push_bind(queues.memory)
                .push_bind(queues.cores);
            sql.push(
                ") ON CONFLICT (cluster_id, path) DO UPDATE
                    SET unseen_memory = excluded.unseen_memory, unseen_cores = excluded.unseen_cores
                RETURNING 1",
            );
        });
    }

    /// Adds the external amounts of tickets; an ended ticket keeps its last amounts.
    fn cluster_tickets(&mut self, tickets: &[ClusterTicketDelta]) {
        let phase = |delta: &ClusterTicketDelta| match &delta.ticket.held.phase {
            TicketPhase::Locked => (None, None),
            TicketPhase::Used { since, application_id } => (Some(*since), application_id.clone()),
        };
        self.part("cluster_tickets", "linkis_external_ticket", tickets.len(), |sql| {
            sql.push(
                "INSERT INTO linkis_external_ticket (ticket_id, cluster_id, path, memory, cores, used_since, application_id,
                    change, ended) SELECT * FROM unnest(",
            );
            sql.separated(", ")
                .push_bind(tickets.iter().map(|delta| delta.ticket_id).collect::<Vec<_>>())
                .push_bind(tickets.iter().map(|delta| delta.ticket.cluster_id).collect::<Vec<_>>())
                .push_bind(tickets.iter().map(|delta| delta.ticket.path.as_str()).collect::<Vec<_>>())
                .push_bind(tickets.iter().map(|delta| delta.ticket.held.amounts.memory).collect::<Vec<_>>())
                .push_bind(tickets.iter().map(|delta| delta.ticket.held.amounts.cores).collect::<Vec<_>>())
                .push_bind(tickets.iter().map(|delta| phase(delta).0).collect::<Vec<_>>())
                .push_bind(tickets.iter().map(|delta| phase(delta).1).collect::<Vec<_>>())
                .push_bind(tickets.iter().map(|delta| delta.change).collect::<Vec<_>>())
                .push_bind(tickets.iter().map(|delta| delta.ended).collect::<Vec<_>>());
            sql.push(
                ") ON CONFLICT (ticket_id) DO UPDATE SET memory = excluded.memory, cores = excluded.cores,
                    used_since = excluded.used_since, application_id = excluded.application_id, change = excluded.change,
                    ended = excluded.ended
                RETURNING 1",
            );
        });
    }

    fn dropped(&mut self, locks: Locks) {
        self.part("dropped", "linkis_resource_lock", locks.count, |sql| {
            // Deletes by ctid. The planner may scan a heap that is full of dead rows for a deletion by key.
            sql.push("DELETE FROM linkis_resource_lock WHERE ctid = ANY (").push_bind(locks.places);
            sql.push("::text::tid[]) RETURNING 1");
        });
    }

    async fn execute(mut self, connection: &mut PgConnection, own: Option<Uuid>) -> Result<WriteResult, StoreError> {
        let is_recorded = self.parts.iter().any(|part| part.name == RECORDED);
        self.sql.push(" SELECT ARRAY[");
        for (nth, part) in self.parts.iter().enumerate() {
            let separator = if nth == 0 { "" } else { ", " };
            self.sql.push(separator).push("(SELECT count(*) FROM ").push(part.name).push(")");
        }
        self.sql.push(
            "]::bigint[], EXISTS (SELECT FROM linkis_rm_instance
                WHERE alive_until > clock_timestamp() AND instance_id IS DISTINCT FROM ",
        );
        self.sql.push_bind(own).push("), ");
        self.sql.push(if is_recorded { "(SELECT min(id) FROM recorded)" } else { "NULL::bigint" });
        let (touched, others_wait, first_line): (Vec<i64>, bool, Option<i64>) =
            self.sql.build_query_as().fetch_one(connection).await?;
        for (part, touched) in self.parts.iter().zip(touched) {
            expect_rows(part.table, part.rows, touched.unsigned_abs())?;
        }
        Ok(WriteResult { others_wait, first_line })
    }
}

/// Pushes a query for the columns of history lines, with the number of each line if `numbered`.
fn push_records(
    sql: &mut QueryBuilder<Postgres>,
    records: action_record::ActionColumns<'_>,
    now: OffsetDateTime,
    numbered: bool,
) {
    sql.push(
        r#"SELECT action, ticket_id, "user", creator, engine_type, labels::jsonb, engine_application_name, engine_instance,
            em_application_name, em_instance, resource_type, resource::jsonb, actor, reason, held_since, "#,
    );
    let has_acts = !records.acts.address.is_empty();
    sql.push(if has_acts { "address, before, after, " } else { "NULL, NULL, NULL, " });
    sql.push_bind(now).push(if numbered { ", line FROM unnest(" } else { " FROM unnest(" });
    let mut columns = sql.separated(", ");
    columns
        .push_bind(records.action)
        .push_bind(records.ticket_id)
        .push_bind(records.user)
        .push_bind(records.creator)
        .push_bind(records.engine_type)
        .push_bind(records.labels)
        .push_bind(records.engine_application_name)
        .push_bind(records.engine_instance)
        .push_bind(records.em_application_name)
        .push_bind(records.em_instance)
        .push_bind(records.resource_type)
        .push_bind(records.resource)
        .push_bind(records.actor)
        .push_bind(records.reason)
        .push_bind(records.held_since);
    if has_acts {
        columns.push_bind(records.acts.address).push_bind(records.acts.before).push_bind(records.acts.after);
    }
    if numbered {
        columns.push_bind(records.line);
    }
    sql.push(
        r#") AS r (action, ticket_id, "user", creator, engine_type, labels, engine_application_name, engine_instance,
            em_application_name, em_instance, resource_type, resource, actor, reason, held_since"#,
    );
    sql.push(if has_acts { ", address, before, after" } else { "" }).push(if numbered { ", line)" } else { ")" });
}

/// Pushes a query for the same columns of the granted tickets, in the order of the decisions.
fn push_granted(sql: &mut QueryBuilder<Postgres>) {
    sql.push("SELECT ").push_bind(Action::Granted.as_str()).push(
        r#", ticket_id, "user", creator, engine_type, labels, NULL, NULL, em_application_name, em_instance, resource_type,
            user_locked_resource, principal, NULL, NULL::timestamptz, NULL, NULL, NULL, locked_time FROM granted"#,
    );
}

/// Columns of confirmed tickets.
#[derive(Default)]
struct UsedTicketColumns<'a> {
    ticket_id: Vec<Uuid>,
    used: Vec<String>,
    used_time: Vec<OffsetDateTime>,
    engine_application_name: Vec<&'a str>,
    engine_instance: Vec<&'a str>,
}

impl<'a> UsedTicketColumns<'a> {
    fn of(tickets: &'a [Ticket]) -> Self {
        let mut columns = Self::default();
        for ticket in tickets {
            if let TicketState::Used { resource, engine, used_time } = &ticket.state {
                columns.ticket_id.push(ticket.id);
                columns.used.push(resource.to_json());
                columns.used_time.push(*used_time);
                columns.engine_application_name.push(engine.application_name.as_str());
                columns.engine_instance.push(engine.instance.as_str());
            }
        }
        columns
    }
}

fn expires_at(ticket: &Ticket) -> Option<OffsetDateTime> {
    match ticket.state {
        TicketState::Locked { expires_at, .. } => Some(expires_at),
        TicketState::Used { .. } => None,
    }
}
