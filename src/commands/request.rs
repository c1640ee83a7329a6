//! `request`: a request for resources, or with `--dry-run` its decision alone.

use std::{fmt::Write as _, time::Duration};

use clap::Args;

use crate::config::parse_duration;
use rm_client::calls;
use rm_proto::v1::{
    AvailableResource, NotEnoughResource, RequestResourceRequest, RequestResourceResponse,
    request_resource_response::Result as Outcome,
};

use super::{
    amounts::{self, Amounts},
    error::{CommandFailure, CommandReply},
    named::{EmName, find_em},
    output::text,
    service::TIMEOUT,
    service_arguments::ServiceArguments,
    values,
};

/// Maximum of `--wait`: that of the server's `--max-wait`.
const WAIT_MAX: &str = "24h";

/// Arguments of `request`.
#[derive(Debug, Clone, Args)]
pub struct RequestCommand {
    /// The amounts, as in memory=4g,cores=2,instances=1; also queue_memory, queue_cores, queue_instances, kubernetes_memory,
    /// kubernetes_millicores, special.NAME.
    #[arg(value_name = "AMOUNTS", value_parser = amounts::parse)]
    amounts: Amounts,

    /// User of the engine.
    #[arg(long, value_parser = values::name)]
    user: String,

    /// Application of the user.
    #[arg(long, value_parser = values::name)]
    creator: String,

    /// Type of the engine, as in spark-3.2.1.
    #[arg(long, value_name = "TYPE", default_value = "", hide_default_value = true)]
    engine_type: String,

    /// The EM: APPLICATION/INSTANCE, or for a linkis-cg-engineconnmanager its instance [default: any that fits].
    #[arg(long, value_parser = EmName::parse)]
    em: Option<EmName>,

    /// Queue or namespace of the amounts with queue_ or kubernetes_.
    #[arg(long, value_name = "NAME")]
    queue: Option<String>,

    /// Label of the request, KEY=VALUE. Repeatable.
    #[arg(long = "label", value_parser = values::label)]
    labels: Vec<(String, String)>,

    /// Time to wait for resources that are short.
    #[arg(long, value_name = "DURATION", value_parser = wait, conflicts_with = "dry_run")]
    wait: Option<Duration>,

    /// Head start while the request waits, in seconds: -600 to 600, 0 for the default of its labels.
    #[arg(long, value_name = "SECONDS", default_value_t = 0, allow_negative_numbers = true)]
    priority: i32,

    /// Only reply whether the request fits, and what limits it; grant nothing.
    #[arg(long)]
    dry_run: bool,

    #[command(flatten)]
    arguments: ServiceArguments,
}

fn wait(text: &str) -> Result<Duration, String> {
    parse_duration("--wait", text, "1s", WAIT_MAX)
}

impl RequestCommand {
    /// Requests the resources.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let resource = Some(self.amounts.resource(self.queue.as_deref())?);
        let wait = self.wait.unwrap_or_default();
        let service = self.arguments.service(TIMEOUT.saturating_add(wait))?;
        let question = RequestResourceRequest {
            em: find_em(self.em.as_ref(), &service).await?,
            user: self.user,
            creator: self.creator,
            engine_type: self.engine_type,
            resource,
            labels: self.labels.into_iter().collect(),
            wait_timeout: self.wait.and_then(|wait| prost_types::Duration::try_from(wait).ok()),
            dry_run: self.dry_run,
            priority: self.priority,
            ..Default::default()
        };
        let reply = service.make_slowly("requesting", &calls::REQUEST_RESOURCE, &question).await?;
        self.arguments.printer().answer(&calls::REQUEST_RESOURCE, &reply, || reply_text(&reply))?;
        Ok(CommandReply::yes_if(matches!(reply.result, Some(Outcome::Available(_)))))
    }
}

fn reply_text(reply: &RequestResourceResponse) -> String {
    match &reply.result {
        Some(Outcome::Available(available)) => available_text(available),
        Some(Outcome::NotEnough(refusal)) => refusal_text(refusal),
        None => "the service replied without a decision\n".to_owned(),
    }
}

fn available_text(available: &AvailableResource) -> String {
    let em = text::em(available.em.as_ref());
    let mut text = match available.ticket_id.as_str() {
        "" => format!("it fits on {em}\n"),
        ticket => {
            let expires = text::time(available.expire_time.as_ref());
            format!("granted ticket {ticket} on {em}; without a confirmed engine it expires at {expires}\n")
        }
    };
    let head_room = available.head_room.iter().map(|room| {
        let [free, max] = [room.available, room.max].map(|amount| text::amount_by_key(&room.dimension, amount));
        format!("free: {}  {} {free} of {max}\n", text::scope(&room.scope), room.dimension)
    });
    let advisory =
        available.advisory_violations.iter().map(|short| format!("over an advisory limit: {}\n", short.rule));
    text.extend(head_room.chain(advisory));
    text
}

fn refusal_text(refusal: &NotEnoughResource) -> String {
    let mut text = if refusal.never_fits { "it never fits\n" } else { "it does not fit now\n" }.to_owned();
    for short in &refusal.shortfalls {
        let shown = |amount| text::amount_by_key(&short.dimension, amount);
        let (wanted, free, max) = (shown(short.requested), shown(short.available), shown(short.max));
        let ahead =
            if short.waiting_ahead > 0 { format!(", {} wait before it", short.waiting_ahead) } else { String::new() };
        let idle = short.idle_amount.filter(|amount| *amount > 0);
        let idle = idle.map(|amount| format!(", idle engines hold {}", shown(amount))).unwrap_or_default();
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "short: {}  {} wants {wanted}, free {free} of {max}{ahead}{idle}",
            text::scope(&short.scope),
            short.dimension
        );
    }
    text
}
