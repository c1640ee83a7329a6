//! Objects in arguments, named as a terminal shows them: an EM by the beginning of its name, a ticket by the end of its id.
//!
//! A whole name needs no call. Callers: commands with an EM or a ticket.

use tonic::Code;
use uuid::Uuid;

use rm_client::calls;
use rm_edge::convert::answer;
use rm_model::em::EmInstance;
use rm_proto::v1::{self as proto, ListEmsRequest, ListTicketsRequest, ListWaitingRequest};

use super::{
    error::CommandFailure,
    output::{
        progress,
        text::{self, EM_APPLICATION, parse_name},
    },
    service::ServiceClient,
};

/// Number of elements per page.
const PAGE: i32 = 1000;

/// Maximum number of names in an error.
const LISTED_MAX: usize = 3;

/// Minimum number of characters of the end of a ticket id.
const END_LEAST: usize = 4;

/// An EM of an argument.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmName(proto::EmInstance);

impl EmName {
    /// Parses an EM: `APPLICATION/INSTANCE`, or the instance alone for Linkis's application.
    ///
    /// # Errors
    /// The problem, for an empty or too long name.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = parse_name(text);
        let (application, instance) = text.split_once('/').unwrap_or((EM_APPLICATION, &text));
        let em = EmInstance::parse("EM", application, instance).map_err(|error| error.to_string())?;
        Ok(Self(answer::em_message(&em)))
    }

    /// Returns the EM of this whole name.
    pub fn whole(self) -> proto::EmInstance {
        self.0
    }

    /// Returns the EM. A name without a port can be the beginning of an EM's name, before a dot or a colon.
    ///
    /// # Errors
    /// [`CommandFailure::Refused`] if several EMs have the beginning, or no EM; [`CommandFailure::Service`].
    pub async fn find(&self, service: &ServiceClient) -> Result<proto::EmInstance, CommandFailure> {
        let named = &self.0;
        if named.instance.contains(':') {
            return Ok(named.clone());
        }
        let em_application_name = named.application_name.clone();
        let mut question = ListEmsRequest { page_size: PAGE, em_application_name, ..Default::default() };
        let (mut found, mut similar) = (Vec::new(), Vec::new());
        loop {
            let page = match service.make(&calls::LIST_EMS, &question).await {
                // An EM may name itself, but not list others.
                Err(CommandFailure::Service { error, .. }) if error.code() == Some(Code::PermissionDenied) => {
                    return Ok(named.clone());
                }
                page => page?,
            };
            for em in page.ems.into_iter().filter_map(|em| em.em) {
                match em.instance.strip_prefix(&named.instance) {
                    Some("") => return Ok(em),
                    Some(rest) if rest.starts_with(['.', ':']) => found.push(em),
                    Some(_) => similar.push(em),
                    None => {}
                }
            }
            match page.next_page_token {
                end if end.is_empty() => break,
                token => question.page_token = token,
            }
        }
        let name = text::em(Some(named));
        match (found.as_slice(), similar.as_slice()) {
            ([em], _) => Ok(em.clone()),
            ([], []) => Err(CommandFailure::Refused(format!("there is no EM {name}; linkis-rm em list has all"))),
            ([], similar) => Err(CommandFailure::Refused(format!(
                "there is no EM {name}; {} begin with it: {}",
                similar.len(),
                some(similar)
            ))),
            (found, _) => {
                Err(CommandFailure::Refused(format!("{} EMs are named {name}: {}; name one", found.len(), some(found))))
            }
        }
    }

    /// As [`EmName::find`], and for an unregistered EM its name as it is: the history has former EMs.
    ///
    /// # Errors
    /// [`CommandFailure::Service`].
    pub async fn find_former(&self, service: &ServiceClient) -> Result<proto::EmInstance, CommandFailure> {
        match self.find(service).await {
            Err(CommandFailure::Refused(_)) => Ok(self.0.clone()),
            found => found,
        }
    }
}

/// Finds the EM of an optional argument.
///
/// # Errors
/// As [`EmName::find`].
pub async fn find_em(
    em: Option<&EmName>,
    service: &ServiceClient,
) -> Result<Option<proto::EmInstance>, CommandFailure> {
    match em {
        Some(em) => Ok(Some(em.find(service).await?)),
        None => Ok(None),
    }
}

/// Returns the first EMs, and a mark if there are more.
fn some(ems: &[proto::EmInstance]) -> String {
    let names: Vec<String> = ems.iter().take(LISTED_MAX).map(|em| text::em(Some(em))).collect();
    names.join(" ") + if ems.len() > LISTED_MAX { " ..." } else { "" }
}

/// Returns the id of the live ticket whose id ends in `id`; a whole id as it is.
///
/// # Errors
/// [`CommandFailure::Refused`] if no ticket or several have the end; [`CommandFailure::Service`].
pub async fn find_ticket(id: &str, service: &ServiceClient) -> Result<String, CommandFailure> {
    let page = async |token: String| {
        let question = ListTicketsRequest { page_size: PAGE, page_token: token, ..Default::default() };
        let page = service.make(&calls::LIST_TICKETS, &question).await?;
        let ids: Vec<String> = page.tickets.into_iter().map(|ticket| ticket.ticket_id).collect();
        Ok((ids, page.next_page_token))
    };
    find_by_end(id, ("tickets", "live ticket", "an ended one needs its whole id"), page).await
}

/// Returns the ticket id of the waiting request whose ticket id ends in `id`; a whole id as it is.
///
/// # Errors
/// As of [`find_ticket`].
pub async fn find_waiting(id: &str, service: &ServiceClient) -> Result<String, CommandFailure> {
    let page = async |token: String| {
        let question = ListWaitingRequest { page_size: PAGE, page_token: token, ..Default::default() };
        let page = service.make(&calls::LIST_WAITING, &question).await?;
        let ids: Vec<String> = page.waiting.into_iter().map(|waiting| waiting.ticket_id).collect();
        Ok((ids, page.next_page_token))
    };
    find_by_end(id, ("waiting requests", "waiting request", "`waiting` lists them"), page).await
}

/// Returns the only id of all pages that ends in `id`; a whole id as it is.
async fn find_by_end(
    id: &str,
    (several, one, advice): (&str, &str, &str),
    page: impl AsyncFn(String) -> Result<(Vec<String>, String), CommandFailure>,
) -> Result<String, CommandFailure> {
    let is_end = id.chars().all(|c| c.is_ascii_hexdigit() || c == '-');
    if Uuid::parse_str(id).is_ok() || !is_end {
        return Ok(id.to_owned());
    }
    if id.len() < END_LEAST {
        return Err(CommandFailure::Usage(format!(
            "{id:?} is no ticket id, and too short for the end of one: at least {END_LEAST} characters"
        )));
    }
    let end = id.to_ascii_lowercase();
    progress::shown("looking for the ticket", async {
        let (mut token, mut found) = (String::new(), Vec::<String>::new());
        loop {
            let (ids, next) = page(token).await?;
            found.extend(ids.into_iter().filter(|id| id.ends_with(&end)));
            match found.as_slice() {
                [first, second, ..] => {
                    return Err(CommandFailure::Refused(format!(
                        "several {several} end in {end}: {first}, {second}; type more of the id"
                    )));
                }
                _ if !next.is_empty() => token = next,
                [id] => return Ok(id.clone()),
                [] => return Err(CommandFailure::Refused(format!("there is no {one} that ends in {end}; {advice}"))),
            }
        }
    })
    .await
}
