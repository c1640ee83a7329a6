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
    external::{
        CheckRules, ClusterDelta, ClusterSnapshot, KUBERNETES, LockedCluster, QueueCapacities, UnavailablePolicy, along,
    },
    provider::Provider,
    queue::{CustomAmountsByName, ExternalQueue, QueueAmounts, QueueNaming, QueueState, QueueTree, ROOT, is_in},
};

use super::{StoreError, rows::TableName};

const CLUSTER: TableName = TableName("linkis_external_cluster");
const SNAPSHOT: &str = "linkis_external_snapshot";

/// Returns all providers with their cluster ids; their number is small.
pub async fn providers(executor: impl PgExecutor<'_>) -> Result<Vec<(i64, Provider)>, StoreError> {
    let rows: Vec<(i64, String, String, String)> = sqlx::query_as(
        "-- external_queue::providers
        SELECT cluster_id, resource_type, name, labels::text FROM linkis_external_cluster ORDER BY cluster_id",
    )
    .fetch_all(executor)
    .await?;
    rows.into_iter()
        .map(|(id, resource_type, name, labels)| Ok((id, provider(&resource_type, &name, &labels)?)))
        .collect()
}

fn provider(resource_type: &str, name: &str, labels: &str) -> Result<Provider, StoreError> {
    Ok(Provider {
        resource_type: CLUSTER.name("resource_type", resource_type)?,
        name: CLUSTER.name("name", name)?,
        labels: CLUSTER.labels(labels)?,
    })
}

from_row! {
    /// Row of a cluster.
    #[derive(Debug, Clone)]
    pub struct ClusterRow {
        cluster_id: i64,
        resource_type: String,
        name: String,
        labels: String,
        when_away: String,
        max_age: i64,
        last_known_for: i64,
        refresh_interval: i64,
        generation: Option<i64>,
        begun: Option<OffsetDateTime>,
        by_last_name: bool,
        changes: i64,
    }
}

impl ClusterRow {
    /// Returns the cluster id.
    pub fn id(&self) -> i64 {
        self.cluster_id
    }

    /// Returns the generation of the present snapshot; `None` if there is none.
    pub fn generation(&self) -> Option<i64> {
        self.generation
    }

    /// Returns the start time of the present snapshot.
    pub fn begun(&self) -> Option<OffsetDateTime> {
        self.begun
    }

    /// Returns the number of ticket changes in the cluster so far.
    pub fn changes(&self) -> i64 {
        self.changes
    }

    /// Returns the provider of the cluster.
    pub fn provider(&self) -> Result<Provider, StoreError> {
        provider(&self.resource_type, &self.name, &self.labels)
    }

    /// Returns the rules by which requests are checked against the queues.
    pub fn rules(&self) -> Result<CheckRules, StoreError> {
        let when_away = UnavailablePolicy::parse(&self.when_away);
        Ok(CheckRules {
            max_age: Duration::milliseconds(self.max_age),
            when_away: when_away.ok_or_else(|| StoreError::inconsistent(CLUSTER.0, &self.when_away))?,
            last_known_for: Duration::milliseconds(self.last_known_for),
            refresh_interval: Duration::milliseconds(self.refresh_interval),
        })
    }

    fn cluster(&self, state: QueueLookupResult) -> Result<LockedCluster, StoreError> {
        let QueueLookupResult { queues, unseen, shown } = state;
        let naming = match self.resource_type.as_str() {
            KUBERNETES => QueueNaming::Namespaces,
            _ if self.by_last_name => QueueNaming::Capacity,
            _ => QueueNaming::Fair,
        };
        let twice = |same: rm_model::queue::DuplicatePath| StoreError::inconsistent(SNAPSHOT, same.0);
        let begun = self.begun.unwrap_or(OffsetDateTime::UNIX_EPOCH);
        let snapshot = ClusterSnapshot::stored(begun, QueueTree::new(naming, queues).map_err(twice)?, shown);
        Ok(LockedCluster {
            id: self.cluster_id,
            provider: self.provider()?,
            rules: self.rules()?,
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
    Ok(sqlx::query_as(sql).bind(ids.iter().copied().collect::<Vec<_>>()).fetch_all(executor).await?)
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
    rows.iter().map(|row| row.cluster(states.remove(&row.cluster_id).unwrap_or_default())).collect()
}

from_row! {
    struct QueueRow {
        cluster_id: i64,
        path: String,
        max_memory: Option<i64>,
        max_cores: Option<i64>,
        used_memory: Option<i64>,
        used_cores: Option<i64>,
        state: Option<String>,
        unseen_memory: Option<i64>,
        unseen_cores: Option<i64>,
    }
}

impl QueueRow {
    fn queue(&self) -> Result<Option<ExternalQueue>, StoreError> {
        let amounts = |memory: Option<i64>, cores: Option<i64>| Some(QueueAmounts { memory: memory?, cores: cores? });
        let (Some(max), Some(used), Some(state)) = (
            amounts(self.max_memory, self.max_cores),
            amounts(self.used_memory, self.used_cores),
            self.state.as_deref(),
        ) else {
            return Ok(None);
        };
        let state = QueueState::parse(state).ok_or_else(|| StoreError::inconsistent(SNAPSHOT, state))?;
        let path = self.path.clone();
        let (running_applications, pending_applications, custom) = (None, None, CustomAmountsByName::new());
        Ok(Some(ExternalQueue { path, max, used, state, running_applications, pending_applications, custom }))
    }
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
        let Some(wanted) = wanted.get(&row.cluster_id) else { continue };
        let named = wanted.names.iter().flat_map(|name| candidates(name));
        let in_use = wanted.paths.iter().flat_map(|path| along(path)).map(str::to_owned);
        paths.extend(named.chain(in_use).map(|path| (row.cluster_id, path)));
        if row.by_last_name {
            last_names.extend(wanted.names.iter().map(|name| (row.cluster_id, name.as_str())));
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
    let found: Vec<QueueRow> = sqlx::query_as(
        "-- external_queue::queues
        SELECT k.cluster_id, k.path, s.max_memory, s.max_cores, s.used_memory, s.used_cores, s.state, u.unseen_memory,
            u.unseen_cores
        FROM unnest($1::bigint[], $2::text[], $3::bigint[]) AS k (cluster_id, path, generation)
        LEFT JOIN LATERAL (SELECT * FROM linkis_external_snapshot s
            WHERE s.cluster_id = k.cluster_id AND s.generation = k.generation AND s.path = k.path LIMIT 1) s ON true
        LEFT JOIN LATERAL (SELECT * FROM linkis_external_queue u
            WHERE u.cluster_id = k.cluster_id AND u.path = k.path LIMIT 1) u ON true",
    )
    .bind(paths.iter().map(|(id, _)| *id).collect::<Vec<_>>())
    .bind(paths.iter().map(|(_, path)| path.as_str()).collect::<Vec<_>>())
    .bind(paths.iter().map(|(id, _)| generation(rows, *id)).collect::<Vec<_>>())
    .fetch_all(connection)
    .await?;
    for row in found {
        let state = states.entry(row.cluster_id).or_default();
        state.queues.extend(row.queue()?);
        if let (Some(memory), Some(cores)) = (row.unseen_memory, row.unseen_cores) {
            state.unseen.insert(row.path, QueueAmounts { memory, cores });
        }
    }
    Ok(states)
}

fn generation(rows: &[ClusterRow], cluster_id: i64) -> Option<i64> {
    rows.iter().find(|row| row.cluster_id == cluster_id)?.generation
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
    .bind(last_names.iter().map(|(id, _)| *id).collect::<Vec<_>>())
    .bind(last_names.iter().map(|(_, name)| *name).collect::<Vec<_>>())
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
    .bind(keys.iter().map(|(id, _)| *id).collect::<Vec<_>>())
    .bind(keys.iter().map(|(id, _)| generation(rows, *id)).collect::<Vec<_>>())
    .bind(keys.iter().map(|(_, application)| *application).collect::<Vec<_>>())
    .fetch_all(connection)
    .await?;
    let mut shown: HashMap<i64, HashMap<String, QueueAmounts>> = HashMap::new();
    for (cluster_id, application_id, memory, cores) in found {
        shown.entry(cluster_id).or_default().insert(application_id, QueueAmounts { memory, cores });
    }
    Ok(shown)
}

/// Columns of the unseen use of external queues.
#[derive(Debug, Default)]
pub(super) struct QueueColumns<'a> {
    pub cluster_id: Vec<i64>,
    pub path: Vec<&'a str>,
    pub memory: Vec<i64>,
    pub cores: Vec<i64>,
}

impl<'a> QueueColumns<'a> {
    pub fn of(clusters: &'a [ClusterDelta]) -> Self {
        let mut columns = Self::default();
        for cluster in clusters {
            for (path, unseen) in &cluster.unseen {
                columns.push(cluster.cluster_id, path, *unseen);
            }
        }
        columns
    }

    pub fn push(&mut self, cluster_id: i64, path: &'a str, unseen: QueueAmounts) {
        self.cluster_id.push(cluster_id);
        self.path.push(path);
        self.memory.push(unseen.memory);
        self.cores.push(unseen.cores);
    }
}
