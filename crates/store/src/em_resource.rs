//! `linkis_em_resource_meta_data`: EMs with their capacity, counters and labels.
//!
//! Every update states the version that was read and fails with [`StoreError::RowCount`] if the row has changed since
//! (invariant 13 of ARCHITECTURE.md). `batch_write` writes the counters of a batch. Callers: the committer, background
//! tasks, audits and lists.
//!
//! Submodule `list`: pages of EMs for operators.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use sqlx::{PgConnection, PgExecutor, Row as _, postgres::PgRow};

use rm_model::{
    audit::{StoredEmCounters, TrueCounters},
    em::{Em, EmInstance, LabelSetProgress, UnregisterProgress},
    limit::Limits,
    resource::{Dimension, LeftResource},
    ticket_digest::TicketDigest,
    ticket_end::TicketEnd,
};

use super::{
    StoreError, em_drain, expect_rows,
    limit::{self, CurrentLimits},
    policy,
    rows::{BoundQuery, TableName, TableRow, column, em_columns, labels_json},
};

mod list;

pub use list::{EmFilter, EmScan, list};

const TABLE: TableName = TableName("linkis_em_resource_meta_data");

fn unregister_progress(row: TableRow<'_>) -> Result<Option<UnregisterProgress>, StoreError> {
    let Some(epoch) = row.get("going_epoch")? else { return Ok(None) };
    Ok(Some(UnregisterProgress {
        epoch,
        end: row.parse("going_end", TicketEnd::parse)?,
        after: row.get("going_after")?,
    }))
}

fn em(row: TableRow<'_>) -> Result<Em, StoreError> {
    let resource_type = row.resource_type()?;
    let under_way = row.get::<Option<i64>>("counting_to")?.zip(row.get("counted_after")?);
    Ok(Em {
        instance: row.em()?,
        total: row.resource("total_resource", resource_type)?,
        protected: row.resource("protected_resource", resource_type)?,
        used: row.resource("used_resource", resource_type)?,
        locked: row.resource("locked_resource", resource_type)?,
        used_tickets: TicketDigest { count: row.get("used_tickets")?, xor: row.get("used_tickets_xor")? },
        labels: row.labels("labels")?,
        reserved: row.labels("reserved_labels")?,
        epoch: row.get("epoch")?,
        register_time: row.get("register_time")?,
        version: row.get("version")?,
        going: unregister_progress(row)?,
        counted: LabelSetProgress { to: row.get("counted_to")?, under_way },
        drain: em_drain::drain(row)?,
        is_held: false,
    })
}

/// Returns the EMs among `instances` that exist.
pub async fn read(
    executor: impl PgExecutor<'_>,
    instances: impl IntoIterator<Item = &EmInstance>,
) -> Result<HashMap<EmInstance, Em>, StoreError> {
    let (application_names, em_instances) = em_columns(instances);
    let rows = sqlx::query(
        r#"-- em_resource::read
        SELECT e.em_application_name, e.em_instance, resource_type, total_resource::text, protected_resource::text,
            used_resource::text, locked_resource::text, used_tickets, used_tickets_xor, labels::text,
            reserved_labels::text, epoch, register_time,
            version, going_epoch, going_end, going_after, counted_to, counting_to, counted_after, reason, drained_by, drain_time,
            EXISTS (SELECT FROM linkis_resource_hold h WHERE h.scope = 'em' AND h."user" = ''
                AND h.em_application_name = e.em_application_name AND h.em_instance = e.em_instance
                AND h.hold_until > clock_timestamp()) AS is_held
        FROM unnest($1::text[], $2::text[]) AS k (em_application_name, em_instance)
        JOIN linkis_em_resource_meta_data e
            ON e.em_application_name = k.em_application_name AND e.em_instance = k.em_instance
        LEFT JOIN linkis_em_drain d
            ON d.em_application_name = e.em_application_name AND d.em_instance = e.em_instance"#,
    )
    .bind(application_names)
    .bind(em_instances)
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, |row| {
        let em = Em { is_held: row.get("is_held")?, ..em(row)? };
        Ok((em.instance.clone(), em))
    })
}

/// Reads the first input of a batch in one statement: the present limits, a flag for waiters, and the EMs among
/// `instances` that exist.
///
/// Does not read whether the EMs are held. Returns `known` as the limits if they have not changed. The limits cannot change
/// until the transaction ends.
pub async fn read_in_force(
    connection: &mut PgConnection,
    known: &Arc<Limits>,
    instances: impl IntoIterator<Item = &EmInstance>,
) -> Result<(CurrentLimits, HashMap<EmInstance, Em>), StoreError> {
    let (application_names, em_instances) = em_columns(instances);
    let rows = sqlx::query(
        "-- em_resource::read_in_force
        SELECT v.version AS limits_version, v.oldest_writer,
            EXISTS (SELECT FROM linkis_rm_instance WHERE alive_until > clock_timestamp()) AS anybody_waits,
            EXISTS (SELECT FROM linkis_resource_hold) AS any_held, e.*
        FROM linkis_resource_limit_version v LEFT JOIN (
            SELECT e.em_application_name, e.em_instance, resource_type, total_resource::text, protected_resource::text,
                used_resource::text, locked_resource::text, used_tickets, used_tickets_xor, labels::text,
            reserved_labels::text, epoch, register_time,
            version, going_epoch, going_end, going_after, counted_to, counting_to, counted_after, reason, drained_by, drain_time
            FROM unnest($1::text[], $2::text[]) AS k (em_application_name, em_instance)
            JOIN linkis_em_resource_meta_data e
                ON e.em_application_name = k.em_application_name AND e.em_instance = k.em_instance
            LEFT JOIN linkis_em_drain d
                ON d.em_application_name = e.em_application_name AND d.em_instance = e.em_instance) e ON true
        WHERE v.only_row",
    )
    .bind(application_names)
    .bind(em_instances)
    .fetch_all(&mut *connection)
    .await?;
    let first = rows.first().ok_or_else(|| StoreError::inconsistent("linkis_resource_limit_version", "it is empty"))?;
    let (version, anybody_waits) = (first.try_get("limits_version")?, first.try_get("anybody_waits")?);
    let (any_held, oldest_writer) = (first.try_get("any_held")?, first.try_get("oldest_writer")?);
    let mut ems = HashMap::with_capacity(rows.len());
    for row in &rows {
        if row.try_get::<Option<&str>, _>("em_instance")?.is_some() {
            let em = em(TABLE.row(row))?;
            ems.insert(em.instance.clone(), em);
        }
    }
    let limits = limit::of_version(connection, version, known).await?;
    Ok((CurrentLimits { limits, anybody_waits, any_held, oldest_writer }, ems))
}

/// Returns the sum of the capacities of the registered EMs in each dimension, less what they protect.
pub async fn capacity(executor: impl PgExecutor<'_>) -> Result<BTreeMap<Dimension, i64>, StoreError> {
    let sums: (i64, i64, i64) = sqlx::query_as(
        "-- em_resource::capacity
        SELECT least(coalesce(sum((total_resource -> 'memory')::bigint - (protected_resource -> 'memory')::bigint), 0),
                9223372036854775807)::bigint,
            least(coalesce(sum((total_resource -> 'cores')::bigint - (protected_resource -> 'cores')::bigint), 0),
                9223372036854775807)::bigint,
            least(coalesce(sum((total_resource -> 'instances')::bigint - (protected_resource -> 'instances')::bigint), 0),
                9223372036854775807)::bigint
        FROM linkis_em_resource_meta_data",
    )
    .fetch_one(executor)
    .await?;
    Ok([(Dimension::Memory, sums.0), (Dimension::Cores, sums.1), (Dimension::Instances, sums.2)].into())
}

/// Returns whether any EM exists.
pub async fn is_any(executor: impl PgExecutor<'_>) -> Result<bool, StoreError> {
    Ok(sqlx::query_scalar(
        "-- em_resource::is_any
        SELECT EXISTS (SELECT FROM linkis_em_resource_meta_data)",
    )
    .fetch_one(executor)
    .await?)
}

/// Returns up to `limit` EMs whose tickets are being ended, ordered by key.
pub async fn going(executor: impl PgExecutor<'_>, limit: i64) -> Result<Vec<EmInstance>, StoreError> {
    let rows = sqlx::query(
        "-- em_resource::going
        SELECT em_application_name, em_instance FROM linkis_em_resource_meta_data WHERE going_epoch IS NOT NULL
        ORDER BY em_application_name, em_instance LIMIT $1",
    )
    .bind(limit)
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, |row| row.em())
}

/// Returns up to `limit` EMs after `after`, ordered by key, each with the number of the last label set that its tickets
/// are counted by.
pub async fn counted(
    executor: impl PgExecutor<'_>,
    after: Option<&EmInstance>,
    limit: i64,
) -> Result<Vec<(EmInstance, i64)>, StoreError> {
    let after = after.map_or(("", ""), |em| (em.application_name.as_str(), em.instance.as_str()));
    let rows = sqlx::query(
        "-- em_resource::counted
        SELECT em_application_name, em_instance, counted_to FROM linkis_em_resource_meta_data
        WHERE (em_application_name, em_instance) > ($1, $2)
        ORDER BY em_application_name, em_instance LIMIT $3",
    )
    .bind(after.0)
    .bind(after.1)
    .bind(limit)
    .fetch_all(executor)
    .await?;
    TABLE.parse(&rows, |row| Ok((row.em()?, row.get("counted_to")?)))
}

/// Updates all columns of EMs that registered again, or that a step changed. Fails with [`StoreError::RowCount`] if a version
/// has changed.
pub async fn update(connection: &mut PgConnection, ems: &[Em]) -> Result<(), StoreError> {
    let update = sqlx::query(
        "-- em_resource::update
        UPDATE linkis_em_resource_meta_data e SET
            resource_type = d.resource_type, total_resource = d.total::jsonb, protected_resource = d.protected::jsonb,
            used_resource = d.used::jsonb, locked_resource = d.locked::jsonb, left_resource = d.rest::jsonb,
            used_tickets = d.used_tickets, used_tickets_xor = d.used_tickets_xor,
            over_committed = d.over_committed, labels = d.labels::jsonb,
            reserved_labels = d.reserved_labels::jsonb, epoch = d.epoch, register_time = d.register_time,
            version = e.version + 1, going_epoch = d.going_epoch, going_end = d.going_end, going_after = d.going_after,
            counted_to = d.counted_to, counting_to = d.counting_to, counted_after = d.counted_after
        FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[],
            $9::bool[], $10::text[], $11::bigint[], $12::timestamptz[], $13::bigint[], $14::bigint[], $15::text[],
            $16::uuid[], $17::bigint[], $18::bigint[], $19::uuid[], $20::bigint[], $21::uuid[], $22::text[])
            AS d (em_application_name, em_instance, resource_type, total, protected, used, locked, rest,
                over_committed, labels, epoch, register_time, version, going_epoch, going_end, going_after, counted_to,
                counting_to, counted_after, used_tickets, used_tickets_xor, reserved_labels)
        WHERE e.em_application_name = d.em_application_name AND e.em_instance = d.em_instance AND e.version = d.version",
    );
    let done = bind_ems(update, ems)?.execute(connection).await?;
    expect_rows(TABLE.0, ems.len(), done.rows_affected())
}

/// Inserts new EMs, and the policies of new kinds.
pub async fn insert(connection: &mut PgConnection, ems: &[Em]) -> Result<(), StoreError> {
    policy::insert(connection, &column(ems, |em| em.instance.application_name.as_str())).await?;
    let insert = sqlx::query(
        "-- em_resource::insert
        INSERT INTO linkis_em_resource_meta_data (em_application_name, em_instance, resource_type, total_resource,
            protected_resource, used_resource, locked_resource, left_resource, over_committed, labels, epoch,
            register_time, version, going_epoch, going_end, going_after, counted_to, counting_to, counted_after,
            used_tickets, used_tickets_xor, reserved_labels)
        SELECT em_application_name, em_instance, resource_type, total::jsonb, protected::jsonb, used::jsonb,
            locked::jsonb, rest::jsonb, over_committed, labels::jsonb, epoch, register_time, version + 1, going_epoch,
            going_end, going_after, counted_to, counting_to, counted_after, used_tickets, used_tickets_xor,
            reserved_labels::jsonb
        FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[],
            $9::bool[], $10::text[], $11::bigint[], $12::timestamptz[], $13::bigint[], $14::bigint[], $15::text[],
            $16::uuid[], $17::bigint[], $18::bigint[], $19::uuid[], $20::bigint[], $21::uuid[], $22::text[])
            AS d (em_application_name, em_instance, resource_type, total, protected, used, locked, rest,
                over_committed, labels, epoch, register_time, version, going_epoch, going_end, going_after, counted_to,
                counting_to, counted_after, used_tickets, used_tickets_xor, reserved_labels)",
    );
    let done = bind_ems(insert, ems)?.execute(connection).await?;
    expect_rows(TABLE.0, ems.len(), done.rows_affected())
}

/// Deletes EMs. Fails with [`StoreError::RowCount`] if a version has changed.
pub async fn delete(connection: &mut PgConnection, ems: &[Em]) -> Result<(), StoreError> {
    let (application_names, instances) = em_columns(ems.iter().map(|em| &em.instance));
    let done = sqlx::query(
        "-- em_resource::delete
        DELETE FROM linkis_em_resource_meta_data e
        USING unnest($1::text[], $2::text[], $3::bigint[]) AS d (em_application_name, em_instance, version)
        WHERE e.em_application_name = d.em_application_name AND e.em_instance = d.em_instance AND e.version = d.version",
    )
    .bind(application_names)
    .bind(instances)
    .bind(column(ems, |em| em.version))
    .execute(connection)
    .await?;
    expect_rows(TABLE.0, ems.len(), done.rows_affected())
}

/// Returns the stored counters in a row.
pub(super) fn stored_counters(row: &PgRow) -> Result<StoredEmCounters, StoreError> {
    let row = TABLE.row(row);
    let resource_type = row.resource_type()?;
    let counter = |column| row.resource(column, resource_type).map_err(|error| error.to_string());
    let left: &str = row.get("left_resource")?;
    Ok(StoredEmCounters {
        instance: row.em()?,
        total: row.resource("total_resource", resource_type)?,
        protected: row.resource("protected_resource", resource_type)?,
        used: counter("used_resource"),
        locked: counter("locked_resource"),
        left: LeftResource::amounts_from_json(resource_type, left)
            .map_err(|error| format!("left_resource {left}: {error}")),
        used_tickets: TicketDigest { count: row.get("used_tickets")?, xor: row.get("used_tickets_xor")? },
        over_committed: row.get("over_committed")?,
        version: row.get("version")?,
    })
}

/// Returns the stored counters of an EM, also if they contradict one another; `None` if the EM does not exist.
pub async fn books(connection: &mut PgConnection, em: &EmInstance) -> Result<Option<StoredEmCounters>, StoreError> {
    let row = sqlx::query(
        "-- em_resource::books
        SELECT em_application_name, em_instance, resource_type, total_resource::text, protected_resource::text,
            used_resource::text, locked_resource::text, left_resource::text, used_tickets, used_tickets_xor, over_committed,
            version
        FROM linkis_em_resource_meta_data WHERE em_application_name = $1 AND em_instance = $2",
    )
    .bind(em.application_name.as_str())
    .bind(em.instance.as_str())
    .fetch_optional(connection)
    .await?;
    row.map(|row| stored_counters(&row)).transpose()
}

/// Replaces the counters of an EM by `counters`. Fails with [`StoreError::RowCount`] if the version of `books` has
/// changed.
pub async fn repair(
    connection: &mut PgConnection,
    books: &StoredEmCounters,
    counters: &TrueCounters,
) -> Result<(), StoreError> {
    let done = sqlx::query(
        "-- em_resource::repair
        UPDATE linkis_em_resource_meta_data SET used_resource = $3::text::jsonb, locked_resource = $4::text::jsonb,
            left_resource = $5::text::jsonb, over_committed = $6, version = version + 1,
            used_tickets = $8, used_tickets_xor = $9
        WHERE em_application_name = $1 AND em_instance = $2 AND version = $7",
    )
    .bind(books.instance.application_name.as_str())
    .bind(books.instance.instance.as_str())
    .bind(counters.used.to_json())
    .bind(counters.locked.to_json())
    .bind(counters.left.to_json())
    .bind(counters.left.is_negative_anywhere())
    .bind(books.version)
    .bind(counters.used_tickets.count)
    .bind(counters.used_tickets.xor)
    .execute(connection)
    .await?;
    expect_rows(TABLE.0, 1, done.rows_affected())
}

/// Binds all columns of EMs.
fn bind_ems<'q>(query: BoundQuery<'q>, ems: &'q [Em]) -> Result<BoundQuery<'q>, StoreError> {
    let left = left_amounts(ems)?;
    Ok(query
        .bind(column(ems, |em| em.instance.application_name.as_str()))
        .bind(column(ems, |em| em.instance.instance.as_str()))
        .bind(column(ems, |em| em.resource_type().as_str()))
        .bind(column(ems, |em| em.total.to_json()))
        .bind(column(ems, |em| em.protected.to_json()))
        .bind(column(ems, |em| em.used.to_json()))
        .bind(column(ems, |em| em.locked.to_json()))
        .bind(column(&left, LeftResource::to_json))
        .bind(column(&left, LeftResource::is_negative_anywhere))
        .bind(column(ems, |em| labels_json(&em.labels)))
        .bind(column(ems, |em| em.epoch))
        .bind(column(ems, |em| em.register_time))
        .bind(column(ems, |em| em.version))
        .bind(column(ems, |em| em.going.map(|going| going.epoch)))
        .bind(column(ems, |em| em.going.map(|going| going.end.as_str())))
        .bind(column(ems, |em| em.going.map(|going| going.after)))
        .bind(column(ems, |em| em.counted.to))
        .bind(column(ems, |em| em.counted.under_way.map(|(to, _)| to)))
        .bind(column(ems, |em| em.counted.under_way.map(|(_, after)| after)))
        .bind(column(ems, |em| em.used_tickets.count))
        .bind(column(ems, |em| em.used_tickets.xor))
        .bind(column(ems, |em| labels_json(&em.reserved))))
}

/// Returns the free capacity of each EM.
pub(super) fn left_amounts(ems: &[Em]) -> Result<Vec<LeftResource>, StoreError> {
    ems.iter().map(|em| em.left().map_err(|error| StoreError::inconsistent(TABLE.0, error))).collect()
}
