//! Progress of counting by new limits, shown on a terminal until the limits decide. Caller: `limits apply`.

use std::{cell::RefCell, time::Duration};

use rm_client::calls;
use rm_proto::v1::{Job, LimitState, ListTasksRequest, ReplaceLimitsRequest, ReplaceLimitsResponse};

use super::super::{error::CommandFailure, output::progress, service::ServiceClient};

/// Interval between progress checks.
const INTERVAL: Duration = Duration::from_secs(1);

/// Replaces the limits. On a terminal, shows the number of EMs that remain to be counted and waits until none remains. The
/// service itself waits only as long as in other calls.
///
/// # Errors
/// [`CommandFailure::Service`].
pub async fn replaced(
    service: &ServiceClient,
    question: &ReplaceLimitsRequest,
) -> Result<ReplaceLimitsResponse, CommandFailure> {
    if !progress::is_visible() {
        return service.make(&calls::REPLACE_LIMITS, question).await;
    }
    let left = RefCell::new(None);
    let look = async || {
        let now = left_to_count(service).await;
        let is_any = now.as_ref().map(|jobs| !jobs.is_empty());
        left.replace(now);
        is_any
    };
    let replaced = async {
        let looking = async {
            loop {
                tokio::time::sleep(INTERVAL).await;
                look().await;
            }
        };
        let mut changes = tokio::select! {
            changes = service.make(&calls::REPLACE_LIMITS, question) => changes?,
            changes = looking => changes,
        };
        while changes.state() == LimitState::Counting {
            match look().await {
                // Without progress, the command does not wait.
                None => break,
                Some(false) => changes.set_state(LimitState::InForce),
                Some(true) => tokio::time::sleep(INTERVAL).await,
            }
        }
        Ok(changes)
    };
    let so_far = || {
        let left = left.borrow().as_deref().map(text).unwrap_or_default();
        Some(format!("changing the limits, and counting tickets for them{left}"))
    };
    progress::shown_with(so_far, replaced).await
}

/// Returns the counting jobs; `None` if the call fails.
async fn left_to_count(service: &ServiceClient) -> Option<Vec<Job>> {
    let tasks = service.make(&calls::LIST_TASKS, &ListTasksRequest {}).await.ok()?;
    Some(tasks.jobs.into_iter().filter(|job| job.kind == "label_sets").collect())
}

/// Returns a text that fits on one line of a terminal.
fn text(jobs: &[Job]) -> String {
    match jobs.iter().map(|job| job.left).max() {
        None => String::new(),
        Some(1) => ", 1 EM left".to_owned(),
        Some(left) => format!(", {left} EMs left"),
    }
}
