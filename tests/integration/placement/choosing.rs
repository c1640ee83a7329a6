//! Spread placement by the age of EMs, and by the load that their reports state.

use rm_model::report::Load;

use super::*;

/// Registers ten EMs, of which 60 % is in use, and then an EM without tickets.
async fn register_new_beside_ten(rm: &Instance) {
    register(rm, 10, 1000).await;
    for n in 0..10 {
        rm.client.request_resource(&request(&em(&format!("host{n}")), "alice", load(600, 600, 600))).await.granted();
    }
    rm.client.register(registration(em("new"), load(1000, 1000, 1000))).await.unwrap();
}

/// Makes requests on the instances in turn. Returns the number of grants on an EM.
async fn grants_on(instances: &[&Instance], named: &str, requests: usize) -> usize {
    let mut on = 0;
    for n in 0..requests {
        let rm = instances[n % instances.len()];
        let grant = rm.client.request_resource(&anywhere("hadoop", load(1, 1, 1))).await.granted();
        on += usize::from(grant.em == em(named));
    }
    on
}

/// Asserts that a new EM got some of the grants, and on each instance at most twice the mean of the others and one more.
fn assert_bounded(on: usize, requests: usize, (others, instances): (usize, usize)) {
    let is_bounded = on.saturating_sub(instances) * others <= 2 * (requests - on);
    assert!(on > 0 && is_bounded, "{on} of {requests} grants are on the new EM");
}

/// A new EM is bounded until its registration is a minute old.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placement_grants_new_em_at_most_twice_the_mean() {
    let (database, rm) = start().await;
    register_new_beside_ten(&rm).await;
    let on = grants_on(&[&rm], "new", 100).await;
    assert_bounded(on, 100, (10, 1));
    // An hour later, for an instance that reads the registration.
    database
        .execute("UPDATE linkis_em_resource_meta_data SET register_time = register_time - make_interval(hours => 1)")
        .await;
    let other = Instance::start(&database).await;
    assert_eq!(grants_on(&[&other], "new", 20).await, 20, "the emptiest EM gets all");
    assert_eq!(assert_invariants(&database, &rm.client).await, 130);
}

/// Each instance counts its own grants: the sum has the same bound.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placement_on_three_instances_bounds_new_em() {
    let (database, first, second) = two().await;
    let third = Instance::start(&database).await;
    register_new_beside_ten(&first).await;
    let on = grants_on(&[&first, &second, &third], "new", 150).await;
    assert_bounded(on, 150, (10, 3));
    assert_eq!(assert_invariants(&database, &first.client).await, 160);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn policy_decides_which_em_is_new() {
    let (_database, rm) = start().await;
    register_new_beside_ten(&rm).await;
    let policy = Policy::default().with_em_new_after(Duration::ZERO);
    rm.client.set_policy(&em("any").application_name, &policy).await.unwrap();
    // The first grant reads the policy.
    grants_on(&[&rm], "new", 1).await;
    assert_eq!(grants_on(&[&rm], "new", 20).await, 20);
    rm.client
        .set_policy(&em("any").application_name, &policy.with_em_new_after(Duration::from_secs(600)))
        .await
        .unwrap();
    // A registration is new again.
    rm.client.register(registration(em("newer"), load(1000, 1000, 1000))).await.unwrap();
    grants_on(&[&rm], "newer", 1).await;
    let on = grants_on(&[&rm], "newer", 44).await;
    assert_bounded(on, 44, (11, 1));
}

/// Reports the load of a completely busy machine.
async fn report_busy(rm: &Instance, named: &str) {
    let busy = rm.client.em(&em(named)).await.unwrap();
    let load = Some(Load::parse("load", 0, 100, 1000).unwrap());
    rm.client.heartbeat(&EmReport { load, ..report(&busy, 1) }).await.unwrap();
}

/// An EM without tickets, whose machine is completely busy, beside three EMs that are half full.
async fn register_busy_beside_three(rm: &Instance) {
    register(rm, 4, 1000).await;
    for named in ["host1", "host2", "host3"] {
        rm.client.request_resource(&request(&em(named), "alice", load(500, 500, 500))).await.granted();
    }
    report_busy(rm, "host0").await;
}

/// The instance that received the report and the others avoid a busy EM while another one has capacity.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn placement_avoids_em_with_busy_machine() {
    let patient = || settings().with("--em-silent-after", "10m").with("--em-lost-after", "1h");
    let database = Database::fresh().await;
    let [first, second, third] = [(); 3].map(|()| Instance::start_with(&database, patient()));
    let (first, second) = (first.await, second.await);
    register_busy_beside_three(&first).await;
    assert_eq!(grants_on(&[&first, &second], "host0", 60).await, 0);
    let large = anywhere("hadoop", load(600, 600, 600));
    let grant = first.client.request_resource(&large).await.granted();
    assert_eq!(grant.em, em("host0"), "no other EM has capacity");
    first.client.resource_released(&release(&grant, "hadoop")).await.unwrap();
    // Without the load, an instance sees the share in use.
    database.execute("UPDATE linkis_em_report SET report_time = report_time - make_interval(secs => 500)").await;
    let third = third.await;
    assert!(grants_on(&[&third], "host0", 30).await > 0, "a report is too old after two intervals");
    assert_invariants(&database, &first.client).await;
}
