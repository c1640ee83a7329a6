//! Filters of `UsageService`: parses the selection of each list and limits it to the call scope.
//!
//! A parser fails with a [`FieldError`] that names the field. Caller: `UsageService`.

use std::collections::BTreeSet;

use prost_types::Timestamp;
use time::OffsetDateTime;

use crate::convert;
use rm_model::{
    access::{CallScope, Denied},
    action::Action,
    name::{FieldError, Labels, Name},
    scope::{Scope, USER},
    wait_queue::WaitKey,
};
use rm_proto::v1 as proto;
use rm_service::limits::ScopeFilter;
use rm_service::usage::{ActionFilter, EmFilter, TicketFilter, WaitingFilter};

/// Maximum number of actions that one call may name.
const ACTIONS_MAX: usize = Action::ALL.len();

/// Returns the users of a call that names `user` or none; `None` selects all users. A user outside the call scope
/// selects nothing, as a user without objects does.
pub(super) fn users(user: &str, reach: &CallScope) -> Result<Option<BTreeSet<Name>>, FieldError> {
    if user.is_empty() {
        return Ok(reach.users().cloned());
    }
    let user = Name::parse("user", user)?;
    Ok(Some([user].into_iter().filter(|user| reach.has_user(user)).collect()))
}

/// Parses a time in `field`. The database stores times since 1970 only.
pub(super) fn moment(field: &str, timestamp: Option<Timestamp>) -> Result<Option<OffsetDateTime>, FieldError> {
    let Some(timestamp) = timestamp else { return Ok(None) };
    let time = convert::answer::time(timestamp).filter(|time| *time >= OffsetDateTime::UNIX_EPOCH);
    time.map(Some).ok_or_else(|| FieldError::new(field, "must be between the years 1970 and 9999"))
}

/// Parses the filter of tickets.
pub fn tickets(message: &proto::ListTicketsRequest, reach: &CallScope) -> Result<TicketFilter, FieldError> {
    Ok(TicketFilter {
        em: message.em.clone().map(|em| convert::request::em_instance("em", Some(em))).transpose()?,
        users: users(&message.user, reach)?,
        is_bound: !reach.is_all(),
        locked: match message.state.as_str() {
            "" => None,
            "locked" => Some(true),
            "used" => Some(false),
            _ => return Err(FieldError::new("state", "must be \"locked\", \"used\" or empty")),
        },
        engine: message
            .engine
            .clone()
            .map(|engine| convert::request::engine_instance("engine", Some(engine)))
            .transpose()?,
        idle_for: message.idle_for.map(|time| convert::request::duration("idle_for", time)).transpose()?,
    })
}

/// Parses the filter of EMs, and the minimum fullness in percent.
pub fn ems(message: &proto::ListEmsRequest) -> Result<(EmFilter, u8), FieldError> {
    let health = convert::enumeration::known::<proto::Health>("health", message.health)?.read();
    let percent = u8::try_from(message.min_fullness_percent).ok().filter(|percent| *percent <= 100);
    let percent = percent.ok_or_else(|| FieldError::new("min_fullness_percent", "must be 0 to 100"))?;
    let application_name = Name::parse_optional("em_application_name", &message.em_application_name)?;
    let labels = Labels::parse("labels", message.labels.clone())?;
    let (silent, draining) = (message.silent, message.draining);
    Ok((EmFilter { application_name, labels, health, silent, draining }, percent))
}

/// Parses the filter of scopes.
pub fn scopes(message: &proto::ListScopesRequest, reach: &CallScope) -> Result<ScopeFilter, FieldError> {
    convert::limit::scope_labels("labels", &message.labels)?;
    let named = message.labels.get(USER).filter(|user| !user.is_empty());
    let users = users(named.map_or("", String::as_str), reach)?;
    Ok(ScopeFilter { users, labels: message.labels.clone() })
}

/// Checks that the call scope covers `scope`.
///
/// # Errors
/// [`Denied`] if it does not.
pub fn check_scope(scope: &Scope, reach: &CallScope) -> Result<(), Denied> {
    match reach.has_scope(scope) {
        true => Ok(()),
        false => Err(reach.denied(|| format!("a scope of one of its users, not {scope}"))),
    }
}

/// Parses the filter of waiting requests.
pub fn waiting(message: &proto::ListWaitingRequest, reach: &CallScope) -> Result<WaitingFilter, FieldError> {
    let em = message.em.clone().map(|em| convert::request::em_instance("em", Some(em))).transpose()?;
    convert::limit::scope_labels("scope", &message.scope)?;
    let scope = Some(&message.scope).filter(|labels| !labels.is_empty());
    let scope = scope.map(|labels| WaitKey::Scope(Scope::new(labels.clone())));
    let keys = em.map(WaitKey::Em).into_iter().chain(scope).collect();
    Ok(WaitingFilter { users: users(&message.user, reach)?, wait_keys: keys })
}

/// Parses the filter of history lines. Only operators get lines about tokens and providers.
pub fn actions(
    message: &proto::ListActionsRequest,
    reach: &CallScope,
    is_of_operator: bool,
) -> Result<ActionFilter, FieldError> {
    if message.actions.len() > ACTIONS_MAX {
        let problem = format!("names {}; at most {ACTIONS_MAX} are allowed", message.actions.len());
        return Err(FieldError::new("actions", problem));
    }
    let action = |(number, text): (usize, &String)| {
        let action = Action::parse(text).map(Action::as_str);
        action.ok_or_else(|| {
            let known = Action::ALL.map(Action::as_str).join(", ");
            FieldError::new(
                format!("actions[{number}]"),
                format!("is {text:?}, which is not an action; known are {known}"),
            )
        })
    };
    Ok(ActionFilter {
        ticket_id: match message.ticket_id.as_str() {
            "" => None,
            id => Some(convert::request::ticket_id("ticket_id", id)?),
        },
        users: users(&message.user, reach)?,
        em: message.em.clone().map(|em| convert::request::em_instance("em", Some(em))).transpose()?,
        actions: message.actions.iter().enumerate().map(action).collect::<Result<_, _>>()?,
        actor: Name::parse_optional("actor", &message.actor)?,
        from: moment("from_time", message.from_time)?,
        to: moment("to_time", message.to_time)?,
        objects: is_of_operator,
    })
}
