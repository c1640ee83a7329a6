//! Pages of lists: tokens, and the live end of the history.

use rm_proto::page::PageRequest;
use rm_proto::v1::{self as proto, usage_service_client::UsageServiceClient};
use sqlx::{Acquire as _, Executor as _};
use tonic::{Code, Status, transport::Channel};
use tonic_types::StatusExt as _;

use crate::harness::*;

async fn usage(rm: &Instance) -> UsageServiceClient<Channel> {
    UsageServiceClient::connect(rm.address.clone()).await.unwrap()
}

#[track_caller]
fn names_the_token(status: &Status) {
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    assert_eq!(status.get_details_bad_request().unwrap().field_violations[0].field, "page_token");
}

/// Reads the history from `token` to its end, one line a page. Returns the EMs and the next token.
async fn follow(usage: &mut UsageServiceClient<Channel>, mut page_token: String) -> (Vec<String>, String) {
    let mut got = Vec::new();
    loop {
        let call = proto::ListActionsRequest { page_size: 1, page_token, ..Default::default() };
        let page = usage.list_actions(call).await.unwrap().into_inner();
        got.extend(page.actions.into_iter().filter_map(|action| Some(action.em?.instance)));
        if page.next_page_token.is_empty() {
            return (got, page.follow_token);
        }
        page_token = page.next_page_token;
    }
}

/// A line takes its number before it is committed: one with a larger number may be seen first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_follow_token_skips_no_late_commit() {
    const LINE: &str = "INSERT INTO linkis_resource_action_record (action, em_application_name, em_instance, resource_type, resource,
            actor, action_time)
        VALUES ('registered', 'linkis-cg-engineconnmanager', 'late', 'CPU', '{\"cores\":1}', 'somebody', clock_timestamp())";
    let (database, rm) = start().await;
    let register = async |host| {
        rm.client.register(registration(em(host), load(10, 10, 10))).await.unwrap();
    };
    register("host1").await;
    let mut by_hand = database.connect().await;
    let mut open = by_hand.begin().await.unwrap();
    open.execute(LINE).await.unwrap();
    register("host2").await;
    register("host3").await;
    let mut usage = usage(&rm).await;
    let (got, token) = follow(&mut usage, String::new()).await;
    assert_eq!(got, ["host1:9102"], "lines after a possible late line are not sent yet");
    open.commit().await.unwrap();
    let (got, token) = follow(&mut usage, token).await;
    assert_eq!(got, ["late", "host2:9102", "host3:9102"]);
    let (got, token) = follow(&mut usage, token).await;
    assert_eq!(got, [""; 0]);

    // A rolled-back id never appears, and delays no later line.
    let mut open = by_hand.begin().await.unwrap();
    open.execute(LINE).await.unwrap();
    open.rollback().await.unwrap();
    register("host4").await;
    let mut open = by_hand.begin().await.unwrap();
    let (got, token) = follow(&mut usage, token).await;
    assert_eq!(got, ["host4:9102"]);
    open.execute(LINE).await.unwrap();
    register("host5").await;
    assert_eq!(follow(&mut usage, String::new()).await.0.len(), 5);
    open.commit().await.unwrap();
    assert_eq!(follow(&mut usage, token).await.0, ["late", "host5:9102"]);
    rm.stop().await;
}

/// A forged token with an unknown year is refused or finds nothing; it is never a database error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_token_with_unknown_year_is_refused() {
    let (_database, rm) = start().await;
    let mut usage = usage(&rm).await;
    let refusals = PageRequest::new("ListRefusals", 1, &proto::ListRefusalsRequest::default()).unwrap();
    let by = proto::UsageBy::User.into();
    let asked = proto::GetUsageRequest { by, ..Default::default() };
    let used = PageRequest::new("GetUsage", 1, &asked).unwrap();
    let waiting = PageRequest::new("ListWaiting", 1, &proto::ListWaitingRequest::default()).unwrap();
    // The bounds of the years 1 and 9999, times beyond them, and the bounds of the number.
    let first = [-62_135_596_800_i64, -62_135_596_801, -377_705_116_800, -210_866_803_201, -1, i64::MIN];
    let last = [253_402_300_799, 253_402_300_800, 9_224_318_016_000, i64::MAX];
    for seconds in first.into_iter().chain(last) {
        let page_token = refusals.token(&format!("{seconds}-{}", "ff".repeat(32)));
        match usage.list_refusals(proto::ListRefusalsRequest { page_token, ..Default::default() }).await {
            Ok(got) => assert!(seconds == last[0] && got.get_ref().refusals.is_empty(), "{seconds}"),
            Err(status) => names_the_token(&status),
        }
        for key in [format!("[{seconds},null,null]"), format!(r#"[3600,["a",""],{seconds}]"#)] {
            let call = proto::GetUsageRequest { page_token: used.token(&key), ..asked.clone() };
            match usage.get_usage(call).await {
                Ok(got) => assert!(seconds == last[0] && got.get_ref().sums.is_empty(), "{key}"),
                Err(status) => names_the_token(&status),
            }
        }
        // The position of a waiting request is compared as bytes, and never parsed.
        let micros = seconds.saturating_mul(1_000_000).cast_unsigned().wrapping_add(1 << 63);
        let page_token = waiting.token(&format!("7fff{micros:016x}{}", "ff".repeat(16)));
        let call = proto::ListWaitingRequest { page_token, ..Default::default() };
        assert!(usage.list_waiting(call).await.unwrap().into_inner().waiting.is_empty());
    }
}
