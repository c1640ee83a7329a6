//! How limits are changed: by whom, and on what they expect.

use std::collections::BTreeMap;

use linkis_rm::transport::proto::{self, limit_service_client::LimitServiceClient};
use tokio::task::JoinSet;
use tonic::{Code, Status, transport::Channel};
use tonic_types::StatusExt as _;

use crate::harness::*;

type Limits = LimitServiceClient<Channel>;

/// At most so many instances for a user, or for each.
fn limit(user: Option<&str>, instances: i64) -> proto::Limit {
    proto::Limit {
        labels: user.map(|user| ("user".to_owned(), user.to_owned())).into_iter().collect(),
        each: if user.is_none() { vec!["user".to_owned()] } else { vec![] },
        max: BTreeMap::from([("instances".to_owned(), instances)]),
        ..Default::default()
    }
}

/// What an administrator says of a limit, without what the service tells.
fn as_set(limits: &[proto::Limit]) -> Vec<proto::Limit> {
    let as_set = |limit: &proto::Limit| proto::Limit {
        labels: limit.labels.clone(),
        each: limit.each.clone(),
        max: limit.max.clone(),
        ..Default::default()
    };
    limits.iter().map(as_set).collect()
}

async fn all(limits: &Limits, page_size: i32) -> Vec<proto::Limit> {
    let (mut all, mut page_token) = (Vec::new(), String::new());
    loop {
        let call = proto::ListLimitsRequest { page_size, page_token };
        let page = limits.clone().list_limits(call).await.unwrap().into_inner();
        all.extend(page.limits);
        page_token = page.next_page_token;
        if page_token.is_empty() {
            return all;
        }
    }
}

fn reason(status: &Status) -> (Code, String) {
    (status.code(), status.get_details_error_info().map(|info| info.reason).unwrap_or_default())
}

async fn set(limits: &Limits, limit: proto::Limit, expected_etag: Option<&str>) -> Result<(), Status> {
    let call = proto::SetLimitRequest { limit: Some(limit), expected_etag: expected_etag.map(str::to_owned) };
    limits.clone().set_limit(call).await.map(drop)
}

async fn delete(limits: &Limits, limit: proto::Limit, expected_etag: Option<&str>) -> Result<(), Status> {
    let call = proto::DeleteLimitRequest { limit: Some(limit), expected_etag: expected_etag.map(str::to_owned) };
    limits.clone().delete_limit(call).await.map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_come_in_pages_and_tell_who_set_them_and_when() {
    let (database, rm) = start().await;
    let limits = Limits::connect(rm.address.clone()).await.unwrap();
    let users = ["a", "b", "c", "d", "e"];
    for user in users {
        set(&limits, limit(Some(user), 1), None).await.unwrap();
    }
    set(&limits, limit(None, 2), None).await.unwrap();
    let of_creator = proto::Limit { each: vec!["creator".to_owned()], ..limit(None, 3) };
    set(&limits, of_creator.clone(), None).await.unwrap();
    let told = all(&limits, 1000).await;
    let mut expected = vec![of_creator];
    expected.extend(users.map(|user| limit(Some(user), 1)));
    expected.push(limit(None, 2));
    assert_eq!(as_set(&told), expected, "in the order in which they are checked");
    for size in 1..8 {
        assert_eq!(all(&limits, size).await, told, "in pages of {size}");
    }
    for limit in &told {
        assert_eq!(limit.updated_by, "anonymous");
        assert_eq!(limit.state(), proto::LimitState::InForce);
        let seconds = limit.update_time.unwrap().seconds;
        let now = database.count("SELECT extract(epoch FROM clock_timestamp())::bigint").await;
        assert!((now - 60..=now).contains(&seconds), "{seconds} at {now}");
    }
    // Another instance that has read them before tells of a change at once.
    let second = Instance::start(&database).await;
    let elsewhere = Limits::connect(second.address.clone()).await.unwrap();
    assert_eq!(all(&elsewhere, 3).await, told);
    set(&limits, limit(Some("c"), 9), None).await.unwrap();
    let page_token = r#"{"user":"b"}"#.to_owned();
    let call = proto::ListLimitsRequest { page_size: 1, page_token };
    let page = elsewhere.clone().list_limits(call).await.unwrap().into_inner();
    assert_eq!(as_set(&page.limits), [limit(Some("c"), 9)]);
    assert_ne!(page.limits[0].etag, told[3].etag);
    for (page_size, page_token, field) in [(-1, "", "page_size"), (1001, "", "page_size"), (1, "x", "page_token")] {
        let call = proto::ListLimitsRequest { page_size, page_token: page_token.to_owned() };
        let status = limits.clone().list_limits(call).await.unwrap_err();
        assert_eq!(status.get_details_bad_request().unwrap().field_violations[0].field, field);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_is_only_changed_from_what_its_caller_knows() {
    let (_database, rm) = start().await;
    let limits = Limits::connect(rm.address.clone()).await.unwrap();
    let etag = async || all(&limits, 10).await[0].etag.clone();
    let changed = |answer: Result<(), Status>| {
        let status = answer.unwrap_err();
        assert_eq!(reason(&status), (Code::Aborted, "LIMIT_CHANGED".to_owned()), "{status:?}");
        status.message().to_owned()
    };
    // Empty stands for none, which only the first of many who try finds.
    let mut calls = JoinSet::new();
    for n in 0..10 {
        let limits = limits.clone();
        calls.spawn(async move { set(&limits, limit(Some("hadoop"), n), Some("")).await.is_ok() });
    }
    assert_eq!(calls.join_all().await.into_iter().filter(|is_set| *is_set).count(), 1);
    let first = etag().await;
    changed(set(&limits, limit(Some("hadoop"), 20), Some("")).await);
    changed(set(&limits, limit(Some("hadoop"), 20), Some("nonsense")).await);
    set(&limits, limit(Some("hadoop"), 20), Some(&first)).await.unwrap();
    let message = changed(set(&limits, limit(Some("hadoop"), 30), Some(&first)).await);
    assert!(message.contains("user=hadoop") && message.contains("anonymous"), "{message}");
    // The same again is a change, too.
    let second = etag().await;
    set(&limits, limit(Some("hadoop"), 20), None).await.unwrap();
    changed(delete(&limits, limit(Some("hadoop"), 0), Some(&second)).await);
    assert_eq!(as_set(&all(&limits, 10).await), [limit(Some("hadoop"), 20)]);
    let third = etag().await;
    delete(&limits, limit(Some("hadoop"), 0), Some(&third)).await.unwrap();
    let status = delete(&limits, limit(Some("hadoop"), 0), Some(&third)).await.unwrap_err();
    assert_eq!(reason(&status), (Code::NotFound, "NO_SUCH_LIMIT".to_owned()));
    let message = changed(set(&limits, limit(Some("hadoop"), 1), Some(&third)).await);
    assert!(message.contains("gone"), "{message}");
    assert_eq!(all(&limits, 10).await, []);
}
