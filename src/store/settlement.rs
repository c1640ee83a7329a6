//! What nearly every batch writes, in one statement: a batch waits for the database once, however much has happened in it.

use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::domain::{
    action::Action,
    ledger::Deltas,
    principal::Principal,
    ticket::{Ticket, TicketState},
};

use super::{
    StoreError, action_record, em_resource, expect_rows, label_resource,
    resource_lock::Locks,
    rows::{em_columns, labels_json},
};

/// How many rows each part of the statement has touched, and whether anybody else may wait in line.
type Touched = (i64, i64, i64, i64, i64, i64, i64, bool);

/// Writes the counters of EMs, each with the version that was read, and those of scopes, whose rows are locked; tickets whose
/// engine has reported in, that ended and that were granted; the history of all that at `now`; and drops `locks`, whose rows were
/// never visible to anyone. Answers whether anybody may wait in line but on the instance `own`.
pub async fn write(
    connection: &mut PgConnection,
    deltas: &Deltas,
    now: OffsetDateTime,
    locks: Option<Locks>,
    own: Option<Uuid>,
) -> Result<bool, StoreError> {
    let ems = em_resource::Columns::of(&deltas.ems_counted)?;
    let inited = Inited::of(&deltas.inited);
    let ended: Vec<Uuid> = deltas.ended.iter().filter(|ended| ended.stored).map(|ended| ended.ticket.id).collect();
    let granted = &deltas.granted;
    let (application_names, instances) = em_columns(granted.iter().map(|ticket| &ticket.em));
    let records = action_record::Columns::of(deltas);
    let scopes = label_resource::Columns::of(&deltas.scopes);
    let (places, locked) = locks.map_or_else(|| ("{}".to_owned(), 0), |locks| (locks.places, locks.count));
    let touched: Touched = sqlx::query_as(
        r#"-- settlement::write
        WITH counted AS (
            UPDATE linkis_em_resource_meta_data e SET
                used_resource = d.used::jsonb, locked_resource = d.locked::jsonb, left_resource = d.rest::jsonb,
                -- Only a registration may set it; a grant that over-commits is refused by the constraint.
                over_committed = e.over_committed AND d.over_committed, version = e.version + 1,
                used_tickets = d.used_tickets, used_tickets_xor = d.used_tickets_xor
            FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bool[], $7::bigint[],
                $46::bigint[], $47::uuid[])
                AS d (em_application_name, em_instance, used, locked, rest, over_committed, version, used_tickets,
                    used_tickets_xor)
            WHERE e.em_application_name = d.em_application_name AND e.em_instance = d.em_instance
                AND e.version = d.version
            RETURNING 1),
        inited AS (
            UPDATE linkis_user_resource_meta_data t SET
                user_locked_resource = NULL, expires_at = NULL, user_used_resource = d.used::jsonb,
                used_time = d.used_time, engine_application_name = d.engine_application_name,
                engine_instance = d.engine_instance
            FROM unnest($8::uuid[], $9::text[], $10::timestamptz[], $11::text[], $12::text[])
                AS d (ticket_id, used, used_time, engine_application_name, engine_instance)
            WHERE t.ticket_id = d.ticket_id
            RETURNING 1),
        ended AS (DELETE FROM linkis_user_resource_meta_data WHERE ticket_id = ANY ($13) RETURNING 1),
        d AS MATERIALIZED (
            SELECT ticket_id, "user", creator, engine_type, em_application_name, em_instance, resource_type,
                locked::jsonb AS locked, labels::jsonb AS labels, locked_time, expires_at, principal, em_epoch
            FROM unnest($14::uuid[], $15::text[], $16::text[], $17::text[], $18::text[], $19::text[], $20::text[],
                $21::text[], $22::text[], $23::timestamptz[], $24::timestamptz[], $38::text[], $39::bigint[])
                AS d (ticket_id, "user", creator, engine_type, em_application_name, em_instance, resource_type, locked,
                    labels, locked_time, expires_at, principal, em_epoch)),
        granted AS (
            INSERT INTO linkis_user_resource_meta_data (ticket_id, "user", creator, engine_type, em_application_name,
                em_instance, resource_type, user_locked_resource, labels, locked_time, expires_at, principal, em_epoch)
            SELECT * FROM d RETURNING 1),
        told AS (
            INSERT INTO linkis_resource_action_record (action, ticket_id, "user", creator, engine_type, labels,
                engine_application_name, engine_instance, em_application_name, em_instance, resource_type, resource, actor,
                action_time)
            -- What was given back stands before what was granted for it.
            SELECT action, ticket_id, "user", creator, engine_type, labels::jsonb, engine_application_name, engine_instance,
                em_application_name, em_instance, resource_type, resource::jsonb, actor, $25::timestamptz
            FROM unnest($26::text[], $27::uuid[], $28::text[], $29::text[], $30::text[], $31::text[], $32::text[],
                $40::text[], $41::text[], $42::text[], $43::text[], $44::text[], $45::text[])
                AS r (action, ticket_id, "user", em_application_name, em_instance, resource_type, resource, creator,
                    engine_type, labels, engine_application_name, engine_instance, actor)
            UNION ALL
            SELECT $33::text, ticket_id, "user", creator, engine_type, labels, NULL, NULL, em_application_name, em_instance,
                resource_type, locked, principal, locked_time FROM d
            RETURNING 1),
        -- By the place that the insert returned: by key, the planner may choose to scan a heap that is full of dead rows.
        dropped AS (DELETE FROM linkis_resource_lock WHERE ctid = ANY ($34::text::tid[]) RETURNING 1),
        scopes AS (
            UPDATE linkis_label_resource s SET used_resource = d.used::jsonb, locked_resource = d.locked::jsonb
            FROM unnest($35::bytea[], $36::text[], $37::text[]) AS d (scope_hash, used, locked)
            WHERE s.scope_hash = d.scope_hash
            RETURNING 1)
        SELECT (SELECT count(*) FROM counted), (SELECT count(*) FROM inited), (SELECT count(*) FROM ended),
            (SELECT count(*) FROM granted), (SELECT count(*) FROM told), (SELECT count(*) FROM dropped),
            (SELECT count(*) FROM scopes), EXISTS (
                SELECT FROM linkis_rm_instance WHERE alive_until > clock_timestamp() AND instance_id IS DISTINCT FROM $48)"#,
    )
    .bind(ems.em_application_name)
    .bind(ems.em_instance)
    .bind(ems.used)
    .bind(ems.locked)
    .bind(ems.left)
    .bind(ems.over_committed)
    .bind(ems.version)
    .bind(inited.ticket_id)
    .bind(inited.used)
    .bind(inited.used_time)
    .bind(inited.engine_application_name)
    .bind(inited.engine_instance)
    .bind(&ended)
    .bind(granted.iter().map(|ticket| ticket.id).collect::<Vec<_>>())
    .bind(granted.iter().map(|ticket| ticket.user.as_str()).collect::<Vec<_>>())
    .bind(granted.iter().map(|ticket| ticket.creator.as_str()).collect::<Vec<_>>())
    .bind(granted.iter().map(|ticket| ticket.engine_type.as_str()).collect::<Vec<_>>())
    .bind(application_names)
    .bind(instances)
    .bind(granted.iter().map(|ticket| ticket.resource_type().as_str()).collect::<Vec<_>>())
    .bind(granted.iter().map(|ticket| ticket.resource().to_json()).collect::<Vec<_>>())
    .bind(granted.iter().map(|ticket| labels_json(&ticket.labels)).collect::<Vec<_>>())
    .bind(granted.iter().map(|ticket| ticket.locked_time).collect::<Vec<_>>())
    .bind(granted.iter().map(expires_at).collect::<Vec<_>>())
    .bind(now)
    .bind(records.action)
    .bind(records.ticket_id)
    .bind(records.user)
    .bind(records.em_application_name)
    .bind(records.em_instance)
    .bind(records.resource_type)
    .bind(&records.resource)
    .bind(Action::Granted.as_str())
    .bind(places)
    .bind(scopes.scope_hash)
    .bind(scopes.used)
    .bind(scopes.locked)
    .bind(granted.iter().map(|ticket| ticket.principal.as_str()).collect::<Vec<_>>())
    .bind(granted.iter().map(|ticket| ticket.em_epoch).collect::<Vec<_>>())
    .bind(records.creator)
    .bind(records.engine_type)
    .bind(records.labels)
    .bind(records.engine_application_name)
    .bind(records.engine_instance)
    .bind(records.actor)
    .bind(ems.used_tickets)
    .bind(ems.used_tickets_xor)
    .bind(own)
    .fetch_one(connection)
    .await?;
    for (table, expected, touched) in [
        ("linkis_em_resource_meta_data", deltas.ems_counted.len(), touched.0),
        ("linkis_user_resource_meta_data", deltas.inited.len(), touched.1),
        ("linkis_user_resource_meta_data", ended.len(), touched.2),
        ("linkis_user_resource_meta_data", granted.len(), touched.3),
        ("linkis_resource_action_record", records.resource.len() + granted.len(), touched.4),
        ("linkis_resource_lock", locked, touched.5),
        ("linkis_label_resource", deltas.scopes.len(), touched.6),
    ] {
        expect_rows(table, expected, touched.unsigned_abs())?;
    }
    Ok(touched.7)
}

/// The columns of tickets whose engine has reported in.
#[derive(Default)]
struct Inited<'a> {
    ticket_id: Vec<Uuid>,
    used: Vec<String>,
    used_time: Vec<OffsetDateTime>,
    engine_application_name: Vec<&'a str>,
    engine_instance: Vec<&'a str>,
}

impl<'a> Inited<'a> {
    fn of(tickets: &'a [(Ticket, Principal)]) -> Self {
        let mut columns = Self::default();
        for (ticket, _) in tickets {
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
