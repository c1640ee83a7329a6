//! `history`: actions with their actors and reasons.

use clap::Args;

use rm_client::calls;
use rm_proto::v1::{Action, EmInstance, ListActionsRequest, ListActionsResponse};

use super::{
    error::{CommandFailure, CommandReply},
    list::{ListArguments, listed},
    output::{
        Format,
        json::{self, SchemaError},
        table::{Column, TableRow},
        text,
    },
    service::TIMEOUT,
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
    #[arg(long)]
    user: Option<String>,

    /// Only changes of this EM and its tickets: APPLICATION/INSTANCE, or the instance alone of a linkis-cg-engineconnmanager.
    #[arg(long, value_parser = values::em)]
    em: Option<EmInstance>,

    /// Only this action, such as granted, expired or drained. Repeatable.
    #[arg(long = "action", value_name = "ACTION")]
    actions: Vec<String>,

    /// Only changes by this actor.
    #[arg(long, value_name = "NAME")]
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
    Column::text("TIME"),
    Column::text("ACTION"),
    Column::text("USER"),
    Column::text("WHERE"),
    Column::text("RESOURCE"),
    Column::text("ACTOR"),
    Column::text("REASON"),
    Column::id("TICKET"),
];

listed!(LIST_ACTIONS: ListActionsRequest => ListActionsResponse, actions: Action, COLUMNS, |action| vec![row(action)]);

impl HistoryCommand {
    /// Lists the history.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        if self.follow {
            return self.follow().await;
        }
        let question = ListActionsRequest {
            ticket_id: self.ticket.unwrap_or_default(),
            newest_first: self.newest,
            from_time: self.period.since,
            to_time: self.period.until,
            user: self.user.unwrap_or_default(),
            em: self.em,
            actions: self.actions,
            actor: self.actor.unwrap_or_default(),
            ..Default::default()
        };
        self.list.list(question).await
    }
}

impl HistoryCommand {
    /// Prints the actions from now on.
    async fn follow(self) -> Result<CommandReply, CommandFailure> {
        let mut printer = self.list.watching.arguments().printer();
        let lines = match printer.format() {
            Format::Table | Format::Wide => None,
            Format::Jsonl => Some(json::items_of(&json::answer_of(&calls::LIST_ACTIONS)?, "actions")?),
            Format::Json => {
                return Err(CommandFailure::Usage(
                    "--follow has no end, so it cannot print one JSON message: use --output jsonl".into(),
                ));
            }
        };
        let service = self.list.watching.arguments().service(TIMEOUT)?;
        let (mut follower, mut left) = (service.follow(), self.list.limit.unwrap_or(u64::MAX));
        let mut table = printer.table(COLUMNS);
        let headers = table.rows(&[]);
        if lines.is_none() {
            printer.print(&headers)?;
        }
        while left > 0 && !printer.is_closed() {
            let page = follower.next().await.map_err(|error| service.failed(error))?;
            let most = usize::try_from(left).unwrap_or(usize::MAX);
            let shown: Vec<&Action> = page.actions.iter().filter(|action| self.is_shown(action)).take(most).collect();
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

    /// Returns whether a line matches the filters.
    fn is_shown(&self, action: &Action) -> bool {
        let is = |filter: &Option<String>, is: &str| filter.as_deref().is_none_or(|filter| filter == is);
        is(&self.ticket, &action.ticket_id)
            && is(&self.user, &action.user)
            && is(&self.actor, &action.actor)
            && (self.em.is_none() || self.em == action.em)
            && (self.actions.is_empty() || self.actions.contains(&action.action))
    }
}

fn row(action: &Action) -> TableRow {
    let labels = action.scope.iter().map(|(key, value)| format!("{key}={value}"));
    let labels: Vec<String> = labels.chain(action.each.iter().map(|key| format!("each {key}"))).collect();
    let place = if labels.is_empty() { text::em(action.em.as_ref()) } else { labels.join(",") };
    vec![
        text::time(action.action_time.as_ref()),
        action.action.clone(),
        text::or_nothing(&action.user),
        place,
        text::resource(action.resource.as_ref()),
        action.actor.clone(),
        text::or_nothing(&action.reason),
        text::or_nothing(&action.ticket_id),
    ]
}
