//! Surveys: while a request waits for any EM, their cost depends on the changes and not on the number of EMs.

use rm_client::ResourceRequest;

use super::{
    costs::{Costs, Counting},
    with_history,
};
use crate::harness::*;

/// Number of EMs without free capacity.
const FEW: i64 = 2000;
const MANY: i64 = 6000;

/// Number of counted surveys of changed EMs.
const COUNTED: i64 = 4;

/// Maximum number of surveys until that many are counted.
const SURVEYS_MAX: i64 = 20;

/// Maximum factor of the pages of surveys among more EMs.
const PAGES_RATIO: f64 = 1.3;

/// The statement that a survey of changed EMs runs, and a survey of all EMs does not.
const OF_CHANGED: &str = "em_report::survey_of";

/// Statements of surveys of changed EMs.
const OF_SURVEYS: [&str; 5] =
    ["action_record::ems_behind", OF_CHANGED, "em_report::unhealthy", "em_resource::read", "history_end::"];

/// Adds full EMs.
async fn fill(database: &Database, ems: i64) {
    let fill = format!(
        r#"INSERT INTO linkis_em_resource_meta_data (em_application_name, em_instance, resource_type, total_resource,
            protected_resource, used_resource, locked_resource, left_resource, over_committed, labels, epoch, register_time, version,
            counted_to)
        SELECT em_application_name, 'full' || n, resource_type, total_resource, total_resource, used_resource, locked_resource,
            left_resource, over_committed, labels, epoch, register_time, 1, counted_to
        FROM linkis_em_resource_meta_data, generate_series(1, {ems}) n;
        INSERT INTO linkis_em_report (em_application_name, em_instance, epoch, sequence, health, report_time)
        SELECT em_application_name, em_instance, epoch, 1, 'healthy', now() + interval '1 hour'
        FROM linkis_em_resource_meta_data WHERE em_instance LIKE 'full%';"#
    );
    execute(&mut database.connect().await, fill).await;
    execute(&mut database.connect().await, "VACUUM ANALYZE").await;
}

/// Returns the pages of a survey of changed EMs, while a request waits for any EM and another instance grants: for each statement, those of
/// one run. How many surveys of all EMs run meanwhile depends on the time that the rest takes, and does not change the result.
async fn measure(postgres: &Counting, name_of: &str, ems: i64) -> f64 {
    let database = postgres.database(name_of).await;
    let rm = with_history(&database).await;
    let em1 = em("busy");
    rm.client.register(registration(em1.clone(), load(20, 10_000, 10_000))).await.unwrap();
    fill(&database, ems).await;
    let other = with_history(&database).await;
    let waits = ResourceRequest { em: None, ..patient(&em1, "hadoop", load(20, 1, 1)) };
    let taken = other.client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
    let call = request_in_task(&rm.client, waits);
    let in_line = "SELECT count(*) FROM linkis_resource_waiting";
    eventually("the request waits", LONG, async || database.count(in_line).await == 1).await;
    let survey = async || {
        // Each poll of the waiting request is a survey.
        let polls = || rm.metric("linkis_rm_waiting_polls_total");
        let before = polls();
        eventually("a survey", LONG, async || polls() > before).await;
    };
    // The first surveys read all EMs.
    survey().await;
    survey().await;
    drop(postgres.costs(&database).await);
    let (mut counted, mut costs_of_surveys) = (0, Costs::new());
    for number in 0..SURVEYS_MAX {
        let user = format!("user{number}");
        let grant = other.client.request_resource(&request(&em1, &user, load(0, 1, 1))).await.granted();
        other.client.resource_released(&release(&grant, &user)).await.unwrap();
        survey().await;
        let costs = postgres.costs(&database).await;
        counted += costs.get(OF_CHANGED).map_or(0, |cost| cost.calls);
        for (statement, cost) in costs {
            if OF_SURVEYS.iter().any(|of| statement.starts_with(of)) {
                *costs_of_surveys.entry(statement).or_default() += cost;
            }
        }
        if counted >= COUNTED {
            break;
        }
    }
    assert!(counted >= COUNTED || !postgres.is_counting(), "{counted} of {SURVEYS_MAX} surveys read changed EMs only");
    // The surveys read the change: the request is granted once the EM has all its capacity again.
    other.client.resource_released(&release(&taken, "hadoop")).await.unwrap();
    call.await.unwrap().granted();
    rm.stop().await;
    other.stop().await;
    costs_of_surveys.values().map(|cost| cost.pages_per_call()).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn surveys_read_only_changed_ems() {
    let postgres = Counting::start(&Database::fresh().await, "plans-survey").await;
    let (few, many) =
        tokio::join!(measure(&postgres, "survey_of_few", FEW), measure(&postgres, "survey_of_many", MANY));
    postgres.stop().await;
    assert!(many <= few * PAGES_RATIO, "{few} pages, with more EMs {many}");
}
