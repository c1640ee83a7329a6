//! `ListRefusals`, `GetUsage` and `ListUsers`: refusals and usage, summed over periods of time, and present use by user.
//!
//! A caller that is bound to users gets only the sums of these users. Caller: `UsageService`.

use time::OffsetDateTime;
use tonic::Request;

use crate::{
    authenticator,
    convert::{answer, limit},
};
use rm_model::{
    access::CallScope,
    name::{FieldError, Name, check_text},
    refusal_sum::{KEY_BYTES_MAX, RefusalSum},
    resource::Dimension,
    scope_kind::ScopeKind,
    usage_sum::{UsageBy, UsageName, UsageSum},
    user_sum::{UseSum, UserSum},
};
use rm_proto::page::{PageRequest, hex, parse_hex};
use rm_proto::v1 as proto;
use rm_service::usage::accounting::{RefusalAt, UsageAt, UserSumAt};
use rm_service::{
    error::Error,
    refusals::PERIOD,
    usage::{
        UsageQueries,
        accounting::{RefusalFilter, UsageQuery},
    },
};

use super::filters::{moment, users};

pub(super) async fn list_refusals(
    usage: &UsageQueries,
    call: &Request<proto::ListRefusalsRequest>,
) -> Result<proto::ListRefusalsResponse, Error> {
    let message = call.get_ref();
    let filters = proto::ListRefusalsRequest { page_size: 0, page_token: String::new(), ..message.clone() };
    let page = PageRequest::new("ListRefusals", message.page_size, &filters)?;
    let after = page.after(&message.page_token, parse_refusal_key)?;
    let filter = refusal_filter(message, authenticator::reach(call)?)?;
    let found = usage.refusals(&filter, after, page.entries_max()).await?;
    Ok(proto::ListRefusalsResponse {
        refusals: found.shown.iter().map(refusal_sum).collect(),
        next_page_token: found.next.map(|at| page.token(&refusal_key(&at))).unwrap_or_default(),
    })
}

fn refusal_filter(message: &proto::ListRefusalsRequest, reach: &CallScope) -> Result<RefusalFilter, FieldError> {
    let kinds = || ScopeKind::ALL.map(ScopeKind::as_str).join(", ");
    let kind = match message.scope_kind.as_str() {
        "" => None,
        kind => Some(
            ScopeKind::parse(kind)
                .ok_or_else(|| FieldError::new("scope_kind", format!("must be empty or one of {}", kinds())))?,
        ),
    };
    if message.scope.len() > KEY_BYTES_MAX {
        return Err(FieldError::new("scope", format!("must have at most {KEY_BYTES_MAX} bytes")));
    }
    check_text("dimension", &message.dimension)?;
    let text = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
    Ok(RefusalFilter {
        users: users(&message.user, reach)?,
        kind,
        scope: text(&message.scope),
        dimension: text(&message.dimension),
        from: moment("from_time", message.from_time)?,
        to: moment("to_time", message.to_time)?,
    })
}

fn refusal_key(at: &RefusalAt) -> String {
    format!("{}-{}", at.period_start.unix_timestamp(), hex(&at.key_hash))
}

fn parse_refusal_key(key: &str) -> Option<RefusalAt> {
    let (seconds, hash) = key.split_once('-')?;
    let period_start = OffsetDateTime::from_unix_timestamp(seconds.parse().ok()?).ok()?;
    Some(RefusalAt { period_start, key_hash: parse_hex(hash)?.try_into().ok()? })
}

fn refusal_sum(sum: &RefusalSum) -> proto::RefusalSum {
    let (key, count) = (&sum.key, &sum.count);
    proto::RefusalSum {
        period_start: Some(answer::timestamp(sum.period_start)),
        period: Some(prost_types::Duration { seconds: i64::try_from(PERIOD.as_secs()).unwrap_or(i64::MAX), nanos: 0 }),
        user: key.user.clone(),
        scope_kind: key.kind.as_str().to_owned(),
        scope: key.scope.clone(),
        dimension: key.dimension.clone(),
        rule: key.rule.clone(),
        refusals: i64::try_from(count.refusals).unwrap_or(i64::MAX),
        last_requested: count.last_requested,
        last_available: count.last_available,
        last_time: Some(answer::timestamp(count.last)),
        others: key.is_others(),
    }
}

pub(super) async fn get_usage(
    usage: &UsageQueries,
    call: &Request<proto::GetUsageRequest>,
) -> Result<proto::GetUsageResponse, Error> {
    let message = call.get_ref();
    let filters = proto::GetUsageRequest { page_size: 0, page_token: String::new(), ..message.clone() };
    let page = PageRequest::new("GetUsage", message.page_size, &filters)?;
    let (to, after) = page.after(&message.page_token, parse_usage_key)?.unzip();
    let mut query = usage_query(message, authenticator::reach(call)?)?;
    // Without times in the call, the first page defines the range, and its token has the end.
    query.to = to.or(query.to);
    let mut found = usage.used(&query, after.as_ref(), page.size + 1).await?;
    let more = page.cut(&mut found.sums);
    let last = found.sums.last().filter(|_| more);
    let last = last.map(|last| UsageAt { used_by: last.used_by.clone(), hour: last.hour });
    let next = last.or(found.looked_to).map(|at| page.token(&usage_key(found.range.to, &at)));
    Ok(proto::GetUsageResponse {
        sums: found.sums.iter().map(usage_sum).collect(),
        from_time: Some(answer::timestamp(found.range.from)),
        to_time: Some(answer::timestamp(found.range.to)),
        complete_until: Some(answer::timestamp(found.complete_until)),
        next_page_token: next.unwrap_or_default(),
    })
}

fn usage_query(message: &proto::GetUsageRequest, reach: &CallScope) -> Result<UsageQuery, FieldError> {
    let unknown = "must be USAGE_BY_USER, USAGE_BY_CREATOR, USAGE_BY_ENGINE_TYPE or USAGE_BY_EM";
    let by = message.by().read().ok_or_else(|| FieldError::new("by", unknown))?;
    let users = users(&message.user, reach)?;
    if by != UsageBy::User && users.is_some() {
        let problem = match message.user.is_empty() {
            true => "must be USAGE_BY_USER for a caller that is bound to users: other sums include other users",
            false => "must be USAGE_BY_USER if a user is named: other sums are not grouped by user",
        };
        return Err(FieldError::new("by", problem));
    }
    let (from, to) = (moment("from_time", message.from_time)?, moment("to_time", message.to_time)?);
    Ok(UsageQuery { by, users, from, to, hourly: message.hourly })
}

/// Page key of usage sums: the end of the range, the name of the last sum, and its hour. JSON, because a name may
/// contain any separator.
type UsageKey = (i64, Option<(String, String)>, Option<i64>);

fn usage_key(to: OffsetDateTime, at: &UsageAt) -> String {
    let name = match &at.used_by {
        UsageName::Name(name, em_instance) => Some((name, em_instance)),
        UsageName::Others => None,
    };
    serde_json::json!((to.unix_timestamp(), name, at.hour.map(OffsetDateTime::unix_timestamp))).to_string()
}

fn parse_usage_key(key: &str) -> Option<(OffsetDateTime, UsageAt)> {
    let (to, name, hour): UsageKey = serde_json::from_str(key).ok()?;
    let time =
        |seconds| OffsetDateTime::from_unix_timestamp(seconds).ok().filter(|time| *time >= OffsetDateTime::UNIX_EPOCH);
    let is_text = |text: &str| check_text("page_token", text).is_ok();
    let used_by = match name {
        Some((name, em_instance)) if is_text(&name) && is_text(&em_instance) => UsageName::Name(name, em_instance),
        Some(_) => return None,
        None => UsageName::Others,
    };
    let hour = match hour {
        Some(hour) => Some(time(hour)?),
        None => None,
    };
    Some((time(to)?, UsageAt { used_by, hour }))
}

fn usage_sum(sum: &UsageSum) -> proto::UsageSum {
    let (name, em) = match &sum.used_by {
        UsageName::Name(application_name, instance) if !instance.is_empty() => {
            let em = proto::EmInstance { application_name: application_name.clone(), instance: instance.clone() };
            (String::new(), Some(em))
        }
        UsageName::Name(name, _) => (name.clone(), None),
        UsageName::Others => (String::new(), None),
    };
    proto::UsageSum {
        name,
        em,
        others: sum.used_by == UsageName::Others,
        hour: sum.hour.map(answer::timestamp),
        tickets: sum.tickets,
        core_seconds: sum.core_seconds,
        byte_seconds: sum.byte_seconds,
        queue_core_seconds: sum.queue_core_seconds,
        queue_byte_seconds: sum.queue_byte_seconds,
    }
}

pub(super) async fn list_users(
    usage: &UsageQueries,
    call: &Request<proto::ListUsersRequest>,
) -> Result<proto::ListUsersResponse, Error> {
    let message = call.get_ref();
    let filters = proto::ListUsersRequest { page_size: 0, page_token: String::new(), ..message.clone() };
    let page = PageRequest::new("ListUsers", message.page_size, &filters)?;
    let after = page.after(&message.page_token, parse_user_key)?;
    let dimension = match message.dimension.as_str() {
        "" => Dimension::Instances,
        key => limit::dimension("dimension", key)?,
    };
    let reach = authenticator::reach(call)?.users();
    let mut found = usage.users(&dimension, reach, after.as_ref(), page.size + 1).await?;
    let more = page.cut(&mut found.users);
    let last = found.users.last().filter(|_| more);
    Ok(proto::ListUsersResponse {
        users: found.users.iter().map(user_use).collect(),
        next_page_token: last.map(|last| page.token(&user_key(last, &dimension))).unwrap_or_default(),
        age: found.age.map(answer::duration),
    })
}

/// Page key of a user: its total in the dimension, and its name, which may contain any separator.
fn user_key((user, sum): &(Name, UserSum), dimension: &Dimension) -> String {
    let total = sum.dimensions.get(dimension).map_or(0, |sum| sum.total());
    format!("{total}.{user}")
}

fn parse_user_key(key: &str) -> Option<UserSumAt> {
    let (total, user) = key.split_once('.')?;
    let total = total.parse().ok().filter(|total| *total > 0)?;
    check_text("page_token", user).ok()?;
    Some(UserSumAt { total, user: user.to_owned() })
}

fn user_use((user, sum): &(Name, UserSum)) -> proto::UserUse {
    let amounts = |sum: &UseSum| proto::UseAmounts { used: sum.used, locked: sum.locked, idle: sum.idle };
    proto::UserUse {
        user: user.to_string(),
        used_tickets: sum.tickets.used,
        locked_tickets: sum.tickets.locked,
        idle_tickets: sum.tickets.idle,
        dimensions: sum.dimensions.iter().map(|(dimension, sum)| (dimension.key(), amounts(sum))).collect(),
    }
}
