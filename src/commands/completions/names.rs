//! Names from the service that continue a line: pages of one call, within a second. A service that does not reply has none.
//! Callers: `completions`.

use std::{collections::BTreeSet, time::Duration};

use clap::{Args as _, Command, FromArgMatches as _};

use rm_model::external::YARN;
use rm_proto::v1::{
    EmInstance, ListEmsRequest, ListLimitsRequest, ListProvidersRequest, ListQueuesRequest, ListScopesRequest,
    ListTicketsRequest, ListUsersRequest, ListWaitingRequest, ProviderSelector,
};

use super::{
    WORDS_MAX,
    words::{Cursor, NameKind, Word},
};
use crate::commands::{
    error::CommandFailure,
    limits,
    list::ListCall,
    output::{table, text},
    service::{EndpointArguments, ServiceClient},
};

/// Maximum time of all pages: the shell waits.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Number of elements in a page.
const PAGE: i32 = 1000;

/// Maximum number of pages.
const PAGES_MAX: usize = 20;

/// Number of characters of a ticket id that tables show.
const TICKET_END: usize = 8;

/// Names of the service that begin with the typed characters, among those that were read in time.
pub async fn of(kind: NameKind, typed: &str, cursor: &Cursor<'_>) -> Vec<Word> {
    let mut found = Vec::new();
    let names = async {
        let service = endpoint(cursor)?.connect_once(TIMEOUT)?;
        read(kind, cursor, &service, &mut found).await
    };
    // The shell shows no errors.
    let _ = tokio::time::timeout(TIMEOUT, names).await;
    if kind == NameKind::Em {
        shorten(&mut found);
    }
    found.into_iter().filter_map(|name| name.word(typed)).collect()
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

/// Reads the names of a kind, until those that begin with the typed characters fill a reply.
async fn read(
    kind: NameKind,
    cursor: &Cursor<'_>,
    service: &ServiceClient,
    found: &mut Vec<Name>,
) -> Result<(), CommandFailure> {
    let pages = Pages { service, typed: cursor.typed(), found };
    match kind {
        NameKind::Em => pages.read(ListEmsRequest::default(), |em| Name::new(&text::em(em.em.as_ref()))).await,
        NameKind::User => pages.read(ListUsersRequest::default(), |user| Name::new(&text::name(&user.user))).await,
        NameKind::Ticket => {
            pages.read(ListTicketsRequest::default(), |t| ticket(&t.ticket_id, &t.user, t.em.as_ref())).await
        }
        NameKind::Waiting => {
            pages.read(ListWaitingRequest::default(), |w| ticket(&w.ticket_id, &w.user, w.em.as_ref())).await
        }
        NameKind::Limit => pages.read(ListLimitsRequest::default(), |limit| Name::new(&limits::name(limit))).await,
        NameKind::Scope => {
            pages.read(ListScopesRequest::default(), |scope| Name::new(&text::labels(&scope.labels))).await
        }
        NameKind::Queue => {
            let of = |id: &str| cursor.value(id).unwrap_or_default().to_owned();
            let resource_type = cursor.value("resource_type").unwrap_or(YARN).to_owned();
            let provider = Some(ProviderSelector { resource_type, name: of("provider"), ..Default::default() });
            let question = ListQueuesRequest { provider, ..Default::default() };
            pages.read(question, |queue| Name::new(&text::name(&queue.path))).await
        }
        NameKind::Provider => {
            pages.read(ListProvidersRequest {}, |provider| Name::new(&text::name(&provider.name))).await
        }
    }
}

/// Pages of one list.
struct Pages<'p> {
    service: &'p ServiceClient,
    typed: &'p str,
    found: &'p mut Vec<Name>,
}

impl Pages<'_> {
    async fn read<Q: ListCall>(self, mut question: Q, name: fn(&Q::Item) -> Name) -> Result<(), CommandFailure> {
        let (mut token, mut matching) = (String::new(), 0);
        for _ in 0..PAGES_MAX {
            question.turn(PAGE, token);
            let mut page = self.service.make(&Q::CALL, &question).await?;
            let (items, next) = Q::take(&mut page);
            let names: Vec<Name> = items.iter().map(name).collect();
            matching += names.iter().filter(|name| name.forms.iter().any(|form| form.starts_with(self.typed))).count();
            self.found.extend(names);
            if matching >= WORDS_MAX || next.is_empty() {
                break;
            }
            token = next;
        }
        Ok(())
    }
}

/// Puts the form of a terminal before each name: without the end that all share.
fn shorten(names: &mut [Name]) {
    let all: BTreeSet<String> = names.iter().flat_map(|name| name.forms.clone()).collect();
    let shared = table::shared_end(&all);
    for name in names {
        let short: Vec<_> = name.forms.iter().filter_map(|form| form.strip_suffix(shared)).map(str::to_owned).collect();
        name.forms.splice(0..0, short);
    }
}

fn ticket(id: &str, user: &str, em: Option<&EmInstance>) -> Name {
    let end = id.get(id.len().saturating_sub(TICKET_END)..).unwrap_or(id).to_owned();
    Name { forms: vec![end, id.to_owned()], about: format!("{} on {}", text::name(user), text::em(em)) }
}
