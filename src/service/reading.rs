//! What requests are judged by is read in one way, for a look and for a commit.

use std::collections::{HashMap, HashSet};

use sqlx::PgConnection;
use uuid::Uuid;

use crate::{
    domain::{
        judgement,
        ledger::LineView,
        limit::Limits,
        line::{Extent, Line, viewed_spots},
        name::Name,
        operation::{Request, RequestRecord},
        ticket::EndedTicket,
    },
    store::{StoreError, action_record, request_id, waiting},
};

/// The request ids among those of `requests` that were used, and what was granted under them and is over.
pub(super) async fn request_ids(
    connection: &mut PgConnection,
    requests: &[&Request],
) -> Result<(HashMap<Name, RequestRecord>, HashMap<Uuid, EndedTicket>), StoreError> {
    let ids: HashSet<&Name> =
        requests.iter().filter_map(|request| Some(&request.ask.request_id.as_ref()?.id)).collect();
    if ids.is_empty() {
        return Ok((HashMap::new(), HashMap::new()));
    }
    let used = request_id::read(&mut *connection, &ids).await?;
    if used.is_empty() {
        return Ok((used, HashMap::new()));
    }
    let granted: Vec<Uuid> = used.values().map(|record| record.grant.ticket_id).collect();
    let ended = action_record::read(&mut *connection, &granted).await?;
    Ok((used, ended))
}

/// Who waits where `requests` are judged, and wherever those among them stand that are in line themselves.
pub(super) async fn line(
    connection: &mut PgConnection,
    requests: &[&Request],
    limits: &Limits,
) -> Result<LineView, StoreError> {
    let spots = viewed_spots(requests.iter().flat_map(|request| {
        let extent = Extent::of(request.position());
        judgement::spots(request, limits).map(move |spot| (spot, extent))
    }));
    let in_line: Vec<Uuid> =
        requests.iter().filter_map(|request| request.position()).map(|position| position.ticket_id()).collect();
    let line = match spots.is_empty() {
        true => Line::default(),
        false => waiting::line(connection, &spots, &in_line).await?,
    };
    Ok(LineView { line, spots: Some(spots) })
}
