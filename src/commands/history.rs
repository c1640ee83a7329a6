//! `history`: actions with their actors and reasons.

use clap::Args;

use rm_client::calls;
use rm_proto::v1::{Action, EmInstance, ListActionsRequest, ListActionsResponse};

use super::{
    error::{CommandFailure, CommandReply},
    list::{ListArguments, listed},
    named::{EmName, find_ticket},
    output::{
        Format,
        json::{self, SchemaError},
        table::{Column, TableRow, cells},
        text,
    },
    service::ServiceClient,
    service_arguments::TimeRange,
    values,
};

/// Arguments of `history`.
#[derive(Debug, Clone, Args)]
pub struct HistoryCommand {
    /// Only changes of this ticket.
    #[arg(long, value_name = "TICKET")]
    ticket: Option<String>,

    /// Only changes of tickets of this user.
    #[arg(long, value_parser = values::name)]
    user: Option<String>,

    /// Only changes of this EM and its tickets: APPLICATION/INSTANCE, or for a linkis-cg-engineconnmanager its instance, also without its end.
    #[arg(long, value_parser = EmName::parse)]
    em: Option<EmName>,

    /// Only this action, such as granted, expired or drained. Repeatable.
    #[arg(long = "action", value_name = "ACTION")]
    actions: Vec<String>,

    /// Only changes by this actor.
    #[arg(long, value_name = "NAME", value_parser = values::name)]
    actor: Option<String>,

    #[command(flatten)]
    period: TimeRange,

    /// Newest first.
    #[arg(long)]
    newest: bool,

    /// Print new lines as they are written, until the command is interrupted.
    #[arg(long, conflicts_with_all = ["since", "until", "newest", "watch"])]
    follow: bool,

    #[command(flatten)]
    list: ListArguments,
}

const COLUMNS: &[Column] = &[
    Column::text("TIME").key(),
    Column::text("ACTION").key(),
    Column::name("USER").key(),
    Column::name("WHERE").key(),
    // The whole id, because an ended ticket is found by it alone.
    Column::text("TICKET").key(),
    Column::text("RESOURCE"),
    Column::name("ACTOR"),
    Column::text("REASON"),
    Column::name("LABELS").wide(),
    Column::text("AFTER").wide(),
];

listed!(LIST_ACTIONS: ListActionsRequest => ListActionsResponse, actions: Action, COLUMNS, |action| vec![row(action)]);

impl HistoryCommand {
    /// Lists the history.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let service = self.list.service()?;
        let em = match &self.em {
            Some(em) => Some(em.find_former(&service).await?),
            None => None,
        };
        let ticket = match &self.ticket {
            Some(ticket) => Some(find_ticket(ticket, &service).await?),
            None => None,
        };
        if self.follow {
            let filter = ActionFilter { ticket, user: self.user, actor: self.actor, em, actions: self.actions };
            return follow(&service, &self.list, &filter).await;
        }
        let question = ListActionsRequest {
            ticket_id: ticket.unwrap_or_default(),
            newest_first: self.newest,
            from_time: self.period.since,
            to_time: self.period.until,
            user: self.user.unwrap_or_default(),
            em,
            actions: self.actions,
            actor: self.actor.unwrap_or_default(),
            ..Default::default()
        };
        self.list.list(question).await
    }
}

/// Actions to follow; an empty filter matches all.
struct ActionFilter {
    ticket: Option<String>,
    user: Option<String>,
    actor: Option<String>,
    em: Option<EmInstance>,
    actions: Vec<String>,
}

impl ActionFilter {
    fn matches(&self, action: &Action) -> bool {
        let is = |filter: &Option<String>, is: &str| filter.as_deref().is_none_or(|filter| filter == is);
        is(&self.ticket, &action.ticket_id)
            && is(&self.user, &action.user)
            && is(&self.actor, &action.actor)
            && (self.em.is_none() || self.em == action.em)
            && (self.actions.is_empty() || self.actions.contains(&action.action))
    }
}

/// Prints the actions from now on.
async fn follow(
    service: &ServiceClient,
    list: &ListArguments,
    filter: &ActionFilter,
) -> Result<CommandReply, CommandFailure> {
    let mut printer = list.watching.arguments().printer();
    let lines = match printer.format() {
        Format::Table | Format::Wide => None,
        Format::Jsonl => Some(json::items_of(&json::answer_of(&calls::LIST_ACTIONS)?, "actions")?),
        Format::Json => {
            return Err(CommandFailure::Usage(
                "--follow has no end, so it cannot print one JSON message: use --output jsonl".into(),
            ));
        }
    };
    let (mut follower, mut left) = (service.follow(), list.limit.unwrap_or(u64::MAX));
    let mut table = printer.table(COLUMNS);
    let headers = table.rows(&[]);
    if lines.is_none() {
        printer.print(&headers)?;
    }
    while left > 0 && !printer.is_closed() {
        let page = follower.next().await.map_err(|error| service.failed(error))?;
        let most = usize::try_from(left).unwrap_or(usize::MAX);
        let shown: Vec<&Action> = page.actions.iter().filter(|action| filter.matches(action)).take(most).collect();
        left = left.saturating_sub(u64::try_from(shown.len()).unwrap_or(u64::MAX));
        if shown.is_empty() {
            continue;
        }
        let text = match &lines {
            None => table.rows(&shown.into_iter().map(row).collect::<Vec<_>>()),
            Some(item) => {
                let line = |action| Ok(json::line(item, action)? + "\n");
                shown.into_iter().map(line).collect::<Result<String, SchemaError>>()?
            }
        };
        printer.print(&text)?;
    }
    Ok(CommandReply::Yes)
}

/// Returns the scope, the EM or another object of an action.
fn place(action: &Action) -> String {
    let labels = action.scope.iter().map(|(key, value)| format!("{key}={value}"));
    let labels: Vec<String> = labels.chain(action.each.iter().map(|key| format!("each {key}"))).collect();
    let mut words = action.scope.iter().flat_map(|(key, value)| [key, value]).chain(&action.each);
    match (labels.join(","), &action.em) {
        (labels, None) if labels.is_empty() => text::or_nothing(&action.object),
        (labels, em) if labels.is_empty() => text::em(em.as_ref()),
        (labels, _) if words.all(|word| text::name(word) == *word) => labels,
        (labels, _) => text::name(&labels),
    }
}

fn row(action: &Action) -> TableRow {
    cells![
        action.action_time.as_ref(),
        action.action.clone(),
        text::name_or_nothing(&action.user),
        place(action),
        text::or_nothing(&action.ticket_id),
        text::resource(action.resource.as_ref()),
        text::name(&action.actor),
        text::or_nothing(&action.reason),
        text::labels(&action.labels),
        text::or_nothing(&action.after),
    ]
}
