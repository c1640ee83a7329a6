//! `ListEms`: EMs by name, or in an order of the overview.
//!
//! Caller: `UsageService`.

use std::cmp::Reverse;

use tonic::Request;

use crate::convert;
use rm_model::{
    em::{Em, EmInstance},
    em_order::EmPlace,
    report::EmStatus,
};
use rm_proto::page::PageRequest;
use rm_proto::v1 as proto;
use rm_service::{error::Error, overview::OverviewService, usage::UsageQueries};

use super::filters;

/// Converts an EM and its status.
pub(super) fn em_message(em: &Em, status: Option<&EmStatus>) -> Result<proto::EmResource, Error> {
    convert::answer::em_resource(em, status).map_err(Error::defect)
}

/// Page key of an EM: its names as JSON, because a name may contain any separator.
fn em_key(em: &EmInstance) -> String {
    serde_json::json!([em.application_name.as_str(), em.instance.as_str()]).to_string()
}

fn parse_em_key(key: &str) -> Option<EmInstance> {
    let (application_name, instance): (String, String) = serde_json::from_str(key).ok()?;
    EmInstance::parse("page_token", &application_name, &instance).ok()
}

/// Page key of an EM in an order: its place as JSON.
fn place_key(place: &EmPlace) -> String {
    let em = &place.em;
    serde_json::json!([place.urgency.0, place.percent.0, em.application_name.as_str(), em.instance.as_str()])
        .to_string()
}

fn parse_place_key(key: &str) -> Option<EmPlace> {
    let (urgency, percent, application_name, instance): (u8, u8, String, String) = serde_json::from_str(key).ok()?;
    let em = EmInstance::parse("page_token", &application_name, &instance).ok()?;
    Some(EmPlace { urgency: Reverse(urgency), percent: Reverse(percent), em })
}

pub(super) async fn list_ems(
    usage: &UsageQueries,
    overviews: &OverviewService,
    call: &Request<proto::ListEmsRequest>,
) -> Result<proto::ListEmsResponse, Error> {
    let message = call.get_ref();
    let filters = proto::ListEmsRequest { page_size: 0, page_token: String::new(), ..message.clone() };
    let page = PageRequest::new("ListEms", message.page_size, &filters)?;
    let (filter, min_fullness) = filters::ems(message)?;
    let order = convert::enumeration::known::<proto::EmOrder>("order", message.order)?.read();
    let (shown, next) = match order {
        None => {
            let after = page.after(&message.page_token, parse_em_key)?;
            let ems = usage.ems(&filter, min_fullness, after.as_ref(), page.entries_max()).await?;
            (ems.shown, ems.next.map(|em| em_key(&em)))
        }
        Some(order) => {
            let after = page.after(&message.page_token, parse_place_key)?;
            let snapshot = overviews.current().await?;
            let (by, matching) = ((order, &snapshot.overview), (&filter, min_fullness));
            let ems = usage.ems_in_order(by, matching, after.as_ref(), page.entries_max()).await?;
            (ems.shown, ems.next.map(|place| place_key(&place)))
        }
    };
    let ems = shown.iter().map(|(em, status)| em_message(em, status.as_ref())).collect::<Result<_, _>>()?;
    Ok(proto::ListEmsResponse { ems, next_page_token: next.map(|key| page.token(&key)).unwrap_or_default() })
}
