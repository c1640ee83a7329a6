//! External queues for a batch or a check: `linkis_external_cluster`, `linkis_external_queue` and the present snapshot.
//!
//! Reads only the queues on the path of a named queue and those with its last name, independent of the size of the
//! cluster. A batch locks the cluster rows first. Callers: the committer and the checks.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use sqlx::{PgConnection, PgExecutor};
use time::{Duration, OffsetDateTime};

use rm_model::{
    external::{CheckRules, ClusterSnapshot, KUBERNETES, LockedCluster, QueueCapacities, UnavailablePolicy, along},
    provider::Provider,
    queue::{CustomAmountsByName, ExternalQueue, QueueAmounts, QueueNaming, QueueState, QueueTree, ROOT, is_in},
};

use super::{
    StoreError,
    rows::{TableName, TableRow, column},
};

const CLUSTER: TableName = TableName("linkis_external_cluster");
const SNAPSHOT: TableName = TableName("linkis_external_snapshot");

/// Returns all providers with their cluster ids; their number is small.
pub async fn providers(executor: impl PgExecutor<'_>) -> Result<Vec<(i64, Provider)>, StoreError> {
    let rows = sqlx::query(
        "-- external_queue::providers
        SELECT cluster_id, resource_type, name, labels::text FROM linkis_external_cluster ORDER BY cluster_id",
    )
    .fetch_all(executor)
    .await?;
    CLUSTER.parse(&rows, |row| Ok((row.get("cluster_id")?, provider(row)?)))
}

fn provider(row: TableRow<'_>) -> Result<Provider, StoreError> {
    Ok(Provider { resource_type: row.name("resource_type")?, name: row.name("name")?, labels: row.labels("labels")? })
}

/// Row of a cluster.
#[derive(Debug, Clone)]
pub struct ClusterRow {
    /// Cluster id.
    pub id: i64,
    /// Provider of the cluster.
    pub provider: Provider,
    /// Rules by which requests are checked against the queues.
    pub rules: CheckRules,
    /// Generation of the present snapshot; `None` if there is none.
    pub generation: Option<i64>,
    /// Start time of the present snapshot.
    pub begun: Option<OffsetDateTime>,
    by_last_name: bool,
    /// Number of ticket changes in the cluster so far.
    pub changes: i64,
}

fn cluster_row(row: TableRow<'_>) -> Result<ClusterRow, StoreError> {
    let millis = |column| Ok::<_, StoreError>(Duration::milliseconds(row.get(column)?));
    Ok(ClusterRow {
        id: row.get("cluster_id")?,
        provider: provider(row)?,
        rules: CheckRules {
            max_age: millis("max_age")?,
            when_away: row.parse("when_away", UnavailablePolicy::parse)?,
            last_known_for: millis("last_known_for")?,
            refresh_interval: millis("refresh_interval")?,
        },
        generation: row.get("generation")?,
        begun: row.get("begun")?,
        by_last_name: row.get("by_last_name")?,
        changes: row.get("changes")?,
    })
}

impl ClusterRow {
    fn cluster(&self, state: QueueLookupResult) -> Result<LockedCluster, StoreError> {
        let QueueLookupResult { queues, unseen, shown } = state;
        let naming = match self.provider.resource_type.as_str() {
            KUBERNETES => QueueNaming::Namespaces,
            _ if self.by_last_name => QueueNaming::Capacity,
            _ => QueueNaming::Fair,
        };
        let twice = |same: rm_model::queue::DuplicatePath| StoreError::inconsistent(SNAPSHOT.0, same.0);
        let begun = self.begun.unwrap_or(OffsetDateTime::UNIX_EPOCH);
        let snapshot = ClusterSnapshot::stored(begun, QueueTree::new(naming, queues).map_err(twice)?, shown);
        Ok(LockedCluster {
            id: self.id,
            provider: self.provider.clone(),
            rules: self.rules,
            is_known: self.generation.is_some(),
            changes: self.changes,
            rooms: QueueCapacities::stored(Arc::new(snapshot), unseen),
        })
    }
}

/// Returns the rows of the clusters that exist. Locks them until the transaction ends if `locks` is set, in the order
/// of their ids.
pub async fn clusters(
    executor: impl PgExecutor<'_>,
    ids: &BTreeSet<i64>,
    locks: bool,
) -> Result<Vec<ClusterRow>, StoreError> {
    macro_rules! select {
        ($name:literal, $lock:literal) => {
            concat!(
                "-- external_queue::",
                $name,
                "
                SELECT cluster_id, resource_type, name, labels::text, when_away, max_age, last_known_for, refresh_interval,
                    generation, begun, by_last_name, changes
                FROM linkis_external_cluster WHERE cluster_id = ANY ($1) ORDER BY cluster_id ",
                $lock
            )
        };
    }
    let sql = if locks { select!("lock", "FOR UPDATE") } else { select!("clusters", "") };
    let rows = sqlx::query(sql).bind(column(ids, |id| *id)).fetch_all(executor).await?;
    CLUSTER.parse(&rows, cluster_row)
}

/// Queues and applications to read of a cluster.
#[derive(Debug, Default)]
pub struct QueueLookup {
    /// Queue names, as requests give them.
    pub names: BTreeSet<String>,
    /// Paths of queues that tickets use.
    pub paths: BTreeSet<String>,
    /// YARN application ids.
    pub application_ids: BTreeSet<String>,
}

/// Queues and applications that were read.
#[derive(Debug, Default)]
struct QueueLookupResult {
    queues: Vec<ExternalQueue>,
    unseen: BTreeMap<String, QueueAmounts>,
    shown: HashMap<String, QueueAmounts>,
}

/// Reads the parts of clusters that are `wanted`. A batch must lock `rows` in an earlier statement.
pub async fn read(
    connection: &mut PgConnection,
    rows: &[ClusterRow],
    wanted: &BTreeMap<i64, QueueLookup>,
) -> Result<Vec<LockedCluster>, StoreError> {
    let mut states = queues(&mut *connection, rows, wanted).await?;
    for (cluster_id, shown) in applications(connection, rows, wanted).await? {
        states.entry(cluster_id).or_default().shown = shown;
    }
    rows.iter().map(|row| row.cluster(states.remove(&row.id).unwrap_or_default())).collect()
}

/// Returns a queue of the present snapshot; `None` if the snapshot does not have it.
fn queue(row: TableRow<'_>) -> Result<Option<ExternalQueue>, StoreError> {
    let amounts =
        |memory, cores| Ok::<_, StoreError>(QueueAmounts { memory: row.get(memory)?, cores: row.get(cores)? });
    if row.get::<Option<&str>>("state")?.is_none() {
        return Ok(None);
    }
    Ok(Some(ExternalQueue {
        path: row.get("path")?,
        max: amounts("max_memory", "max_cores")?,
        used: amounts("used_memory", "used_cores")?,
        state: row.parse("state", QueueState::parse)?,
        running_applications: None,
        pending_applications: None,
        custom: CustomAmountsByName::new(),
    }))
}

/// Returns the possible paths of a queue with this name, and all of their ancestors.
fn candidates(name: &str) -> impl Iterator<Item = String> {
    let full = format!("{ROOT}.{name}");
    let paths: BTreeSet<String> = match is_in(name, ROOT) {
        true => along(name).chain(along(&full)).map(str::to_owned).collect(),
        false => along(&full).map(str::to_owned).collect(),
    };
    paths.into_iter()
}

async fn queues(
    connection: &mut PgConnection,
    rows: &[ClusterRow],
    wanted: &BTreeMap<i64, QueueLookup>,
) -> Result<HashMap<i64, QueueLookupResult>, StoreError> {
    let mut paths: BTreeSet<(i64, String)> = BTreeSet::new();
    let mut last_names: Vec<(i64, &str)> = Vec::new();
    for row in rows {
        let Some(wanted) = wanted.get(&row.id) else { continue };
        let named = wanted.names.iter().flat_map(|name| candidates(name));
        let in_use = wanted.paths.iter().flat_map(|path| along(path)).map(str::to_owned);
        paths.extend(named.chain(in_use).map(|path| (row.id, path)));
        if row.by_last_name {
            last_names.extend(wanted.names.iter().map(|name| (row.id, name.as_str())));
        }
    }
    if !last_names.is_empty() {
        let found = by_last_name(&mut *connection, &last_names).await?;
        paths.extend(found.iter().flat_map(|(id, path)| along(path).map(|path| (*id, path.to_owned()))));
    }
    let mut states: HashMap<i64, QueueLookupResult> = HashMap::new();
    if paths.is_empty() {
        return Ok(states);
    }
    let found = sqlx::query(
        "-- external_queue::queues
        SELECT k.cluster_id, k.path, s.max_memory, s.max_cores, s.used_memory, s.used_cores, s.state, u.unseen_memory,
            u.unseen_cores
        FROM unnest($1::bigint[], $2::text[], $3::bigint[]) AS k (cluster_id, path, generation)
        LEFT JOIN LATERAL (SELECT * FROM linkis_external_snapshot s
            WHERE s.cluster_id = k.cluster_id AND s.generation = k.generation AND s.path = k.path LIMIT 1) s ON true
        LEFT JOIN LATERAL (SELECT * FROM linkis_external_queue u
            WHERE u.cluster_id = k.cluster_id AND u.path = k.path LIMIT 1) u ON true",
    )
    .bind(column(&paths, |(id, _)| *id))
    .bind(column(&paths, |(_, path)| path.as_str()))
    .bind(column(&paths, |(id, _)| generation(rows, *id)))
    .fetch_all(connection)
    .await?;
    for row in found.iter().map(|row| SNAPSHOT.row(row)) {
        let state = states.entry(row.get("cluster_id")?).or_default();
        state.queues.extend(queue(row)?);
        if let (Some(memory), Some(cores)) = (row.get("unseen_memory")?, row.get("unseen_cores")?) {
            state.unseen.insert(row.get("path")?, QueueAmounts { memory, cores });
        }
    }
    Ok(states)
}

fn generation(rows: &[ClusterRow], cluster_id: i64) -> Option<i64> {
    rows.iter().find(|row| row.id == cluster_id)?.generation
}

/// Returns the paths of queues with these last names in the present snapshots.
async fn by_last_name(
    connection: &mut PgConnection,
    last_names: &[(i64, &str)],
) -> Result<Vec<(i64, String)>, StoreError> {
    // A name with several queues is ambiguous; a few of them are enough to detect that.
    const LIMIT: i64 = 100;
    Ok(sqlx::query_as(
        "-- external_queue::by_last_name
        SELECT k.cluster_id, s.path
        FROM unnest($1::bigint[], $2::text[]) AS k (cluster_id, last_name)
        JOIN linkis_external_cluster c ON c.cluster_id = k.cluster_id
        CROSS JOIN LATERAL (SELECT s.path FROM linkis_external_snapshot s
            WHERE s.cluster_id = k.cluster_id AND s.generation = c.generation AND s.last_name = k.last_name LIMIT $3) s",
    )
    .bind(column(last_names, |(id, _)| *id))
    .bind(column(last_names, |(_, name)| *name))
    .bind(LIMIT)
    .fetch_all(connection)
    .await?)
}

/// Returns the amounts that the present snapshots show for applications.
async fn applications(
    connection: &mut PgConnection,
    rows: &[ClusterRow],
    wanted: &BTreeMap<i64, QueueLookup>,
) -> Result<HashMap<i64, HashMap<String, QueueAmounts>>, StoreError> {
    let keys: Vec<(i64, &str)> = (wanted.iter())
        .flat_map(|(id, wanted)| wanted.application_ids.iter().map(move |application| (*id, application.as_str())))
        .collect();
    if keys.is_empty() {
        return Ok(HashMap::new());
    }
    let found: Vec<(i64, String, i64, i64)> = sqlx::query_as(
        "-- external_queue::applications
        SELECT k.cluster_id, a.application_id, a.memory, a.cores
        FROM unnest($1::bigint[], $2::bigint[], $3::text[]) AS k (cluster_id, generation, application_id)
        JOIN linkis_external_application a
            ON a.cluster_id = k.cluster_id AND a.generation = k.generation AND a.application_id = k.application_id",
    )
    .bind(column(&keys, |(id, _)| *id))
    .bind(column(&keys, |(id, _)| generation(rows, *id)))
    .bind(column(&keys, |(_, application)| *application))
    .fetch_all(connection)
    .await?;
    let mut shown: HashMap<i64, HashMap<String, QueueAmounts>> = HashMap::new();
    for (cluster_id, application_id, memory, cores) in found {
        shown.entry(cluster_id).or_default().insert(application_id, QueueAmounts { memory, cores });
    }
    Ok(shown)
}
