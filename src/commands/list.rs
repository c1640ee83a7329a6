//! Paged lists: fetched and printed one page at a time, so that memory does not grow with the length.
//!
//! A command implements [`ListCall`] for its request by the macro `listed!`, and calls [`ListArguments::list`].
//! Callers: all commands that list.

use std::cell::Cell;

use clap::Args;
use prost::Message;

use rm_client::ApiCall;

use super::{
    error::{CommandFailure, CommandReply},
    output::{
        Format, Printer, json, progress,
        table::{Column, TableRow},
    },
    service::{ServiceClient, TIMEOUT},
    service_arguments::PollArguments,
};

/// Number of elements per page.
const PAGE: u64 = 1000;

/// Maximum number of consecutive empty pages: in the history, six million lines that do not match.
const EMPTY_PAGES_MAX: u64 = 2000;

/// A list call with the conversions that commands need.
pub trait ListCall: Message + Default + Clone + 'static {
    /// Reply of the call.
    type Answer: Message + Default + 'static;
    /// Element of the list.
    type Item: Message;

    /// The call.
    const CALL: ApiCall<Self, Self::Answer>;
    /// Name of the reply field with the list.
    const FIELD: &'static str;
    /// Columns of the table.
    const COLUMNS: &'static [Column];

    /// Sets the page size and the page token of the request.
    fn turn(&mut self, page_size: i32, page_token: String);

    /// Takes the elements and the next page token out of a reply; the token is empty after the last page.
    fn take(answer: &mut Self::Answer) -> (Vec<Self::Item>, String);

    /// Returns the table rows of an element.
    fn rows(item: &Self::Item) -> Vec<TableRow>;
}

/// Implements [`ListCall`] for a call, with its columns and a function that creates rows.
macro_rules! listed {
    ($call:ident: $question:ty => $answer:ty, $field:ident: $item:ty, $columns:expr, $rows:expr) => {
        listed!(@ $call, $question, $answer, $field, $item, $columns, $rows,
            (|question: &mut $question, size, token| (question.page_size, question.page_token) = (size, token)),
            (|answer: &mut $answer| answer.next_page_token.clone()));
    };
    // A list without pages.
    (whole $call:ident: $question:ty => $answer:ty, $field:ident: $item:ty, $columns:expr, $rows:expr) => {
        listed!(@ $call, $question, $answer, $field, $item, $columns, $rows, (|_, _, _| ()), (|_| String::new()));
    };
    (@ $call:ident, $question:ty, $answer:ty, $field:ident, $item:ty, $columns:expr, $rows:expr, $turn:expr, $next:expr) => {
        impl $crate::commands::list::ListCall for $question {
            type Answer = $answer;
            type Item = $item;

            const CALL: rm_client::ApiCall<Self, $answer> = rm_client::calls::$call;
            const FIELD: &'static str = stringify!($field);
            const COLUMNS: &'static [$crate::commands::output::table::Column] = $columns;

            fn turn(&mut self, page_size: i32, page_token: String) {
                let turn: fn(&mut $question, i32, String) = $turn;
                turn(self, page_size, page_token);
            }

            fn take(answer: &mut $answer) -> (Vec<$item>, String) {
                let next: fn(&mut $answer) -> String = $next;
                (std::mem::take(&mut answer.$field), next(answer))
            }

            fn rows(item: &$item) -> Vec<$crate::commands::output::table::TableRow> {
                let rows: fn(&$item) -> Vec<$crate::commands::output::table::TableRow> = $rows;
                rows(item)
            }
        }
    };
}
pub(super) use listed;

/// Arguments of list commands: connection, output, `--watch` and `--limit`.
#[derive(Debug, Clone, Args)]
pub struct ListArguments {
    #[command(flatten)]
    pub watching: PollArguments,

    /// Maximum number of rows [default: all].
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
    pub limit: Option<u64>,
}

impl ListArguments {
    /// Returns a client of the service, for calls before the list.
    ///
    /// # Errors
    /// [`CommandFailure::Service`] if the address or a credential is not usable.
    pub fn service(&self) -> Result<ServiceClient, CommandFailure> {
        self.watching.arguments().service(TIMEOUT)
    }

    /// Prints the list.
    pub async fn list<Q: ListCall>(&self, question: Q) -> Result<CommandReply, CommandFailure> {
        let round = async |service: &ServiceClient, printer: &mut Printer| {
            let seen = printer.rows_max().map(|rows| u64::try_from(rows).unwrap_or(u64::MAX));
            let limit = self.limit.unwrap_or(u64::MAX).min(seen.unwrap_or(u64::MAX));
            list(service, question.clone(), printer, limit).await
        };
        self.watching.rounds(TIMEOUT, round).await?;
        Ok(CommandReply::Yes)
    }
}

/// Prints at most `limit` elements.
async fn list<Q: ListCall>(
    service: &ServiceClient,
    question: Q,
    printer: &mut Printer,
    limit: u64,
) -> Result<(), CommandFailure> {
    match printer.format() {
        Format::Table | Format::Wide => {
            let (mut table, mut count) = (printer.table(Q::COLUMNS), 0);
            let last = pages(service, question, printer, limit, |printer, items| {
                let rows: Vec<TableRow> = items.iter().flat_map(Q::rows).collect();
                count += items.len();
                printer.print(&table.rows(&rows))
            })
            .await?;
            // Prints the headers of an empty list.
            let headers = table.rows(&[]);
            printer.print(&headers)?;
            let is_whole = last.is_last;
            let noun = noun(Q::FIELD, count);
            let more = if is_whole { "" } else { ", and more" };
            printer.note(&format!("{count} {noun}{more}.{}", table.notes()));
            Ok(())
        }
        Format::Jsonl => {
            let item = json::items_of(&json::answer_of(&Q::CALL)?, Q::FIELD)?;
            let lines = |printer: &mut Printer, items: &[Q::Item]| {
                let lines: Result<Vec<_>, _> = items.iter().map(|each| Ok(json::line(&item, each)? + "\n")).collect();
                lines.and_then(|lines| printer.print(&lines.concat()))
            };
            pages(service, question, printer, limit, lines).await?;
            Ok(())
        }
        Format::Json => document(service, question, printer, limit).await,
    }
}

/// Returns the noun of a counted list by the name of its field.
fn noun(field: &str, count: usize) -> String {
    match (field, count) {
        ("ems", 1) => "EM".to_owned(),
        ("ems", _) => "EMs".to_owned(),
        (field, 1) => match field.strip_suffix("ies") {
            Some(stem) => format!("{stem}y"),
            None => field.strip_suffix('s').unwrap_or(field).to_owned(),
        },
        (field, _) => field.to_owned(),
    }
}

/// Prints one message of the API with the elements of all pages. Its other fields are those of the last page.
async fn document<Q: ListCall>(
    service: &ServiceClient,
    question: Q,
    printer: &mut Printer,
    limit: u64,
) -> Result<(), CommandFailure> {
    let answer = json::answer_of(&Q::CALL)?;
    let item = json::items_of(&answer, Q::FIELD)?;
    let head = format!("{{\n  \"{}\": [", Q::FIELD);
    let mut is_first = true;
    let last = pages(service, question, printer, limit, |printer, items| {
        // Prints nothing before the first reply, which may be an error.
        let mut text = if is_first { head.clone() } else { String::new() };
        for each in items {
            text.push_str(if is_first { "\n    " } else { ",\n    " });
            text.push_str(&json::pretty(&item, each, 4)?);
            is_first = false;
        }
        printer.print(&text)
    })
    .await?;
    let mut end = if is_first { head + "]" } else { "\n  ]".to_owned() };
    for (field, value) in json::fields_beside(&answer, &last.reply, Q::FIELD)? {
        end.push_str(&format!(",\n  \"{field}\": {value}"));
    }
    printer.print(&(end + "\n}\n"))
}

/// Last page that was fetched.
struct LastPage<A> {
    /// The reply without its elements.
    reply: A,
    /// Whether the list ends with it.
    is_last: bool,
}

/// Fetches pages up to `limit` elements, until the output is closed. Returns the last page.
async fn pages<Q: ListCall>(
    service: &ServiceClient,
    mut question: Q,
    printer: &mut Printer,
    limit: u64,
    mut print: impl FnMut(&mut Printer, &[Q::Item]) -> Result<(), CommandFailure>,
) -> Result<LastPage<Q::Answer>, CommandFailure> {
    let (mut left, mut token) = (limit, String::new());
    loop {
        let size = i32::try_from(left.min(PAGE)).unwrap_or(i32::MAX);
        let (answer, mut items, next) = next_page(service, &mut question, size, token).await?;
        // A list without pages ignores the page size.
        items.truncate(usize::try_from(left).unwrap_or(usize::MAX));
        left -= u64::try_from(items.len()).unwrap_or(left).min(left);
        if !items.is_empty() {
            print(printer, &items)?;
        }
        if next.is_empty() || left == 0 || printer.is_closed() {
            return Ok(LastPage { reply: answer, is_last: next.is_empty() });
        }
        token = next;
    }
}

/// A page: reply without its elements, elements, and next page token.
type ListPage<Q> = (<Q as ListCall>::Answer, Vec<<Q as ListCall>::Item>, String);

/// Fetches the next page with elements, or the last page. Empty pages can precede further ones; a terminal shows their
/// number.
async fn next_page<Q: ListCall>(
    service: &ServiceClient,
    question: &mut Q,
    size: i32,
    mut token: String,
) -> Result<ListPage<Q>, CommandFailure> {
    let empty = Cell::new(0_u64);
    let pages = async {
        loop {
            question.turn(size, token);
            let mut answer = service.make(&Q::CALL, question).await?;
            let (items, next) = Q::take(&mut answer);
            if !items.is_empty() || next.is_empty() {
                return Ok((answer, items, next));
            }
            empty.set(empty.get() + 1);
            if empty.get() >= EMPTY_PAGES_MAX {
                return Err(CommandFailure::NotFound { pages: EMPTY_PAGES_MAX });
            }
            token = next;
        }
    };
    let so_far = || (empty.get() > 0).then(|| format!("{} pages read without a match", empty.get()));
    progress::shown_with(so_far, pages).await
}
