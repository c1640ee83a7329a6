//! `order`: the order of waiting requests.

use std::time::Duration;

use clap::{Args, Subcommand};

use crate::config::parse_duration;
use rm_client::calls;
use rm_proto::v1::{GetOrderRequest, Order, SetOrderRequest};

use super::{
    consent::Consent,
    error::{CommandFailure, CommandReply},
    help::end,
    output::{
        table::{Column, TableRow, cells, details},
        text,
    },
    service::{TIMEOUT, TIMEOUT_LONG},
    service_arguments::ServiceArguments,
};

/// Verbs of `order`.
#[derive(Debug, Clone, Subcommand)]
pub enum OrderCommand {
    /// Show by what waiting requests take turns.
    #[command(after_help = end("order get", &calls::GET_ORDER))]
    Get(GetOrderCommand),
    /// Set by what waiting requests take turns. Requests that wait keep their positions. Shows what it replaces, for a confirmation.
    #[command(after_help = end("order set --fair-by user,creator --reason \"as agreed\"", &calls::SET_ORDER))]
    Set(SetOrderCommand),
}

impl OrderCommand {
    /// Runs the verb.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        match self {
            Self::Get(command) => command.run().await,
            Self::Set(command) => command.run().await,
        }
    }
}

/// Arguments of `order get`.
#[derive(Debug, Clone, Args)]
pub struct GetOrderCommand {
    #[command(flatten)]
    arguments: ServiceArguments,
}

/// Arguments of `order set`.
#[derive(Debug, Clone, Args)]
#[group(id = "change", required = true, multiple = true, args = ["fair_by", "position_kept"])]
pub struct SetOrderCommand {
    /// Labels by which requests take turns, with commas: each combination of their values has its turn. "none" for the order in which
    /// requests enter [default: as now].
    #[arg(long, value_name = "LABELS", value_delimiter = ',')]
    fair_by: Vec<String>,

    /// Time for which a lost caller's position is kept: 1s to 1h, or 0s for none [default: as now].
    #[arg(long, value_name = "DURATION", value_parser = position_kept)]
    position_kept: Option<Duration>,

    #[command(flatten)]
    consent: Consent,

    #[command(flatten)]
    arguments: ServiceArguments,
}

fn position_kept(text: &str) -> Result<Duration, String> {
    let kept = parse_duration("--position-kept", text, "0s", "1h")?;
    match kept.is_zero() || kept >= Duration::from_secs(1) {
        true => Ok(kept),
        false => Err("must be 0s, or from 1s to 1h".to_owned()),
    }
}

const COLUMNS: &[Column] = &[Column::text("TURNS BY"), Column::text("POSITIONS KEPT FOR")];

impl GetOrderCommand {
    async fn run(self) -> Result<CommandReply, CommandFailure> {
        let service = self.arguments.service(TIMEOUT)?;
        let reply = service.make(&calls::GET_ORDER, &GetOrderRequest {}).await?;
        let order = reply.order.clone().unwrap_or_default();
        self.arguments.printer().answer(&calls::GET_ORDER, &reply, || details(COLUMNS, &row(&order)))?;
        Ok(CommandReply::Yes)
    }
}

impl SetOrderCommand {
    async fn run(self) -> Result<CommandReply, CommandFailure> {
        let service = self.arguments.service(TIMEOUT_LONG)?;
        let before = service.make(&calls::GET_ORDER, &GetOrderRequest {}).await?.order.unwrap_or_default();
        let fair_by = match &self.fair_by[..] {
            [] => before.fair_by.clone(),
            [none] if none == "none" => Vec::new(),
            labels if labels.iter().any(|label| label == "none") => {
                return Err(CommandFailure::Usage("--fair-by: none excludes labels".to_owned()));
            }
            labels if labels.iter().any(|label| label.starts_with("each ")) => {
                return Err(CommandFailure::Usage("--fair-by: names labels alone, as in --fair-by tenant".to_owned()));
            }
            _ => self.fair_by,
        };
        let position_kept = self.position_kept.and_then(|kept| prost_types::Duration::try_from(kept).ok());
        let order = Order { fair_by, position_kept: position_kept.or(before.position_kept) };
        let (now, new) = (details(COLUMNS, &row(&before)), details(COLUMNS, &row(&order)));
        let reason = self.consent.confirm_change(Some(&now), &new)?;
        let question = SetOrderRequest { order: Some(order.clone()), reason };
        let reply = service.make_slowly("setting the order", &calls::SET_ORDER, &question).await?;
        self.arguments.printer().answer(&calls::SET_ORDER, &reply, || details(COLUMNS, &row(&order)))?;
        Ok(CommandReply::Yes)
    }
}

/// Returns the empty name and the values of an order in one line.
pub(super) fn written(order: &Order) -> (String, String) {
    let kept = text::duration(order.position_kept.as_ref());
    (String::new(), format!("turns by {}, positions kept for {kept}", turns(order)))
}

fn turns(order: &Order) -> String {
    if order.fair_by.is_empty() { "none".to_owned() } else { text::list(&order.fair_by) }
}

fn row(order: &Order) -> TableRow {
    cells![turns(order), text::duration(order.position_kept.as_ref())]
}
