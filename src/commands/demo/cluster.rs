//! Objects and schedule of the demo: pure values without I/O, equal in each run. Callers: `life` and `objects`.

use std::time::Duration;

use rm_proto::v1::{
    EmInstance, EngineInstance, Health, Limit, LimitMode, Load, LoadInstanceResource, RequestResourceRequest, Resource,
    resource::Kind,
};

/// Application name of the demo's EMs.
pub const APPLICATION: &str = "demo-ecm";

/// Number of EMs.
pub const EMS: usize = 12;

/// Time after which a ticket without a confirmed engine expires.
pub const LOCK_TTL: Duration = Duration::from_secs(20);

/// Time that a request waits for capacity.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

const GIB: i64 = 1 << 30;

/// One EM of the demo.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DemoEm {
    number: usize,
}

impl DemoEm {
    /// Returns all EMs of the demo.
    pub fn all() -> impl Iterator<Item = Self> {
        (1..=EMS).map(|number| Self { number })
    }

    /// Returns the name of the EM.
    pub fn instance(self) -> EmInstance {
        EmInstance { application_name: APPLICATION.to_owned(), instance: format!("demo-em-{:02}:9102", self.number) }
    }

    /// Returns the capacity of the EM: three sizes.
    pub fn total(self) -> Resource {
        let cores = [8, 16, 32][self.number % 3];
        load_instance(cores * 4 * GIB, cores, cores)
    }

    /// Returns the zone of the EM, the value of its label `zone`.
    pub fn zone(self) -> &'static str {
        if self.number.is_multiple_of(2) { "demo-north" } else { "demo-south" }
    }
}

/// Amounts of an EM or an engine; `memory` in bytes.
fn load_instance(memory: i64, cores: i64, instances: i64) -> Resource {
    Resource { kind: Some(Kind::LoadInstance(LoadInstanceResource { memory, cores, instances })) }
}

/// Returns the limits of the demo, each for one user: two enforced limits and an advisory limit.
pub fn limits() -> [Limit; 3] {
    let limit = |user: &str, dimension: &str, max: i64, mode: LimitMode| Limit {
        labels: [("user".to_owned(), user.to_owned())].into(),
        max: [(dimension.to_owned(), max)].into(),
        mode: mode.into(),
        ..Default::default()
    };
    [
        limit("demo-bob", "instances", 4, LimitMode::Enforced),
        limit("demo-carol", "cores", 24, LimitMode::Enforced),
        limit("demo-dora", "instances", 6, LimitMode::Advisory),
    ]
}

/// One kind of engine.
#[derive(Debug)]
struct EngineKind {
    engine_type: &'static str,
    cores: i64,
    memory_gib: i64,
}

const ENGINE_KINDS: [EngineKind; 5] = [
    EngineKind { engine_type: "spark-3.4.3", cores: 4, memory_gib: 16 },
    EngineKind { engine_type: "python-3.11", cores: 1, memory_gib: 2 },
    EngineKind { engine_type: "hive-3.1.3", cores: 2, memory_gib: 8 },
    EngineKind { engine_type: "shell-1", cores: 1, memory_gib: 1 },
    EngineKind { engine_type: "flink-1.18.1", cores: 8, memory_gib: 24 },
];

const USERS: [&str; 7] =
    ["demo-alice", "demo-bob", "demo-carol", "demo-dora", "demo-emil", "demo-fatima", "demo-gustav"];

const CREATORS: [&str; 3] = ["demo-ide", "demo-nightly", "demo-reports"];

/// One engine of the demo, from its request to its release. Its number decides everything, so that each run shows the same cluster.
#[derive(Debug, Clone, Copy)]
pub struct DemoEngine {
    number: usize,
}

impl DemoEngine {
    /// Returns the engine with this number.
    pub fn new(number: usize) -> Self {
        Self { number }
    }

    /// Returns the user that the engine runs for.
    pub fn user(self) -> &'static str {
        USERS[self.number % USERS.len()]
    }

    /// Returns the request for the engine. Requests of two users, and every fifth of the others, wait for capacity.
    pub fn request(self) -> RequestResourceRequest {
        let kind = &ENGINE_KINDS[self.number % ENGINE_KINDS.len()];
        let waits = matches!(self.user(), "demo-carol" | "demo-emil") || self.number.is_multiple_of(5);
        RequestResourceRequest {
            user: self.user().to_owned(),
            creator: CREATORS[self.number % CREATORS.len()].to_owned(),
            engine_type: kind.engine_type.to_owned(),
            resource: Some(load_instance(kind.memory_gib * GIB, kind.cores, 1)),
            wait_timeout: waits.then(|| WAIT_TIMEOUT.try_into().ok()).flatten(),
            lock_ttl: LOCK_TTL.try_into().ok(),
            ..Default::default()
        }
    }

    /// Returns whether the engine confirms. One of 23 does not: its ticket expires.
    pub fn reports_in(self) -> bool {
        !self.number.is_multiple_of(23)
    }

    /// Returns the time between the grant and the confirmation.
    pub fn start_time(self) -> Duration {
        Duration::from_secs(1 + (self.number % 3) as u64)
    }

    /// Returns the time for which the engine runs a task: 13 to 53 s.
    pub fn work_time(self) -> Duration {
        self.run_time() * 2 / 3
    }

    /// Returns the time between its last task and the release: 7 to 27 s.
    pub fn idle_time(self) -> Duration {
        self.run_time() / 3
    }

    fn run_time(self) -> Duration {
        Duration::from_secs(20 + (self.number * 7 % 61) as u64)
    }

    /// Returns the name of the engine.
    pub fn instance(self) -> EngineInstance {
        EngineInstance {
            application_name: "demo-engineconn".to_owned(),
            instance: format!("demo-engine:{}", 30_000 + self.number % 30_000),
        }
    }
}

/// Returns the health that the EM at `index` reports: one EM is unhealthy in each second half minute.
pub fn health(index: usize, sequence: i64) -> Health {
    if index == EMS - 1 && sequence % 10 >= 5 { Health::Unhealthy } else { Health::Healthy }
}

/// Returns the load of an EM with this number of engines.
pub fn load(engines: usize, sequence: i64) -> Load {
    let engines = i64::try_from(engines).unwrap_or_default();
    let permille = (engines * 45 + sequence % 7 * 10).min(1000);
    Load {
        memory_used: (engines * 3).min(128) * GIB,
        memory_max: 128 * GIB,
        cpu_permille: i32::try_from(permille).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn demo_objects_begin_with_demo() {
        assert!(APPLICATION.starts_with("demo-"));
        assert!(USERS.iter().chain(&CREATORS).all(|name| name.starts_with("demo-")));
        assert!(DemoEm::all().all(|em| em.instance().instance.starts_with("demo-") && em.zone().starts_with("demo-")));
        assert!(limits().iter().all(|limit| limit.each.is_empty() && limit.labels["user"].starts_with("demo-")));
        assert!((0..100).all(|number| DemoEngine::new(number).instance().instance.starts_with("demo-")));
    }

    #[test]
    fn demo_has_at_most_fifty_ems() {
        assert!(DemoEm::all().count() <= 50);
    }
}
