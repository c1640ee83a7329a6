//! `history`: what was done, by whom and why.

use clap::Args;

use crate::transport::proto::{Action, EmInstance, ListActionsRequest, ListActionsResponse};

use super::{
    asking::Period,
    failure::{Answer, Failure},
    list::{ListArguments, listed},
    named,
    output::{
        table::{Column, Row},
        text,
    },
};

/// The history, oldest first.
#[derive(Debug, Clone, Args)]
pub struct History {
    /// Only the life of this ticket.
    #[arg(long, value_name = "TICKET")]
    ticket: Option<String>,

    /// Only what was done to tickets of this user.
    #[arg(long)]
    user: Option<String>,

    /// Only what was done to this EM, or on it: APPLICATION/INSTANCE, or the instance alone of a linkis-cg-engineconnmanager.
    #[arg(long, value_parser = named::em)]
    em: Option<EmInstance>,

    /// Only this, such as granted, expired or drained; may be repeated.
    #[arg(long = "action", value_name = "ACTION")]
    actions: Vec<String>,

    /// Only what this one did.
    #[arg(long, value_name = "NAME")]
    actor: Option<String>,

    #[command(flatten)]
    period: Period,

    /// The newest first.
    #[arg(long)]
    newest: bool,

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

impl History {
    /// Lists it.
    pub async fn run(self) -> Result<Answer, Failure> {
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

fn row(action: &Action) -> Row {
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
