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
    name::Name,
    recorded_state::RecordedState,
    resource::{LeftResource, Resource},
    scope::{ScopeCounter, ScopeHoldings},
    ticket::{EngineInstance, Ticket, TicketState},
};

use super::{
    StoreError,
    action_record::BatchRecord,
    em_resource, expect_rows, label_resource,
    resource_lock::Locks,
    rows::{column, labels_json, tally_json},
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
    let (records, granted) = BatchRecord::of(deltas);
    statement.history(&records, granted, now);
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
        let left = em_resource::left_amounts(ems)?;
        self.part("counted", "linkis_em_resource_meta_data", ems.len(), |sql| {
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
                .push_bind(column(ems, |em| em.instance.application_name.as_str()))
                .push_bind(column(ems, |em| em.instance.instance.as_str()))
                .push_bind(column(ems, |em| em.used.to_json()))
                .push_bind(column(ems, |em| em.locked.to_json()))
                .push_bind(column(&left, LeftResource::to_json))
                .push_bind(column(&left, LeftResource::is_negative_anywhere))
                .push_bind(column(ems, |em| em.version))
                .push_bind(column(ems, |em| em.used_tickets.count))
                .push_bind(column(ems, |em| em.used_tickets.xor));
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
        let in_use = confirmed(tickets);
        self.part("in_use", "linkis_user_resource_meta_data", tickets.len(), |sql| {
            sql.push(
                "UPDATE linkis_user_resource_meta_data t SET
                    user_locked_resource = NULL, expires_at = NULL, user_used_resource = d.used::jsonb,
                    used_time = d.used_time, engine_application_name = d.engine_application_name,
                    engine_instance = d.engine_instance
                FROM unnest(",
            );
            sql.separated(", ")
                .push_bind(column(&in_use, |(ticket, ..)| ticket.id))
                .push_bind(column(&in_use, |(_, used)| used.resource.to_json()))
                .push_bind(column(&in_use, |(_, used)| used.time))
                .push_bind(column(&in_use, |(_, used)| used.engine.application_name.as_str()))
                .push_bind(column(&in_use, |(_, used)| used.engine.instance.as_str()));
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
        self.part("granted", "linkis_user_resource_meta_data", tickets.len(), |sql| {
            sql.push(
                r#"INSERT INTO linkis_user_resource_meta_data (ticket_id, "user", creator, engine_type, em_application_name,
                    em_instance, resource_type, user_locked_resource, labels, locked_time, expires_at, principal, em_epoch)
                SELECT ticket_id, "user", creator, engine_type, em_application_name, em_instance, resource_type,
                    locked::jsonb, labels::jsonb, locked_time, expires_at, principal, em_epoch
                FROM unnest("#,
            );
            sql.separated(", ")
                .push_bind(column(tickets, |ticket| ticket.id))
                .push_bind(column(tickets, |ticket| ticket.user.as_str()))
                .push_bind(column(tickets, |ticket| ticket.creator.as_str()))
                .push_bind(column(tickets, |ticket| ticket.engine_type.as_str()))
                .push_bind(column(tickets, |ticket| ticket.em.application_name.as_str()))
                .push_bind(column(tickets, |ticket| ticket.em.instance.as_str()))
                .push_bind(column(tickets, |ticket| ticket.resource_type().as_str()))
                .push_bind(column(tickets, |ticket| ticket.resource().to_json()))
                .push_bind(column(tickets, |ticket| labels_json(&ticket.labels)))
                .push_bind(column(tickets, |ticket| ticket.locked_time))
                .push_bind(column(tickets, expires_at))
                .push_bind(column(tickets, |ticket| ticket.principal.as_str()))
                .push_bind(column(tickets, |ticket| ticket.em_epoch));
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
        let in_use = confirmed(tickets);
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
                .push_bind(column(&in_use, |(ticket, ..)| ticket.id))
                .push_bind(column(tickets, |ticket| ticket.user.as_str()))
                .push_bind(column(tickets, |ticket| ticket.creator.as_str()))
                .push_bind(column(tickets, |ticket| ticket.engine_type.as_str()))
                .push_bind(column(tickets, |ticket| ticket.em.application_name.as_str()))
                .push_bind(column(tickets, |ticket| ticket.em.instance.as_str()))
                .push_bind(column(tickets, |ticket| ticket.resource_type().as_str()))
                .push_bind(column(&in_use, |(_, used)| used.resource.to_json()))
                .push_bind(column(tickets, |ticket| labels_json(&ticket.labels)))
                .push_bind(column(tickets, |ticket| ticket.locked_time))
                .push_bind(column(&in_use, |(_, used)| used.time))
                .push_bind(column(&in_use, |(_, used)| used.engine.application_name.as_str()))
                .push_bind(column(&in_use, |(_, used)| used.engine.instance.as_str()))
                .push_bind(column(tickets, |ticket| ticket.principal.as_str()))
                .push_bind(column(tickets, |ticket| ticket.em_epoch));
            sql.push(
                r#") AS d (ticket_id, "user", creator, engine_type, em_application_name, em_instance, resource_type, used,
                    labels, locked_time, used_time, engine_application_name, engine_instance, principal, em_epoch)
                RETURNING 1"#,
            );
        });
    }

    /// Adds the history lines in the order of the decisions: `records`, interleaved with the granted tickets at the
    /// line numbers `granted`. The ids of the rows ascend in that order.
    fn history(&mut self, records: &[BatchRecord<'_>], granted: Vec<i32>, now: OffsetDateTime) {
        let rows = records.len() + granted.len();
        self.part(RECORDED, "linkis_resource_action_record", rows, |sql| {
            sql.push("INSERT INTO linkis_resource_action_record (").push(LINE_COLUMNS).push(") ");
            match (records.is_empty(), granted.is_empty()) {
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
        self.part("scopes", "linkis_label_resource", counters.len(), |sql| {
            sql.push(
                "UPDATE linkis_label_resource s SET
                    used_resource = d.used::jsonb, locked_resource = d.locked::jsonb, version = s.version + 1
                FROM unnest(",
            );
            sql.separated(", ")
                .push_bind(column(counters, |(counter, _)| label_resource::scope_hash(counter).to_vec()))
                .push_bind(column(counters, |(_, usage)| tally_json(usage.used.amounts())))
                .push_bind(column(counters, |(_, usage)| tally_json(usage.locked.amounts())));
            sql.push(") AS d (scope_hash, used, locked) WHERE s.scope_hash = d.scope_hash RETURNING 1");
        });
    }

    /// Adds the unseen use of external queues. The caller has locked the cluster rows.
    fn clusters(&mut self, clusters: &[ClusterDelta]) {
        let queues: Vec<_> = (clusters.iter())
            .flat_map(|cluster| cluster.unseen.iter().map(|(path, unseen)| (cluster.cluster_id, path, unseen)))
            .collect();
        self.part("clusters", "linkis_external_cluster", clusters.len(), |sql| {
            sql.push("UPDATE linkis_external_cluster c SET changes = d.changes FROM unnest(");
            sql.separated(", ")
                .push_bind(column(clusters, |cluster| cluster.cluster_id))
                .push_bind(column(clusters, |cluster| cluster.changes_before))
                .push_bind(column(clusters, |cluster| cluster.changes));
            sql.push(
                ") AS d (cluster_id, before, changes) WHERE c.cluster_id = d.cluster_id AND c.changes = d.before RETURNING 1",
            );
        });
        self.part("queues", "linkis_external_queue", queues.len(), |sql| {
            sql.push(
                "INSERT INTO linkis_external_queue (cluster_id, path, unseen_memory, unseen_cores) SELECT * FROM unnest(",
            );
            sql.separated(", ")
                .push_bind(column(&queues, |(cluster_id, ..)| *cluster_id))
                .push_bind(column(&queues, |(_, path, _)| path.as_str()))
                .push_bind(column(&queues, |(.., unseen)| unseen.memory))
                .push_bind(column(&queues, |(.., unseen)| unseen.cores));
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
                .push_bind(column(tickets, |delta| delta.ticket_id))
                .push_bind(column(tickets, |delta| delta.ticket.cluster_id))
                .push_bind(column(tickets, |delta| delta.ticket.path.as_str()))
                .push_bind(column(tickets, |delta| delta.ticket.held.amounts.memory))
                .push_bind(column(tickets, |delta| delta.ticket.held.amounts.cores))
                .push_bind(column(tickets, |delta| phase(delta).0))
                .push_bind(column(tickets, |delta| phase(delta).1))
                .push_bind(column(tickets, |delta| delta.change))
                .push_bind(column(tickets, |delta| delta.ended));
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
fn push_records(sql: &mut QueryBuilder<Postgres>, records: &[BatchRecord<'_>], now: OffsetDateTime, numbered: bool) {
    sql.push(
        r#"SELECT action, ticket_id, "user", creator, engine_type, labels::jsonb, engine_application_name, engine_instance,
            em_application_name, em_instance, resource_type, resource::jsonb, actor, reason, held_since, "#,
    );
    let has_acts = records.iter().any(BatchRecord::is_act);
    sql.push(if has_acts { "address, before, after, " } else { "NULL, NULL, NULL, " });
    sql.push_bind(now).push(if numbered { ", line FROM unnest(" } else { " FROM unnest(" });
    let mut columns = sql.separated(", ");
    columns
        .push_bind(column(records, |record| record.action.as_str()))
        .push_bind(column(records, |record| record.ticket.map(|ticket| ticket.id)))
        .push_bind(column(records, |record| record.ticket.map(|ticket| ticket.user.as_str())))
        .push_bind(column(records, |record| record.ticket.map(|ticket| ticket.creator.as_str())))
        .push_bind(column(records, |record| record.ticket.map(|ticket| ticket.engine_type.as_str())))
        .push_bind(column(records, |record| record.ticket.map(|ticket| labels_json(&ticket.labels))))
        .push_bind(column(records, |record| record.engine().map(|engine| engine.application_name.as_str())))
        .push_bind(column(records, |record| record.engine().map(|engine| engine.instance.as_str())))
        .push_bind(column(records, |record| record.em.application_name.as_str()))
        .push_bind(column(records, |record| record.em.instance.as_str()))
        .push_bind(column(records, |record| record.resource.resource_type().as_str()))
        .push_bind(column(records, |record| record.resource.to_json()))
        .push_bind(column(records, |record| record.actor))
        .push_bind(column(records, |record| record.reason.map(Name::as_str)))
        .push_bind(column(records, |record| record.held_since));
    if has_acts {
        columns
            .push_bind(column(records, |record| record.address))
            .push_bind(column(records, |record| record.before.as_ref().map(RecordedState::as_str)))
            .push_bind(column(records, |record| record.after.as_ref().map(RecordedState::as_str)));
    }
    if numbered {
        columns.push_bind(column(records, |record| record.line));
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

/// Use of a confirmed ticket.
struct ConfirmedUse<'a> {
    resource: &'a Resource,
    engine: &'a EngineInstance,
    time: OffsetDateTime,
}

/// Returns the confirmed tickets with their use.
fn confirmed(tickets: &[Ticket]) -> Vec<(&Ticket, ConfirmedUse<'_>)> {
    let confirmed = tickets.iter().filter_map(|ticket| match &ticket.state {
        TicketState::Used { resource, engine, used_time, .. } => {
            Some((ticket, ConfirmedUse { resource, engine, time: *used_time }))
        }
        TicketState::Locked { .. } => None,
    });
    confirmed.collect()
}

fn expires_at(ticket: &Ticket) -> Option<OffsetDateTime> {
    match ticket.state {
        TicketState::Locked { expires_at, .. } => Some(expires_at),
        TicketState::Used { .. } => None,
    }
}
