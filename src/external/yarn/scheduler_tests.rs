//! What real schedulers answered, and what older ones do.

use super::*;
use crate::domain::queue::QueueError;

const FAIR: &str = include_str!("../../../tests/fixtures/yarn/fair-3.4.2.json");
const CAPACITY: &str = include_str!("../../../tests/fixtures/yarn/capacity-3.4.2.json");
const DUPLICATE_KEYS: &str = include_str!("../../../tests/fixtures/yarn/fair-duplicate-keys.json");
const SHARES: &str = include_str!("../../../tests/fixtures/yarn/capacity-2.7.json");

fn read(json: &str, capacity: Capacity) -> Queues {
    let scheduler = Scheduler::read(json.as_bytes()).unwrap();
    let needs_cluster = scheduler.needs_cluster();
    let cluster = QueueAmounts { memory: 9 << 30, cores: 9 };
    let queues = scheduler.queues(capacity, if needs_cluster { cluster } else { QueueAmounts::default() });
    queues.unwrap()
}

/// Paths with the maximum, what is used of it, both in MiB and cores, and how many applications run.
fn told(queues: &Queues) -> Vec<(&str, [i64; 4], Option<i64>)> {
    let mut told = Vec::new();
    for Queue { path, max, used, running_applications, .. } in queues.behind(None) {
        let amounts = [max.memory / MIB, max.cores, used.memory / MIB, used.cores];
        told.push((path.as_str(), amounts, *running_applications));
    }
    told
}

#[test]
fn the_fair_scheduler_s_queues() {
    let queues = read(FAIR, Capacity::Maximum);
    assert_eq!(
        told(&queues),
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
fn the_capacity_scheduler_s_queues_as_far_as_they_may_grow() {
    let queues = read(CAPACITY, Capacity::Maximum);
    let (mut paths, mut used) = (Vec::new(), Vec::new());
    for (path, [_, _, memory, cores], _) in told(&queues) {
        paths.push(path);
        used.push((memory, cores));
    }
    assert_eq!(paths, ["root", "root.default", "root.eng", "root.eng.adhoc", "root.eng.etl"]);
    assert_eq!(used[0], (used[1].0 + used[2].0, used[1].1 + used[2].1), "the root does not say what it uses");
    assert!(used[2].0 > 0);
    let max = |path| queues.find(path).unwrap().max;
    assert_eq!(max("etl"), QueueAmounts { memory: 102_400 * MIB, cores: 100 });
    assert_eq!(queues.find("adhoc").unwrap().path, "root.eng.adhoc");
}

#[test]
fn the_capacity_scheduler_s_guarantees_are_exact() {
    let queues = read(CAPACITY, Capacity::Guaranteed);
    let max = |path| queues.find(path).unwrap().max;
    assert_eq!(max("eng"), QueueAmounts { memory: 81_920 * MIB, cores: 80 });
    assert_eq!(max("etl"), QueueAmounts { memory: 61_440 * MIB, cores: 60 });
    assert_eq!(max("default"), QueueAmounts { memory: 20_480 * MIB, cores: 20 });
}

#[test]
fn keys_that_stand_there_twice_are_all_read() {
    let queues = read(DUPLICATE_KEYS, Capacity::Maximum);
    let paths: Vec<_> = told(&queues).into_iter().map(|(path, ..)| path).collect();
    assert_eq!(paths, ["root", "root.a", "root.b", "root.b.c", "root.d"]);
    let queue = queues.find("b.c").unwrap();
    assert_eq!(queues.left(queue), QueueAmounts { memory: 1536 * MIB, cores: 3 }, "that of root.b");
}

#[test]
fn shares_of_the_cluster_are_counted_where_no_amounts_are_told() {
    assert!(Scheduler::read(SHARES.as_bytes()).unwrap().needs_cluster());
    assert!(!Scheduler::read(CAPACITY.as_bytes()).unwrap().needs_cluster());
    let queues = read(SHARES, Capacity::Guaranteed);
    assert_eq!(
        told(&queues),
        [
            ("root", [9216, 9, 3072, 3], None),
            ("root.default", [3072, 3, 1024, 1], Some(1)),
            ("root.eng", [6144, 6, 2048, 2], None),
            ("root.eng.etl", [5529, 5, 2048, 2], None),
        ],
        "33.333332 of 9 cores are 3, and 60.000004 of 9216 MiB are 5529"
    );
    assert_eq!(read(SHARES, Capacity::Maximum).find("etl").unwrap().max.cores, 7);
    let etl = queues.find("etl").unwrap();
    assert_eq!((etl.state, queues.state(etl)), (QueueState::Running, QueueState::Stopped), "what it is in is stopped");
}

#[test]
fn what_is_missing_or_strange_is_an_error_that_names_it() {
    let error = |json: &str| match Scheduler::read(json.as_bytes()) {
        Ok(scheduler) => scheduler.queues(Capacity::Maximum, QueueAmounts::default()).unwrap_err().to_string(),
        Err(error) => error.to_string(),
    };
    let fair = |root: &str| format!(r#"{{"scheduler": {{"schedulerInfo": {{"type": "fairScheduler", {root}}}}}}}"#);
    for (json, told) in [
        ("{}", "scheduler.schedulerInfo"),
        (r#"{"scheduler": {"schedulerInfo": {"type": "fifoScheduler"}}}"#, "fifoScheduler"),
        (&fair(r#""x": 1"#), "rootQueue"),
        (&fair(r#""rootQueue": {}"#), "queueName"),
        (&fair(r#""rootQueue": {"queueName": "root"}"#), "root says neither"),
        (&fair(r#""rootQueue": {"queueName": "root", "maxResources": {}, "state": "GONE"}"#), "state"),
        (
            &fair(
                r#""rootQueue": {"queueName": "root", "maxResources": {}, "childQueues": [
                    {"queueName": "root.a", "maxResources": {}}, {"queueName": "root.a", "maxResources": {}}]}"#,
            ),
            "root.a twice",
        ),
        (FAIR.get(..FAIR.len() / 2).unwrap(), "ends in the middle"),
        ("<html></html>", "no JSON"),
    ] {
        let error = error(json);
        assert!(error.contains(told), "{error} for {json}");
    }
}

#[test]
fn names_and_numbers_of_queues_are_bounded() {
    let queue = |name: &str, inner: &str| {
        format!(r#"{{"queueName": "{name}", "maxResources": {{}}, "childQueues": [{inner}]}}"#)
    };
    let json = |root: &str| {
        format!(r#"{{"scheduler": {{"schedulerInfo": {{"type": "fairScheduler", "rootQueue": {root}}}}}}}"#)
    };
    let read = |root: &str| Scheduler::read(json(root).as_bytes()).map(|_| ());
    let long = queue(&"x".repeat(PATH_BYTES_MAX), "");
    assert_eq!(read(&queue("root", &long)), Err(ParseError::LongPath { most: PATH_BYTES_MAX }));
    let many = vec![queue("q", ""); QUEUES_MAX].join(",");
    assert_eq!(read(&queue("root", &many)), Err(ParseError::TooMany { most: QUEUES_MAX }));
    let deep = (0..200).fold(String::new(), |inner, _| queue("q", &inner));
    assert!(matches!(read(&deep), Err(ParseError::NotJson { .. })));
}
