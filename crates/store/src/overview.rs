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
    resource::Dimension,
    user_sum::IdleTotals,
};

use super::{
    StoreError,
    rows::{TableName, TableRow},
    session::{Session, within_timeout},
    user_sum::idle_totals,
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

/// Returns the state of an EM.
fn state(row: TableRow<'_>) -> Result<EmState, StoreError> {
    let (is_going, is_silent, is_drained) = (row.get("is_going")?, row.get("is_silent")?, row.get("is_drained")?);
    let health: Option<&str> = row.get("health")?;
    let health = health.map(|_| row.of(TableName("linkis_em_report")).parse("health", Health::parse)).transpose()?;
    Ok(EmState::of(EmSignals { is_going, is_silent, is_drained, health }))
}

/// Order of the dimensions in the sums of a group of EMs.
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
    let rows = sqlx::query(concat!(
        "-- overview::ems
        SELECT em_application_name, resource_type, is_going, is_silent, is_drained, health,
            array_agg(em_instance) AS instances, least(sum(used_tickets), 9223372036854775807)::bigint AS used_tickets,
            -- Floating-point numbers prevent an overflow by adopted amounts.
            array_agg(least(coalesce(greatest(
                floor((used_memory::float8 + locked_memory) * 100 / greatest(total_memory::float8 - protected_memory, 1)),
                floor((used_cores::float8 + locked_cores) * 100 / greatest(total_cores::float8 - protected_cores, 1)),
                floor((used_instances::float8 + locked_instances) * 100 / greatest(total_instances::float8 - protected_instances, 1))), 0), 255)::int) AS held_percent,
            ARRAY[least(coalesce(sum(total_memory), 0), 9223372036854775807)::bigint,
                least(coalesce(sum(total_cores), 0), 9223372036854775807)::bigint,
                least(coalesce(sum(total_instances), 0), 9223372036854775807)::bigint] AS total,
            ARRAY[least(coalesce(sum(protected_memory), 0), 9223372036854775807)::bigint,
                least(coalesce(sum(protected_cores), 0), 9223372036854775807)::bigint,
                least(coalesce(sum(protected_instances), 0), 9223372036854775807)::bigint] AS protected,
            ARRAY[least(coalesce(sum(used_memory), 0), 9223372036854775807)::bigint,
                least(coalesce(sum(used_cores), 0), 9223372036854775807)::bigint,
                least(coalesce(sum(used_instances), 0), 9223372036854775807)::bigint] AS used,
            ARRAY[least(coalesce(sum(locked_memory), 0), 9223372036854775807)::bigint,
                least(coalesce(sum(locked_cores), 0), 9223372036854775807)::bigint,
                least(coalesce(sum(locked_instances), 0), 9223372036854775807)::bigint] AS locked
        FROM (SELECT e.em_application_name, e.em_instance, e.resource_type, e.used_tickets,
            (e.total_resource -> 'memory')::bigint AS total_memory, (e.total_resource -> 'cores')::bigint AS total_cores,
                (e.total_resource -> 'instances')::bigint AS total_instances,
            (e.protected_resource -> 'memory')::bigint AS protected_memory, (e.protected_resource -> 'cores')::bigint AS protected_cores,
                (e.protected_resource -> 'instances')::bigint AS protected_instances,
            (e.used_resource -> 'memory')::bigint AS used_memory, (e.used_resource -> 'cores')::bigint AS used_cores,
                (e.used_resource -> 'instances')::bigint AS used_instances,
            (e.locked_resource -> 'memory')::bigint AS locked_memory, (e.locked_resource -> 'cores')::bigint AS locked_cores,
                (e.locked_resource -> 'instances')::bigint AS locked_instances, ",
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
    for row in rows.iter().map(|row| TABLE.row(row)) {
        let (resource_type, state) = (row.resource_type()?, state(row)?);
        let application_name = row.name("em_application_name")?;
        let instances: Vec<String> = row.get("instances")?;
        let held_percent: Vec<i32> = row.get("held_percent")?;
        for (instance, held) in instances.iter().zip(held_percent) {
            let instance = TABLE.name("em_instance", instance)?;
            let em = EmInstance { application_name: application_name.clone(), instance };
            standings.push(((em, state), u8::try_from(held).unwrap_or(u8::MAX)));
        }
        sums.used_tickets = sums.used_tickets.saturating_add(row.get("used_tickets")?);
        let totals = sums.totals.entry((application_name.to_string(), state)).or_default();
        totals.ems += i64::try_from(instances.len()).unwrap_or(i64::MAX);
        match summed_dimensions(resource_type) {
            Some(dimensions) => {
                for dimension in dimensions {
                    totals.add(dimension.clone(), &dimension_totals(row, dimension)?);
                }
            }
            None => others.push(resource_type.as_str()),
        }
    }
    standings.sort_unstable_by(|((one, _), _), ((other, _), _)| one.cmp(other));
    (sums.states, sums.held_percent) = standings.into_iter().unzip();
    if !others.is_empty() {
        add_others(connection, silent_after, others, &mut sums).await?;
    }
    Ok(sums)
}

fn dimension_totals(row: TableRow<'_>, dimension: &Dimension) -> Result<DimensionTotals, StoreError> {
    let place = PLACES.iter().position(|one| one == dimension);
    let sum = |column| {
        let sums: Vec<i64> = row.get(column)?;
        Ok::<_, StoreError>(place.and_then(|place| sums.get(place).copied()).unwrap_or_default())
    };
    Ok(DimensionTotals {
        total: sum("total")?,
        protected: sum("protected")?,
        used: sum("used")?,
        locked: sum("locked")?,
    })
}

/// Adds EMs of other resource types, whose amounts PostgreSQL does not sum.
async fn add_others(
    connection: &mut PgConnection,
    silent_after: Duration,
    resource_types: Vec<&str>,
    sums: &mut AllEmSums,
) -> Result<(), StoreError> {
    let rows = sqlx::query(concat!(
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
    for row in rows.iter().map(|row| TABLE.row(row)) {
        let resource_type = row.resource_type()?;
        let amounts = EmAmounts {
            total: row.resource("total_resource", resource_type)?,
            protected: row.resource("protected_resource", resource_type)?,
            used: row.resource("used_resource", resource_type)?,
            locked: row.resource("locked_resource", resource_type)?,
        };
        let em = row.em()?;
        let place = sums.states.binary_search_by(|(known, _)| known.cmp(&em)).ok();
        if let Some(held) = place.and_then(|place| sums.held_percent.get_mut(place)) {
            *held = amounts.held_percent();
        }
        sums.totals.entry((em.application_name.to_string(), state(row)?)).or_default().add_amounts(&amounts);
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
    /// Used tickets with idle engines, as last summed.
    pub idle: IdleTotals,
}

/// Returns the totals of small tables.
pub async fn totals(executor: impl PgExecutor<'_>) -> Result<SmallTotals, StoreError> {
    let row = sqlx::query(
        "-- overview::totals
        SELECT clock_timestamp() AS at, locked_tickets, waiting, longest_seconds, grants, refusals, idle FROM
            (SELECT count(*) AS locked_tickets FROM (
                SELECT FROM linkis_user_resource_meta_data WHERE expires_at IS NOT NULL LIMIT $1 + 1) l) l,
            (SELECT count(*) AS waiting, extract(epoch FROM clock_timestamp() - min(waiting_since))::float8 AS longest_seconds
                FROM linkis_rm_instance i JOIN linkis_resource_waiting w ON w.instance_id = i.instance_id
                WHERE i.alive_until > clock_timestamp()) w,
            (SELECT coalesce(sum(grants_per_second), 0) AS grants, coalesce(sum(refusals_per_second), 0) AS refusals FROM (
                SELECT * FROM linkis_rm_server WHERE alive_until > clock_timestamp() ORDER BY instance_id) s) t,
            (SELECT idle::text FROM linkis_user_sum_progress WHERE only_row) i",
    )
    .bind(COUNTED_MAX)
    .fetch_one(executor)
    .await?;
    let row = TABLE.row(&row);
    Ok(SmallTotals {
        at: row.get("at")?,
        locked_tickets: row.get("locked_tickets")?,
        line: LineTotals { waiting: row.get("waiting")?, longest_seconds: row.get("longest_seconds")? },
        throughput: Throughput { grants: row.get("grants")?, refusals: row.get("refusals")? },
        idle: idle_totals(row)?,
    })
}

/// Returns the first EMs in removal with the number of their remaining tickets, counted up to [`COUNTED_MAX`].
pub async fn going(executor: impl PgExecutor<'_>) -> Result<Vec<(EmInstance, i64)>, StoreError> {
    let rows = sqlx::query(
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
    TABLE.parse(&rows, |row| Ok((row.em()?, row.get("tickets")?)))
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
