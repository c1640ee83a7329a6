//! Names from the service that continue a line: one page of one call, within a second. A service that does not reply has none.

use std::{collections::BTreeSet, time::Duration};

use clap::{Args as _, Command, FromArgMatches as _};

use rm_client::calls;
use rm_model::external::YARN;
use rm_proto::v1::{
    ListEmsRequest, ListLimitsRequest, ListProvidersRequest, ListQueuesRequest, ListScopesRequest, ListTicketsRequest,
    ListUsersRequest, ProviderSelector,
};

use super::words::{Cursor, NameKind, Word};
use crate::commands::{
    error::CommandFailure,
    limits,
    output::{table, text},
    service::{EndpointArguments, ServiceClient},
};

/// Maximum time of a call: the shell waits.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Number of elements in the page.
const PAGE: i32 = 1000;

/// Number of characters of a ticket id that tables show.
const TICKET_END: usize = 8;

/// Names of the service that begin with the typed characters.
pub async fn of(kind: NameKind, typed: &str, cursor: &Cursor<'_>) -> Vec<Word> {
    let found = async {
        let service = endpoint(cursor)?.connect_once(TIMEOUT)?;
        list(kind, cursor, &service).await
    };
    match tokio::time::timeout(TIMEOUT, found).await {
        Ok(Ok(names)) => names.into_iter().filter_map(|name| name.word(typed)).collect(),
        // The shell shows no errors.
        Ok(Err(_)) | Err(_) => Vec::new(),
    }
}

/// Returns the connection that the options before the cursor and the environment name.
fn endpoint(cursor: &Cursor<'_>) -> Result<EndpointArguments, CommandFailure> {
    let grammar = EndpointArguments::augment_args(Command::new("endpoint").no_binary_name(true));
    let is_known = |long: &str| grammar.get_arguments().any(|option| option.get_long() == Some(long));
    let given = cursor.given().iter().filter_map(|(option, value)| Some((option.get_long()?, value)));
    let words: Vec<String> =
        given.filter(|(long, _)| is_known(long)).map(|(long, value)| format!("--{long}={value}")).collect();
    let matches = grammar.clone().try_get_matches_from(words);
    let endpoint = matches.and_then(|matches| EndpointArguments::from_arg_matches(&matches));
    endpoint.map_err(|error| CommandFailure::Usage(error.to_string()))
}

/// A name in its forms: the first that continues the typed characters is used.
struct Name {
    forms: Vec<String>,
    about: String,
}

impl Name {
    /// Creates a name as tables print it, without the quotes.
    fn new(name: &str) -> Self {
        Self { forms: vec![bare(name)], about: String::new() }
    }

    fn word(self, typed: &str) -> Option<Word> {
        let text = self.forms.into_iter().find(|form| form.starts_with(typed))?;
        Some(Word { text, about: self.about })
    }
}

/// Removes the quotes of a printed name.
fn bare(name: &str) -> String {
    name.strip_prefix('"').and_then(|name| name.strip_suffix('"')).unwrap_or(name).to_owned()
}

async fn list(kind: NameKind, cursor: &Cursor<'_>, service: &ServiceClient) -> Result<Vec<Name>, CommandFailure> {
    let page_size = PAGE;
    Ok(match kind {
        NameKind::Em => {
            let page = service.make(&calls::LIST_EMS, &ListEmsRequest { page_size, ..Default::default() }).await?;
            let names: BTreeSet<String> = page.ems.iter().map(|em| text::em(em.em.as_ref())).collect();
            // As a terminal shows them: without the end that all share.
            let shared = table::shared_end(&names);
            let short = |name: &str| bare(name.strip_suffix(shared).unwrap_or(name));
            names.iter().map(|name| Name { forms: vec![short(name), bare(name)], about: String::new() }).collect()
        }
        NameKind::User => {
            let question = ListUsersRequest { page_size, ..Default::default() };
            let page = service.make(&calls::LIST_USERS, &question).await?;
            page.users.iter().map(|user| Name::new(&text::name(&user.user))).collect()
        }
        NameKind::Ticket => {
            let question = ListTicketsRequest { page_size, ..Default::default() };
            let page = service.make(&calls::LIST_TICKETS, &question).await?;
            let name = |id: String, about: String| {
                let end = id.get(id.len().saturating_sub(TICKET_END)..).unwrap_or(&id).to_owned();
                Name { forms: vec![end, id], about }
            };
            let about = |user: &str, em: String| format!("{} on {em}", text::name(user));
            page.tickets
                .into_iter()
                .map(|ticket| name(ticket.ticket_id, about(&ticket.user, text::em(ticket.em.as_ref()))))
                .collect()
        }
        NameKind::Limit => {
            let question = ListLimitsRequest { page_size, ..Default::default() };
            let page = service.make(&calls::LIST_LIMITS, &question).await?;
            page.limits.iter().map(|limit| Name::new(&limits::name(limit))).collect()
        }
        NameKind::Scope => {
            let question = ListScopesRequest { page_size, ..Default::default() };
            let page = service.make(&calls::LIST_SCOPES, &question).await?;
            page.scopes.iter().map(|scope| Name::new(&text::labels(&scope.labels))).collect()
        }
        NameKind::Queue => {
            let of = |id: &str| cursor.value(id).unwrap_or_default().to_owned();
            let resource_type = cursor.value("resource_type").unwrap_or(YARN).to_owned();
            let provider = Some(ProviderSelector { resource_type, name: of("provider"), ..Default::default() });
            let question = ListQueuesRequest { provider, page_size, ..Default::default() };
            let page = service.make(&calls::LIST_QUEUES, &question).await?;
            page.queues.iter().map(|queue| Name::new(&text::name(&queue.path))).collect()
        }
        NameKind::Provider => {
            let page = service.make(&calls::LIST_PROVIDERS, &ListProvidersRequest {}).await?;
            page.providers.iter().map(|provider| Name::new(&text::name(&provider.name))).collect()
        }
    })
}
