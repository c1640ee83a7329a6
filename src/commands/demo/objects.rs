//! Creation and removal of the demo's EMs and limits.

use tonic::Code;

use crate::commands::error::CommandFailure;
use rm_client::calls;
use rm_proto::v1::{
    DeleteLimitRequest, EmInstance, ListEmsRequest, RegisterRequest, ResumeRequest, SetLimitRequest, UnregisterRequest,
};

use super::{
    cluster::{APPLICATION, DemoEm, limits},
    pace::PacedClient,
};

const REASON: &str = "end of the demo";

/// One registered EM of the demo.
#[derive(Debug, Clone)]
pub struct RegisteredEm {
    /// Name of the EM.
    pub instance: EmInstance,
    /// Epoch of its registration.
    pub epoch: i64,
}

/// Objects that [`remove`] removed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RemovedObjects {
    /// Number of EMs.
    pub ems: usize,
    /// Number of limits.
    pub limits: usize,
}

/// Checks that no EM is registered.
///
/// # Errors
/// [`CommandFailure::Refused`] if one is; [`CommandFailure::Service`].
pub async fn check_absent(client: &PacedClient) -> Result<(), CommandFailure> {
    let mut page_token = String::new();
    let mut demo_ems = 0;
    loop {
        let request = ListEmsRequest { page_size: 1000, page_token, ..Default::default() };
        let page = client.make(&calls::LIST_EMS, &request).await?;
        let names = page.ems.into_iter().filter_map(|em| em.em);
        for em in names {
            if em.application_name != APPLICATION {
                return Err(CommandFailure::Refused(format!(
                    "EM {}/{} is registered at {}; the demo runs only where no other EM is, so that no request of the demo uses it",
                    em.application_name,
                    em.instance,
                    client.address(),
                )));
            }
            demo_ems += 1;
        }
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    if demo_ems == 0 {
        return Ok(());
    }
    Err(CommandFailure::Refused(format!(
        "{demo_ems} EMs of a demo are registered at {}: another demo runs, or one was killed; remove them with: linkis-rm demo --clean",
        client.address(),
    )))
}

/// Sets the limits and registers the EMs of the demo.
///
/// # Errors
/// [`CommandFailure::Service`]; objects made before then remain.
pub async fn create(client: &PacedClient) -> Result<Vec<RegisteredEm>, CommandFailure> {
    for limit in limits() {
        client.make(&calls::SET_LIMIT, &SetLimitRequest { limit: Some(limit), ..Default::default() }).await?;
    }
    let mut registered = Vec::new();
    for em in DemoEm::all() {
        let request = RegisterRequest {
            em: Some(em.instance()),
            total: Some(em.total()),
            labels: [("zone".to_owned(), em.zone().to_owned())].into(),
            ..Default::default()
        };
        let reply = client.make(&calls::REGISTER, &request).await?;
        let epoch = reply.em.unwrap_or_default().epoch;
        registered.push(RegisteredEm { instance: em.instance(), epoch });
    }
    Ok(registered)
}

/// Removes all objects of a demo, also those that a killed demo left.
///
/// # Errors
/// [`CommandFailure::Service`]; the rest remains, and can be removed by another call.
pub async fn remove(client: &PacedClient) -> Result<RemovedObjects, CommandFailure> {
    let mut removed = RemovedObjects::default();
    for em in DemoEm::all() {
        // A drain outlives its EM.
        let resume = ResumeRequest { em: Some(em.instance()), reason: REASON.to_owned() };
        found(client.make(&calls::RESUME, &resume).await)?;
        let unregister = UnregisterRequest { em: Some(em.instance()), epoch: 0 };
        removed.ems += usize::from(found(client.make(&calls::UNREGISTER, &unregister).await)?);
    }
    for limit in limits() {
        let delete = DeleteLimitRequest { limit: Some(limit), expected_etag: None, reason: REASON.to_owned() };
        removed.limits += usize::from(found(client.make(&calls::DELETE_LIMIT, &delete).await)?);
    }
    Ok(removed)
}

/// Returns whether the object existed.
fn found<T>(reply: Result<T, CommandFailure>) -> Result<bool, CommandFailure> {
    match reply {
        Ok(_) => Ok(true),
        Err(CommandFailure::Service { error, .. }) if error.code() == Some(Code::NotFound) => Ok(false),
        Err(failure) => Err(failure),
    }
}
