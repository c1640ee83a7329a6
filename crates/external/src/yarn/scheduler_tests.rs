//! Responses of real schedulers, and forms of older releases.

use super::*;
use rm_model::queue::QueueError;

const FAIR: &str = include_str!("../../../../tests/fixtures/yarn/fair-3.4.2.json");
const CAPACITY: &str = include_str!("../../../../tests/fixtures/yarn/capacity-3.4.2.json");
const DUPLICATE_KEYS: &str = include_str!("../../../../tests/fixtures/yarn/fair-duplicate-keys.json");
const SHARES: &str = include_str!("../../../../tests/fixtures/yarn/capacity-2.7.json");

/// A maximum and a use.
const AMOUNTS: &str = r#""maxResources": {"memory": 1, "vCores": 1}, "usedResources": {"memory": 0, "vCores": 0}"#;
const ROOT_AMOUNTS: &str = r#""queueName": "root", "maxResources": {"memory": 1, "vCores": 1}"#;

fn read(json: &str, capacity: CapacityMode) -> QueueTree {
    let scheduler = SchedulerReply::read(json.as_bytes()).unwrap();
    let needs_cluster = scheduler.needs_cluster();
    let cluster = QueueAmounts { memory: 9 << 30, cores: 9 };
    let queues = scheduler.queues(capacity, if needs_cluster { cluster } else { QueueAmounts::default() });
    queues.unwrap()
}

/// Returns the paths with maximum and use in MiB and cores, and the number of running applications.
fn amounts_by_path(queues: &QueueTree) -> Vec<(&str, [i64; 4], Option<i64>)> {
    let mut amounts_by_path = Vec::new();
    for ExternalQueue { path, max, used, running_applications, .. } in queues.behind(None) {
        let amounts = [max.memory / MIB, max.cores, used.memory / MIB, used.cores];
        amounts_by_path.push((path.as_str(), amounts, *running_applications));
    }
    amounts_by_path
}

#[test]
fn fair_scheduler_queues_are_parsed() {
    let queues = read(FAIR, CapacityMode::Maximum);
    assert_eq!(
        amounts_by_path(&queues),
        [
            ("root", [102_400, 100, 12_288, 3], None),
            ("root.default", [102_400, 100, 0, 0], Some(0)),
            ("root.eng", [81_920, 80, 12_288, 3], None),
            ("root.eng.adhoc", [20_480, 20, 0, 0], Some(0)),
            ("root.eng.etl", [40_960, 40, 12_288, 3], Some(1)),
        ]
    );
    assert_eq!(queues.find("eng.etl").unwrap().path, "root.eng.etl");
    assert!(matches!(queues.find("etl"), Err(QueueError::NotFound { .. })));
}

#[test]
fn capacity_scheduler_queues_have_their_maximum() {
    let queues = read(CAPACITY, CapacityMode::Maximum);
    let (mut paths, mut used) = (Vec::new(), Vec::new());
    for (path, [_, _, memory, cores], _) in amounts_by_path(&queues) {
        paths.push(path);
        used.push((memory, cores));
    }
    assert_eq!(paths, ["root", "root.default", "root.eng", "root.eng.adhoc", "root.eng.etl"]);
    assert_eq!(used[0], (used[1].0 + used[2].0, used[1].1 + used[2].1), "the root states no use of its own");
    assert!(used[2].0 > 0);
    let max = |path| queues.find(path).unwrap().max;
    assert_eq!(max("etl"), QueueAmounts { memory: 102_400 * MIB, cores: 100 });
    assert_eq!(queues.find("adhoc").unwrap().path, "root.eng.adhoc");
}

#[test]
fn capacity_scheduler_guarantees_are_exact() {
    let queues = read(CAPACITY, CapacityMode::Guaranteed);
    let max = |path| queues.find(path).unwrap().max;
    assert_eq!(max("eng"), QueueAmounts { memory: 81_920 * MIB, cores: 80 });
    assert_eq!(max("etl"), QueueAmounts { memory: 61_440 * MIB, cores: 60 });
    assert_eq!(max("default"), QueueAmounts { memory: 20_480 * MIB, cores: 20 });
}

#[test]
fn scheduler_keys_given_twice_are_all_parsed() {
    let queues = read(DUPLICATE_KEYS, CapacityMode::Maximum);
    let paths: Vec<_> = amounts_by_path(&queues).into_iter().map(|(path, ..)| path).collect();
    assert_eq!(paths, ["root", "root.a", "root.b", "root.b.c", "root.d"]);
    let queue = queues.find("b.c").unwrap();
    assert_eq!(queues.left(queue), QueueAmounts { memory: 1536 * MIB, cores: 3 }, "that of root.b");
}

#[test]
fn queue_without_amounts_counts_share_of_cluster() {
    assert!(SchedulerReply::read(SHARES.as_bytes()).unwrap().needs_cluster());
    assert!(!SchedulerReply::read(CAPACITY.as_bytes()).unwrap().needs_cluster());
    let queues = read(SHARES, CapacityMode::Guaranteed);
    assert_eq!(
        amounts_by_path(&queues),
        [
            ("root", [9216, 9, 3072, 3], None),
            ("root.default", [3072, 3, 1024, 1], Some(1)),
            ("root.eng", [6144, 6, 2048, 2], None),
            ("root.eng.etl", [5529, 5, 2048, 2], None),
        ],
        "33.333332 of 9 cores are 3, and 60.000004 of 9216 MiB are 5529"
    );
    assert_eq!(read(SHARES, CapacityMode::Maximum).find("etl").unwrap().max.cores, 7);
    let etl = queues.find("etl").unwrap();
    assert_eq!(
        (etl.state, queues.state(etl)),
        (QueueState::Running, QueueState::Stopped),
        "the parent queue is stopped"
    );
}

#[test]
fn scheduler_error_names_missing_or_unknown_value() {
    let error = |json: &str| match SchedulerReply::read(json.as_bytes()) {
        Ok(scheduler) => scheduler.queues(CapacityMode::Maximum, QueueAmounts::default()).unwrap_err().to_string(),
        Err(error) => error.to_string(),
    };
    let fair = |root: &str| format!(r#"{{"scheduler": {{"schedulerInfo": {{"type": "fairScheduler", {root}}}}}}}"#);
    for (json, amounts_by_path) in [
        ("{}", "scheduler.schedulerInfo"),
        (r#"{"scheduler": {"schedulerInfo": {"type": "fifoScheduler"}}}"#, "fifoScheduler"),
        (&fair(r#""x": 1"#), "rootQueue"),
        (&fair(r#""rootQueue": {}"#), "queueName"),
        (&fair(r#""rootQueue": {"queueName": "root"}"#), "root states neither"),
        (&fair(&format!(r#""rootQueue": {{{ROOT_AMOUNTS}, "state": "GONE"}}"#)), "state"),
        (
            &fair(&format!(
                r#""rootQueue": {{{ROOT_AMOUNTS}, "childQueues": [
                    {{"queueName": "root.a", {AMOUNTS}}}, {{"queueName": "root.a", {AMOUNTS}}}]}}"#
            )),
            "root.a is listed twice",
        ),
        (FAIR.get(..FAIR.len() / 2).unwrap(), "is truncated"),
        ("<html></html>", "is not JSON"),
    ] {
        let error = error(json);
        assert!(error.contains(amounts_by_path), "{error} for {json}");
    }
}

#[test]
fn queue_paths_and_count_are_bounded() {
    let queue = |name: &str, inner: &str| format!(r#"{{"queueName": "{name}", {AMOUNTS}, "childQueues": [{inner}]}}"#);
    let json = |root: &str| {
        format!(r#"{{"scheduler": {{"schedulerInfo": {{"type": "fairScheduler", "rootQueue": {root}}}}}}}"#)
    };
    let read = |root: &str| SchedulerReply::read(json(root).as_bytes()).map(|_| ());
    let long = queue(&"x".repeat(PATH_BYTES_MAX), "");
    assert_eq!(read(&queue("root", &long)), Err(YarnParseError::LongPath { most: PATH_BYTES_MAX }));
    let many = vec![queue("q", ""); QUEUES_MAX].join(",");
    assert_eq!(read(&queue("root", &many)), Err(YarnParseError::TooMany { most: QUEUES_MAX }));
    let deep = (0..200).fold(String::new(), |inner, _| queue("q", &inner));
    assert!(matches!(read(&deep), Err(YarnParseError::NotJson { .. })));
}

/// Parses a root with one queue `etl`, whose fields are given. The cluster has 100 GiB and 100 cores.
fn read_etl(scheduler: &str, etl: &str) -> Result<[i64; 4], String> {
    let (root, inner) = match scheduler {
        "fairScheduler" => {
            (r#""rootQueue": {"queueName": "root", "maxResources": {"memory": 102400, "vCores": 100}"#, "}")
        }
        _ => (r#""queueName": "root", "absoluteCapacity": 100, "absoluteMaxCapacity": 100"#, ""),
    };
    let json = format!(
        r#"{{"scheduler": {{"schedulerInfo": {{"type": "{scheduler}", {root},
            "childQueues": {{"queue": [{{"queueName": "etl", {etl}}}]}}{inner}}}}}}}"#
    );
    let scheduler = SchedulerReply::read(json.as_bytes()).map_err(|error| error.to_string())?;
    let cluster = QueueAmounts { memory: 102_400 * MIB, cores: 100 };
    let queues = scheduler.queues(CapacityMode::Maximum, cluster).map_err(|error| error.to_string())?;
    let queue = queues.find("root.etl").unwrap();
    assert_eq!(queues.find("root").unwrap().used, queue.used, "the root's use is the sum of its queues");
    Ok([queue.max.memory / MIB, queue.max.cores, queue.used.memory / MIB, queue.used.cores])
}

const FULL: [i64; 4] = [61_440, 60, 61_440, 60];

#[test]
fn queue_use_in_any_spelling_counts_in_full() {
    const MAX: &str = r#""maxResources": {"memory": 61440, "vCores": 60}"#;
    const SHARE: &str = r#""absoluteCapacity": 20.0, "absoluteMaxCapacity": 60.0"#;
    for used in [
        r#""resourcesUsed": {"memory": 61440, "vCores": 60}"#,
        r#""resourcesUsed": {"memory": "61440", "vCores": "60"}"#,
        r#""resourcesUsed": {"memory": "61440.0", "vCores": "60.0"}"#,
        r#""resourcesUsed": {"memory": "61439.5", "vCores": 59.001}"#,
        r#""resourcesUsed": {"memorySize": 61440, "virtualCores": 60}"#,
        r#""resourcesUsed": {"memory": null, "memorySize": 61440, "vCores": 60}"#,
        r#""usedResources": "<memory:61440, vCores:60>""#,
        r#""usedResources": " <memory: 61440.0, vCores: 60, yarn.io/gpu: 1> ""#,
        r#""resourcesUsed": null, "usedResources": "<vCores:60, memory:61440>""#,
        r#""usedResources": "<memory:60 GB, vCores:60>", "resourcesUsed": {"memory": 61440, "vCores": 60}"#,
        r#""usedResources": "<memory:0, vCores:0>", "resourcesUsed": {"memory": 61440, "vCores": 60}"#,
    ] {
        assert_eq!(read_etl("fairScheduler", &format!("{MAX}, {used}")), Ok(FULL), "{used}");
        assert_eq!(read_etl("capacityScheduler", &format!("{SHARE}, {used}")), Ok(FULL), "{used}");
    }
    for nothing in ["null", "{}", "\"\"", r#"{"ram": 61440}"#] {
        let etl = format!(r#"{SHARE}, "absoluteUsedCapacity": "60.000004", "resourcesUsed": {nothing}"#);
        assert_eq!(read_etl("capacityScheduler", &etl), Ok(FULL), "{nothing}: the share is all there is");
    }
    let etl = format!(r#"{SHARE}, "absoluteUsedCapacity": 59.0002"#);
    assert_eq!(read_etl("capacityScheduler", &etl), Ok([61_440, 60, 60_417, 60]), "a part of a core is used");
}

#[test]
fn queue_maximum_in_any_spelling_is_read() {
    const USED: &str = r#""usedResources": {"memory": 61440, "vCores": 60}"#;
    for max in [
        r#"{"memory": "61440.0", "vCores": "60.9"}"#,
        r#"{"memorySize": 61440, "virtualCores": 60}"#,
        r#""<memory:61440, vCores:60>""#,
    ] {
        assert_eq!(read_etl("fairScheduler", &format!(r#""maxResources": {max}, {USED}"#)), Ok(FULL), "{max}");
        let capacities = format!(
            r#""capacities": {{"queueCapacitiesByPartition": [
                {{"partitionName": "", "effectiveMinResource": {max}, "effectiveMaxResource": {max}}}]}}"#
        );
        assert_eq!(read_etl("capacityScheduler", &format!("{capacities}, {USED}")), Ok(FULL), "{max}");
    }
}

/// An unlimited maximum is that of the parent, and the amounts of a labelled partition do not count.
#[test]
fn queue_maximum_without_limit_or_partition_is_bounded() {
    const NO_USE: &str = r#""usedResources": {"memory": 0, "vCores": 0}"#;
    for memory in ["2147483647", "9223372036854775807"] {
        let etl = format!(r#""maxResources": {{"memory": {memory}, "vCores": 2147483647}}, {NO_USE}"#);
        let [memory, cores, ..] = read_etl("fairScheduler", &etl).unwrap();
        assert!(memory >= 102_400 && cores >= 100, "{memory} {cores}");
    }
    let of = |name: &str, memory: i64, cores: i64| {
        let amounts = format!(r#"{{"memory": {memory}, "vCores": {cores}}}"#);
        format!(
            r#"{{"partitionName": "{name}", "effectiveMinResource": {amounts}, "effectiveMaxResource": {amounts}}}"#
        )
    };
    let partitions = format!("{}, {}", of("", 0, 0), of("GPU", 102_400, 100));
    let etl = format!(r#""capacities": {{"queueCapacitiesByPartition": [{partitions}]}}, {NO_USE}"#);
    assert_eq!(read_etl("capacityScheduler", &etl), Ok([0, 0, 0, 0]));
}

#[test]
fn queue_amount_unread_fails_with_queue_path() {
    const MAX: &str = r#""maxResources": {"memory": 61440, "vCores": 60}"#;
    const SHARES: &str = r#""absoluteCapacity": 20.0, "absoluteMaxCapacity": 60.0"#;
    const USED: &str = r#""usedResources": {"memory": 61440, "vCores": 60}"#;
    for used in [
        "null",
        "{}",
        "\"\"",
        "[]",
        "0",
        r#"{"ram": 61440, "cpu": 60}"#,
        r#"{"memory": 61440}"#,
        r#"{"memory": "60 GB", "vCores": 60}"#,
        r#"{"memory": "NaN", "vCores": 60}"#,
        r#"{"memory": {}, "vCores": [60, 60]}"#,
        r#""<memory:60 GB, vCores:60>""#,
        r#""<memory:61440>""#,
        r#""memory:61440, vCores:60""#,
    ] {
        for key in ["usedResources", "resourcesUsed"] {
            let error = read_etl("fairScheduler", &format!(r#"{MAX}, "{key}": {used}"#)).unwrap_err();
            assert!(error.contains("root.etl") && error.contains("use"), "{error} for {used}");
            let error = read_etl("capacityScheduler", &format!(r#"{SHARES}, "{key}": {used}"#)).unwrap_err();
            assert!(error.contains("root.etl") && error.contains("use"), "{error} for {used}");
        }
        let error = read_etl("fairScheduler", &format!(r#""maxResources": {used}, {USED}"#)).unwrap_err();
        assert!(error.contains("root.etl"), "{error} for {used}");
        let capacities = format!(
            r#""capacities": {{"queueCapacitiesByPartition": [
                {{"partitionName": "", "effectiveMinResource": {used}, "effectiveMaxResource": {used}}}]}}"#
        );
        let error = read_etl("capacityScheduler", &format!("{capacities}, {USED}")).unwrap_err();
        assert!(error.contains("root.etl"), "{error} for {used}");
    }
    let error = read_etl("fairScheduler", MAX).unwrap_err();
    assert!(error.contains("root.etl does not state its use"), "{error}");
    let unread = r#""absoluteUsedCapacity": 60.0, "resourcesUsed": {"memory": "60 GB", "vCores": 60}"#;
    assert!(read_etl("capacityScheduler", &format!("{SHARES}, {unread}")).is_err(), "a malformed value is an error");
}
