//! Messages of the tickets that are to end because requests wait. Caller: `UsageService`.

use rm_proto::{convert::answer, v1 as proto};
use rm_service::usage::ListedReclaim;

/// Converts a chosen ticket.
pub(super) fn message(reclaim: ListedReclaim) -> proto::Reclaim {
    let mode = proto::ReclaimMode::from(reclaim.mode);
    proto::Reclaim {
        ticket_id: reclaim.ticket_id.to_string(),
        em: Some(answer::em_message(&reclaim.em)),
        user: reclaim.user.to_string(),
        idle_since: reclaim.idle_since.map(answer::timestamp),
        // As the user: a caller that is bound to users sees no request of others.
        for_ticket_id: reclaim.for_user.as_ref().map(|_| reclaim.for_ticket_id.to_string()).unwrap_or_default(),
        for_user: reclaim.for_user.map(|user| user.to_string()).unwrap_or_default(),
        mode: mode.into(),
        chosen_time: Some(answer::timestamp(reclaim.chosen_time)),
        due_time: Some(answer::timestamp(reclaim.due_time)),
        recall_time: reclaim.recall_time.map(answer::timestamp),
        withdrawn_time: reclaim.withdrawn_time.map(answer::timestamp),
        busy: reclaim.busy,
    }
}
