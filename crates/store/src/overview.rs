//! Overview of the cluster: sums over EMs and small tables, never over tickets. Read-only.
//!
//! The cost grows with the number of EMs, not of tickets; counts of tickets are bounded. Callers: the cluster figures
//! and the overview calls of `rm-service`.

use std::{collections::BTreeMap, time::Duration};

use sqlx::{PgConnection, PgExecutor};
use time::OffsetDateTime;

use rm_model::{
    em::EmInstance,
    overview::{DimensionTotals, EmAmounts, EmSignals, EmState, EmTotals, LineTotals, Throughput, summed_dimensions},
    report::Health,
    resource::{Dimension, ResourceType},
};

use super::{
    StoreError,
    rows::TableName,
    session::{Session, within_timeout},
};

const TABLE: TableName = TableName("linkis_em_resource_meta_data");

/// Maximum number of locked tickets, and of tickets of one EM in removal, that are counted.
pub const COUNTED_MAX: i64 = 20_000;

/// Maximum number of jobs of a kind that are returned.
const JOBS_MAX: i64 = 100;

/// Sums over all EMs.
#[derive(Debug, Default)]
pub struct AllEmSums {
    /// Totals by application and state.
    pub totals: BTreeMap<(String, EmState), EmTotals>,
    /// State of each EM, ordered by application and instance.
    pub states: Vec<(EmInstance, EmState)>,
    /// Used share of each EM in its fullest dimension, in percent up to 255; in the order of `states`.
    pub held_percent: Vec<u8>,
    /// Number of used tickets.
    pub used_tickets: i64,
}

from_row! {
    /// Columns that determine the state of an EM.
    struct SignsRow {
        is_going: bool,
        is_silent: bool,
        is_drained: bool,
        health: Option<String>,
    }
}

impl SignsRow {
    fn state(&self) -> Result<EmState, StoreError> {
        let parse =
            |text: &String| Health::parse(text).ok_or_else(|| StoreError::inconsistent("linkis_em_report", text));
        let health = self.health.as_ref().map(parse).transpose()?;
        let Self { is_going, is_silent, is_drained, .. } = *self;
        Ok(EmState::of(EmSignals { is_going, is_silent, is_drained, health }))
    }
}

from_row! {
    /// EMs of one application, resource type and state. Each sum has memory, cores and instances.
    struct EmStateGroupRow {
        em_application_name: String,
        resource_type: String,
        instances: Vec<String>,
        held_percent: Vec<i32>,
        used_tickets: i64,
        total: Vec<i64>,
        protected: Vec<i64>,
        used: Vec<i64>,
        locked: Vec<i64>,
        ..signs: SignsRow,
    }
}

from_row! {
    struct AmountsRow {
        em_application_name: String,
        em_instance: String,
        resource_type: String,
        total_resource: String,
        protected_resource: String,
        used_resource: String,
        locked_resource: String,
        ..signs: SignsRow,
    }
}

/// Order of the dimensions in the sums of a [`EmStateGroupRow`].
const PLACES: [Dimension; 3] = [Dimension::Memory, Dimension::Cores, Dimension::Instances];

/// SQL columns that determine the state of an EM. An EM is silent after `$1` seconds.
macro_rules! signs {
    () => {
        "going_epoch IS NOT NULL AND going_epoch >= e.epoch AS is_going,
            r.report_time IS NOT NULL
                AND greatest(r.report_time, e.register_time) < clock_timestamp() - make_interval(secs => $1) AS is_silent,
            d.em_instance IS NOT NULL AS is_drained, CASE WHEN r.epoch = e.epoch THEN r.health END AS health"
    };
}

/// SQL of the EMs with their reports and drains.
macro_rules! ems {
    () => {
        "linkis_em_resource_meta_data e
            LEFT JOIN linkis_em_report r
                ON r.em_application_name = e.em_application_name AND r.em_instance = e.em_instance
            LEFT JOIN linkis_em_drain d
                ON d.em_application_name = e.em_application_name AND d.em_instance = e.em_instance"
    };
}

/// SQL of a column's memory, cores and instances.
macro_rules! amounts {
    ($column:literal) => {
        concat!(amounts!($column, "memory"), ", ", amounts!($column, "cores"), ", ", amounts!($column, "instances"))
    };
    ($column:literal, $key:literal) => {
        concat!("(e.", $column, "_resource -> '", $key, "')::bigint AS ", $column, "_", $key)
    };
}

/// SQL of the sums of these.
macro_rules! sums {
    ($column:literal) => {
        concat!(
            "ARRAY[",
            sums!($column, "memory"),
            ", ",
            sums!($column, "cores"),
            ", ",
            sums!($column, "instances"),
            "] AS ",
            $column
        )
    };
    ($column:literal, $key:literal) => {
        concat!("least(coalesce(sum(", $column, "_", $key, "), 0), 9223372036854775807)::bigint")
    };
}

/// SQL of the used share of a dimension in percent, rounded down. Floating-point numbers prevent an overflow by adopted
/// amounts.
macro_rules! held {
    ($key:literal) => {
        concat!(
            "floor((used_",
            $key,
            "::float8 + locked_",
            $key,
            ") * 100 / greatest(total_",
            $key,
            "::float8 - protected_",
            $key,
            ", 1))"
        )
    };
}

/// Returns the sums over all EMs. An EM is silent after `silent_after` without a report. PostgreSQL computes the sums
/// and reads each EM once.
pub async fn ems(session: &mut Session, silent_after: Duration) -> Result<AllEmSums, StoreError> {
    let connection = session.begin().await?;
    let sums = within_timeout(read_ems(connection, silent_after)).await;
    session.idle().await;
    sums
}

async fn read_ems(connection: &mut PgConnection, silent_after: Duration) -> Result<AllEmSums, StoreError> {
    // Small tables are scanned whole: index look-ups row by row would take three times as long.
    sqlx::query(
        "-- overview::whole_tables
        SELECT set_config('enable_seqscan', 'on', true), set_config('enable_hashjoin', 'on', true)",
    )
    .execute(&mut *connection)
    .await?;
    let rows: Vec<EmStateGroupRow> = sqlx::query_as(concat!(
        "-- overview::ems
        SELECT em_application_name, resource_type, is_going, is_silent, is_drained, health,
            array_agg(em_instance) AS instances, least(sum(used_tickets), 9223372036854775807)::bigint AS used_tickets,
            array_agg(least(coalesce(greatest(",
        held!("memory"),
        ", ",
        held!("cores"),
        ", ",
        held!("instances"),
        "), 0), 255)::int) AS held_percent, ",
        sums!("total"),
        ", ",
        sums!("protected"),
        ", ",
        sums!("used"),
        ", ",
        sums!("locked"),
        " FROM (SELECT e.em_application_name, e.em_instance, e.resource_type, e.used_tickets, ",
        amounts!("total"),
        ", ",
        amounts!("protected"),
        ", ",
        amounts!("used"),
        ", ",
        amounts!("locked"),
        ", ",
        signs!(),
        " FROM ",
        ems!(),
        " OFFSET 0) e
        GROUP BY em_application_name, resource_type, is_going, is_silent, is_drained, health"
    ))
    .bind(silent_after.as_secs_f64())
    .fetch_all(&mut *connection)
    .await?;
    let (mut sums, mut others) = (AllEmSums::default(), Vec::new());
    let mut standings = Vec::new();
    for row in rows {
        let (resource_type, state) = (TABLE.resource_type(&row.resource_type)?, row.signs.state()?);
        let application_name = TABLE.name("em_application_name", &row.em_application_name)?;
        for (instance, held) in row.instances.iter().zip(&row.held_percent) {
            let instance = TABLE.name("em_instance", instance)?;
            let em = EmInstance { application_name: application_name.clone(), instance };
            standings.push(((em, state), u8::try_from(*held).unwrap_or(u8::MAX)));
        }
        sums.used_tickets = sums.used_tickets.saturating_add(row.used_tickets);
        let totals = sums.totals.entry((row.em_application_name.clone(), state)).or_default();
        totals.ems += i64::try_from(row.instances.len()).unwrap_or(i64::MAX);
        match summed_dimensions(resource_type) {
            Some(dimensions) => {
                dimensions.iter().for_each(|dimension| totals.add(dimension.clone(), &row.sums(dimension)))
            }
            None => others.push(row.resource_type),
        }
    }
    standings.sort_unstable_by(|((one, _), _), ((other, _), _)| one.cmp(other));
    (sums.states, sums.held_percent) = standings.into_iter().unzip();
    if !others.is_empty() {
        add_others(connection, silent_after, others, &mut sums).await?;
    }
    Ok(sums)
}

impl EmStateGroupRow {
    fn sums(&self, dimension: &Dimension) -> DimensionTotals {
        let place = PLACES.iter().position(|one| one == dimension);
        let sum = |sums: &[i64]| place.and_then(|place| sums.get(place).copied()).unwrap_or_default();
        let [total, protected, used, locked] =
            [&self.total, &self.protected, &self.used, &self.locked].map(|sums| sum(sums));
        DimensionTotals { total, protected, used, locked }
    }
}

/// Adds EMs of other resource types, whose amounts PostgreSQL does not sum.
async fn add_others(
    connection: &mut PgConnection,
    silent_after: Duration,
    resource_types: Vec<String>,
    sums: &mut AllEmSums,
) -> Result<(), StoreError> {
    let rows: Vec<AmountsRow> = sqlx::query_as(concat!(
        "-- overview::other_ems
        SELECT e.em_application_name, e.em_instance, e.resource_type, total_resource::text, protected_resource::text, used_resource::text,
            locked_resource::text, ",
        signs!(),
        " FROM ",
        ems!(),
        " WHERE e.resource_type = ANY ($2)"
    ))
    .bind(silent_after.as_secs_f64())
    .bind(resource_types)
    .fetch_all(connection)
    .await?;
    for row in rows {
        let resource_type: ResourceType = TABLE.resource_type(&row.resource_type)?;
        let read = |column, json: &str| TABLE.resource(column, resource_type, json);
        let amounts = EmAmounts {
            total: read("total_resource", &row.total_resource)?,
            protected: read("protected_resource", &row.protected_resource)?,
            used: read("used_resource", &row.used_resource)?,
            locked: read("locked_resource", &row.locked_resource)?,
        };
        let em = TABLE.em(&row.em_application_name, &row.em_instance)?;
        let place = sums.states.binary_search_by(|(known, _)| known.cmp(&em)).ok();
        if let Some(held) = place.and_then(|place| sums.held_percent.get_mut(place)) {
            *held = amounts.held_percent();
        }
        sums.totals.entry((row.em_application_name, row.signs.state()?)).or_default().add_amounts(&amounts);
    }
    Ok(())
}

/// Totals of small tables.
#[derive(Debug)]
pub struct SmallTotals {
    /// Time of the read, by the clock of the database.
    pub at: OffsetDateTime,
    /// Number of locked tickets, counted up to [`COUNTED_MAX`] + 1.
    pub locked_tickets: i64,
    /// Totals of the wait queues.
    pub line: LineTotals,
    /// Grants and refusals per second of all live instances.
    pub throughput: Throughput,
}

from_row! {
    struct TotalsRow {
        at: OffsetDateTime,
        locked_tickets: i64,
        waiting: i64,
        longest_seconds: Option<f64>,
        grants: f64,
        refusals: f64,
    }
}

/// Returns the totals of small tables.
pub async fn totals(executor: impl PgExecutor<'_>) -> Result<SmallTotals, StoreError> {
    let row: TotalsRow = sqlx::query_as(
        "-- overview::totals
        SELECT clock_timestamp() AS at, locked_tickets, waiting, longest_seconds, grants, refusals FROM
            (SELECT count(*) AS locked_tickets FROM (
                SELECT FROM linkis_user_resource_meta_data WHERE expires_at IS NOT NULL LIMIT $1 + 1) l) l,
            (SELECT count(*) AS waiting, extract(epoch FROM clock_timestamp() - min(waiting_since))::float8 AS longest_seconds
                FROM linkis_rm_instance i JOIN linkis_resource_waiting w ON w.instance_id = i.instance_id
                WHERE i.alive_until > clock_timestamp()) w,
            (SELECT coalesce(sum(grants_per_second), 0) AS grants, coalesce(sum(refusals_per_second), 0) AS refusals FROM (
                SELECT * FROM linkis_rm_server WHERE alive_until > clock_timestamp() ORDER BY instance_id) s) t",
    )
    .bind(COUNTED_MAX)
    .fetch_one(executor)
    .await?;
    Ok(SmallTotals {
        at: row.at,
        locked_tickets: row.locked_tickets,
        line: LineTotals { waiting: row.waiting, longest_seconds: row.longest_seconds },
        throughput: Throughput { grants: row.grants, refusals: row.refusals },
    })
}

/// Returns the first EMs in removal with the number of their remaining tickets, counted up to [`COUNTED_MAX`].
pub async fn going(executor: impl PgExecutor<'_>) -> Result<Vec<(EmInstance, i64)>, StoreError> {
    let rows: Vec<(String, String, i64)> = sqlx::query_as(
        "-- overview::going
        SELECT e.em_application_name, e.em_instance, t.tickets FROM (
            SELECT em_application_name, em_instance, going_after FROM linkis_em_resource_meta_data
            WHERE going_epoch IS NOT NULL ORDER BY em_application_name, em_instance LIMIT $1) e
        CROSS JOIN LATERAL (SELECT count(*) AS tickets FROM (
            SELECT FROM linkis_user_resource_meta_data t
            -- Only the index by EM has this order.
            WHERE (t.em_application_name, t.em_instance, t.ticket_id) > (e.em_application_name, e.em_instance, e.going_after)
                AND (t.em_application_name, t.em_instance, t.ticket_id)
                    <= (e.em_application_name, e.em_instance, 'ffffffff-ffff-ffff-ffff-ffffffffffff') LIMIT $2) t) t",
    )
    .bind(JOBS_MAX)
    .bind(COUNTED_MAX)
    .fetch_all(executor)
    .await?;
    let going = |(application_name, instance, tickets): (String, String, i64)| {
        Ok((TABLE.em(&application_name, &instance)?, tickets))
    };
    rows.into_iter().map(going).collect()
}

/// Returns the label sets in the state *counting* by their label names, each with the number of EMs whose tickets are
/// not yet all counted.
pub async fn counting(executor: impl PgExecutor<'_>) -> Result<Vec<(Vec<String>, i64)>, StoreError> {
    let rows: Vec<(String, i64)> = sqlx::query_as(
        "-- overview::counting
        SELECT label_set::text, (SELECT count(*) FROM linkis_em_resource_meta_data WHERE counted_to < s.label_set_id)
        FROM linkis_label_set s WHERE state = 'counting' ORDER BY label_set_id LIMIT $1",
    )
    .bind(JOBS_MAX)
    .fetch_all(executor)
    .await?;
    let counting = |(keys, ems): (String, i64)| {
        let keys = serde_json::from_str(&keys).map_err(|error| StoreError::inconsistent("linkis_label_set", error))?;
        Ok((keys, ems))
    };
    rows.into_iter().map(counting).collect()
}
