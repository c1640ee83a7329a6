//! `linkis_em_resource_meta_data`: EMs with their capacity, counters and labels.
//!
//! Every update states the version that was read and fails with [`StoreError::RowCount`] if the row has changed since
//! (invariant 13 of ARCHITECTURE.md). `batch_write` writes the counters of a batch. Callers: the committer, background
//! tasks, audits and lists.
//!
//! Submodule `list`: pages of EMs for operators.

use std::{collections::HashMap, sync::Arc};

use sqlx::{FromRow as _, PgConnection, PgExecutor, Row as _};
use time::OffsetDateTime;
use uuid::Uuid;

use rm_model::{
    audit::{StoredEmCounters, TrueCounters},
    em::{Em, EmInstance, LabelSetProgress, UnregisterProgress},
    limit::Limits,
    resource::LeftResource,
    ticket_digest::TicketDigest,
    ticket_end::TicketEnd,
};

use super::{
    StoreError,
    em_drain::DrainColumns,
    expect_rows,
    limit::{self, CurrentLimits},
    policy,
    rows::{TableName, em_columns, labels_json},
};

mod list;

pub use list::{EmFilter, EmScan, list};

const TABLE: TableName = TableName("linkis_em_resource_meta_data");

from_row! {
    struct EmRow {
        em_application_name: String,
        em_instance: String,
        resource_type: String,
        total_resource: String,
        protected_resource: String,
        used_resource: String,
        locked_resource: String,
        used_tickets: i64,
        used_tickets_xor: Uuid,
        labels: String,
        reserved_labels: String,
        epoch: i64,
        register_time: OffsetDateTime,
        version: i64,
        going_epoch: Option<i64>,
        going_end: Option<String>,
        going_after: Option<Uuid>,
        counted_to: i64,
        counting_to: Option<i64>,
        counted_after: Option<Uuid>,
        ..drain: DrainColumns,
    }
}

impl EmRow {
    fn going(&self) -> Result<Option<UnregisterProgress>, StoreError> {
        let (Some(epoch), Some(end), Some(after)) = (self.going_epoch, &self.going_end, self.going_after) else {
            return Ok(None);
        };
        let end = TicketEnd::parse(end).ok_or_else(|| StoreError::inconsistent(TABLE.0, end))?;
        Ok(Some(UnregisterProgress { epoch, end, after }))
    }
}

impl TryFrom<EmRow> for Em {
    type Error = StoreError;

    fn try_from(row: EmRow) -> Result<Self, StoreError> {
        let resource_type = TABLE.resource_type(&row.resource_type)?;
        Ok(Self {
            instance: TABLE.em(&row.em_application_name, &row.em_instance)?,
            total: TABLE.resource("total_resource", resource_type, &row.total_resource)?,
            protected: TABLE.resource("protected_resource", resource_type, &row.protected_resource)?,
            used: TABLE.resource("used_resource", resource_type, &row.used_resource)?,
            locked: TABLE.resource("locked_resource", resource_type, &row.locked_resource)?,
            used_tickets: TicketDigest { count: row.used_tickets, xor: row.used_tickets_xor },
            labels: TABLE.labels(&row.labels)?,
            reserved: TABLE.labels(&row.reserved_labels)?,
            epoch: row.epoch,
            register_time: row.register_time,
            version: row.version,
            going: row.going()?,
            counted: LabelSetProgress { to: row.counted_to, under_way: row.counting_to.zip(row.counted_after) },
            drain: row.drain.drain()?,
        })
    }
}

/// Returns the EMs among `instances` that exist.
pub async fn read(
    executor: impl PgExecutor<'_>,
    instances: impl IntoIterator<Item = &EmInstance>,
) -> Result<HashMap<EmInstance, Em>, StoreError> {
    let (application_names, em_instances) = em_columns(instances);
    let rows: Vec<EmRow> = sqlx::query_as(
        "-- em_resource::read
        SELECT e.em_application_name, e.em_instance, resource_type, total_resource::text, protected_resource::text,
            used_resource::text, locked_resource::text, used_tickets, used_tickets_xor, labels::text,
            reserved_labels::text, epoch, register_time,
            version, going_epoch, going_end, going_after, counted_to, counting_to, counted_after, reason, drained_by, drain_time
        FROM unnest($1::text[], $2::text[]) AS k (em_application_name, em_instance)
        JOIN linkis_em_resource_meta_data e
            ON e.em_application_name = k.em_application_name AND e.em_instance = k.em_instance
        LEFT JOIN linkis_em_drain d
            ON d.em_application_name = e.em_application_name AND d.em_instance = e.em_instance",
    )
    .bind(application_names)
    .bind(em_instances)
    .fetch_all(executor)
    .await?;
    rows.into_iter().map(|row| Em::try_from(row).map(|em| (em.instance.clone(), em))).collect()
}

/// Reads the first input of a batch in one statement: the present limits, a flag for waiters, and the EMs among
/// `instances` that exist.
///
/// Returns `known` as the limits if they have not changed. The limits cannot change until the transaction ends.
pub async fn read_in_force(
    connection: &mut PgConnection,
    known: &Arc<Limits>,
    instances: impl IntoIterator<Item = &EmInstance>,
) -> Result<(CurrentLimits, HashMap<EmInstance, Em>), StoreError> {
    let (application_names, em_instances) = em_columns(instances);
    let rows = sqlx::query(
        "-- em_resource::read_in_force
        SELECT v.version AS limits_version, v.oldest_writer,
            EXISTS (SELECT FROM linkis_rm_instance WHERE alive_until > clock_timestamp()) AS anybody_waits, e.*
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
    let oldest_writer = first.try_get("oldest_writer")?;
    let mut ems = HashMap::with_capacity(rows.len());
    for row in &rows {
        if row.try_get::<Option<&str>, _>("em_instance")?.is_some() {
            let em = Em::try_from(EmRow::from_row(row)?)?;
            ems.insert(em.instance.clone(), em);
        }
    }
    let limits = limit::of_version(connection, version, known).await?;
    Ok((CurrentLimits { limits, anybody_waits, oldest_writer }, ems))
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
    let rows: Vec<(String, String)> = sqlx::query_as(
        "-- em_resource::going
        SELECT em_application_name, em_instance FROM linkis_em_resource_meta_data WHERE going_epoch IS NOT NULL
        ORDER BY em_application_name, em_instance LIMIT $1",
    )
    .bind(limit)
    .fetch_all(executor)
    .await?;
    rows.into_iter().map(|(application_name, instance)| TABLE.em(&application_name, &instance)).collect()
}

/// Returns up to `limit` EMs after `after`, ordered by key, each with the number of the last label set that its tickets
/// are counted by.
pub async fn counted(
    executor: impl PgExecutor<'_>,
    after: Option<&EmInstance>,
    limit: i64,
) -> Result<Vec<(EmInstance, i64)>, StoreError> {
    let after = after.map_or(("", ""), |em| (em.application_name.as_str(), em.instance.as_str()));
    let rows: Vec<(String, String, i64)> = sqlx::query_as(
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
    let of =
        |(application_name, instance, to): (String, String, i64)| Ok((TABLE.em(&application_name, &instance)?, to));
    rows.into_iter().map(of).collect()
}

/// Updates all columns of EMs that registered again. Fails with [`StoreError::RowCount`] if a version has changed.
pub async fn update(connection: &mut PgConnection, ems: &[Em]) -> Result<(), StoreError> {
    let columns = EmColumns::of(ems)?;
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
    let done = columns.bind(update).execute(connection).await?;
    expect_rows(TABLE.0, ems.len(), done.rows_affected())
}

/// Inserts new EMs, and the policies of new kinds.
pub async fn insert(connection: &mut PgConnection, ems: &[Em]) -> Result<(), StoreError> {
    let columns = EmColumns::of(ems)?;
    policy::insert(connection, &columns.em_application_name).await?;
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
    let done = columns.bind(insert).execute(connection).await?;
    expect_rows(TABLE.0, ems.len(), done.rows_affected())
}

/// Deletes EMs. Fails with [`StoreError::RowCount`] if a version has changed.
pub async fn delete(connection: &mut PgConnection, ems: &[Em]) -> Result<(), StoreError> {
    let (application_names, instances) = em_columns(ems.iter().map(|em| &em.instance));
    let versions: Vec<i64> = ems.iter().map(|em| em.version).collect();
    let done = sqlx::query(
        "-- em_resource::delete
        DELETE FROM linkis_em_resource_meta_data e
        USING unnest($1::text[], $2::text[], $3::bigint[]) AS d (em_application_name, em_instance, version)
        WHERE e.em_application_name = d.em_application_name AND e.em_instance = d.em_instance AND e.version = d.version",
    )
    .bind(application_names)
    .bind(instances)
    .bind(versions)
    .execute(connection)
    .await?;
    expect_rows(TABLE.0, ems.len(), done.rows_affected())
}

from_row! {
    /// Columns of an EM that audits read.
    pub(super) struct StoredCountersRow {
        em_application_name: String,
        em_instance: String,
        resource_type: String,
        total_resource: String,
        protected_resource: String,
        used_resource: String,
        locked_resource: String,
        left_resource: String,
        used_tickets: i64,
        used_tickets_xor: Uuid,
        over_committed: bool,
        version: i64,
    }
}

impl TryFrom<StoredCountersRow> for StoredEmCounters {
    type Error = StoreError;

    fn try_from(row: StoredCountersRow) -> Result<Self, StoreError> {
        let resource_type = TABLE.resource_type(&row.resource_type)?;
        let counter =
            |column: &str, json: &str| TABLE.resource(column, resource_type, json).map_err(|error| error.to_string());
        Ok(Self {
            instance: TABLE.em(&row.em_application_name, &row.em_instance)?,
            total: TABLE.resource("total_resource", resource_type, &row.total_resource)?,
            protected: TABLE.resource("protected_resource", resource_type, &row.protected_resource)?,
            used: counter("used_resource", &row.used_resource),
            locked: counter("locked_resource", &row.locked_resource),
            left: LeftResource::amounts_from_json(resource_type, &row.left_resource)
                .map_err(|error| format!("left_resource {}: {error}", row.left_resource)),
            used_tickets: TicketDigest { count: row.used_tickets, xor: row.used_tickets_xor },
            over_committed: row.over_committed,
            version: row.version,
        })
    }
}

/// Returns the stored counters of an EM, also if they contradict one another; `None` if the EM does not exist.
pub async fn books(connection: &mut PgConnection, em: &EmInstance) -> Result<Option<StoredEmCounters>, StoreError> {
    let row: Option<StoredCountersRow> = sqlx::query_as(
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
    row.map(StoredEmCounters::try_from).transpose()
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

type Query<'q> = sqlx::query::Query<'q, sqlx::Postgres, sqlx::postgres::PgArguments>;

/// Columns of several EMs.
#[derive(Default)]
pub(super) struct EmColumns<'a> {
    pub em_application_name: Vec<&'a str>,
    pub em_instance: Vec<&'a str>,
    resource_type: Vec<&'a str>,
    total: Vec<String>,
    protected: Vec<String>,
    pub used: Vec<String>,
    pub locked: Vec<String>,
    pub left: Vec<String>,
    pub over_committed: Vec<bool>,
    labels: Vec<String>,
    reserved_labels: Vec<String>,
    epoch: Vec<i64>,
    register_time: Vec<OffsetDateTime>,
    pub version: Vec<i64>,
    going_epoch: Vec<Option<i64>>,
    going_end: Vec<Option<&'static str>>,
    going_after: Vec<Option<Uuid>>,
    counted_to: Vec<i64>,
    counting_to: Vec<Option<i64>>,
    counted_after: Vec<Option<Uuid>>,
    pub used_tickets: Vec<i64>,
    pub used_tickets_xor: Vec<Uuid>,
}

impl<'a> EmColumns<'a> {
    pub fn of(ems: &'a [Em]) -> Result<Self, StoreError> {
        let mut columns = Self::default();
        for em in ems {
            let left: LeftResource = em.left().map_err(|error| StoreError::inconsistent(TABLE.0, error))?;
            columns.em_application_name.push(em.instance.application_name.as_str());
            columns.em_instance.push(em.instance.instance.as_str());
            columns.resource_type.push(em.resource_type().as_str());
            columns.total.push(em.total.to_json());
            columns.protected.push(em.protected.to_json());
            columns.used.push(em.used.to_json());
            columns.locked.push(em.locked.to_json());
            columns.left.push(left.to_json());
            columns.over_committed.push(left.is_negative_anywhere());
            columns.labels.push(labels_json(&em.labels));
            columns.reserved_labels.push(labels_json(&em.reserved));
            columns.epoch.push(em.epoch);
            columns.register_time.push(em.register_time);
            columns.version.push(em.version);
            columns.going_epoch.push(em.going.map(|going| going.epoch));
            columns.going_end.push(em.going.map(|going| going.end.as_str()));
            columns.going_after.push(em.going.map(|going| going.after));
            columns.counted_to.push(em.counted.to);
            columns.counting_to.push(em.counted.under_way.map(|(to, _)| to));
            columns.counted_after.push(em.counted.under_way.map(|(_, after)| after));
            columns.used_tickets.push(em.used_tickets.count);
            columns.used_tickets_xor.push(em.used_tickets.xor);
        }
        Ok(columns)
    }

    fn bind<'q>(self, query: Query<'q>) -> Query<'q>
    where
        'a: 'q,
    {
        query
            .bind(self.em_application_name)
            .bind(self.em_instance)
            .bind(self.resource_type)
            .bind(self.total)
            .bind(self.protected)
            .bind(self.used)
            .bind(self.locked)
            .bind(self.left)
            .bind(self.over_committed)
            .bind(self.labels)
            .bind(self.epoch)
            .bind(self.register_time)
            .bind(self.version)
            .bind(self.going_epoch)
            .bind(self.going_end)
            .bind(self.going_after)
            .bind(self.counted_to)
            .bind(self.counting_to)
            .bind(self.counted_after)
            .bind(self.used_tickets)
            .bind(self.used_tickets_xor)
            .bind(self.reserved_labels)
    }
}
