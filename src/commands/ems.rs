//! `em`: lists and details of EMs, and their maintenance (`drain`).

use clap::{Args, Subcommand, ValueEnum};

use rm_client::calls;
use rm_model::resource::Dimension;
use rm_proto::v1::{self as proto, EmOrder, EmResource, Health, ListEmsRequest, ListEmsResponse};

use super::{
    drain::{DrainCommand, ResumeCommand},
    error::{CommandFailure, CommandReply},
    help::end,
    list::{ListArguments, listed},
    named::EmName,
    output::{
        Printer,
        table::{Column, TableRow, cells, details},
        text,
    },
    register::{RegisterCommand, UnregisterCommand},
    service::{ServiceClient, TIMEOUT},
    service_arguments::PollArguments,
    values,
};

/// Verbs of `em`.
#[derive(Debug, Clone, Subcommand)]
pub enum EmCommand {
    /// List EMs: their state, and how full they are.
    #[command(after_help = end("em list --state silent", &calls::LIST_EMS))]
    List(ListEmsCommand),
    /// Show an EM. Exit code 1 if it is not registered.
    #[command(after_help = end("em get host1:9102", &calls::GET_EM))]
    Get(GetEmCommand),
    /// Stop new grants on an EM. Its tickets stay.
    #[command(after_help = end("em drain host1:9102 --reason \"a new disk\"", &calls::DRAIN))]
    Drain(DrainCommand),
    /// Allow grants on a drained EM again. Exit code 1 if it was not drained.
    #[command(after_help = end("em resume host1:9102", &calls::RESUME))]
    Resume(ResumeCommand),
    /// Register an EM, as the EM itself does. A known one gets a new registration.
    #[command(after_help = end("em register host9:9102 --total memory=64g,cores=16,instances=20", &calls::REGISTER))]
    Register(RegisterCommand),
    /// Remove an EM and its tickets. Exit code 1 if it is not registered.
    #[command(after_help = end("em unregister host9:9102", &calls::UNREGISTER))]
    Unregister(UnregisterCommand),
}

impl EmCommand {
    /// Runs the verb.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        match self {
            Self::List(command) => command.run().await,
            Self::Get(command) => command.run().await,
            Self::Drain(command) => command.run().await,
            Self::Resume(command) => command.run().await,
            Self::Register(command) => command.run().await,
            Self::Unregister(command) => command.run().await,
        }
    }
}

/// State of an EM to list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum StateFilter {
    Healthy,
    Warn,
    Unhealthy,
    Silent,
    Draining,
}

/// Order of the list of EMs.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum SortBy {
    Name,
    /// The fullest first.
    Full,
    /// Those that need a person first, and within a state the fullest.
    State,
}

/// Arguments of `em list`.
#[derive(Debug, Clone, Args)]
pub struct ListEmsCommand {
    /// Only EMs of this application.
    #[arg(long, value_name = "NAME")]
    application: Option<String>,

    /// Only EMs with this label, KEY=VALUE. Repeatable.
    #[arg(long = "label", value_parser = values::label)]
    labels: Vec<(String, String)>,

    /// Only EMs in this state.
    #[arg(long, value_enum)]
    state: Option<StateFilter>,

    /// Order: by name, the fullest first, or by state (those that need a person first).
    #[arg(long, value_enum, default_value = "name", hide_possible_values = true)]
    sort: SortBy,

    /// Former words of --state.
    #[arg(long, value_name = "BOOL", hide = true, conflicts_with = "state")]
    silent: Option<bool>,

    #[arg(long, value_name = "BOOL", hide = true, conflicts_with = "state")]
    drained: Option<bool>,

    /// Only EMs that are at least this full in some dimension, in percent: 1 to 100.
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(i32).range(1..=100))]
    full: Option<i32>,

    #[command(flatten)]
    list: ListArguments,
}

/// Arguments of `em get`.
#[derive(Debug, Clone, Args)]
pub struct GetEmCommand {
    /// The EM: APPLICATION/INSTANCE, or for a linkis-cg-engineconnmanager its instance, also without its end.
    #[arg(value_parser = EmName::parse)]
    em: EmName,

    #[command(flatten)]
    watching: PollArguments,
}

const COLUMNS: &[Column] = &[
    Column::em("EM").key(),
    Column::text("STATE").key(),
    Column::number("FULL").key(),
    Column::number("CORES").key(),
    Column::number("MEMORY").key(),
    Column::number("INSTANCES"),
    Column::number("REPORTED"),
    Column::text("OTHER"),
    Column::text("LOAD").wide(),
    Column::text("LABELS").wide(),
    Column::text("USED").wide(),
    Column::text("LOCKED").wide(),
    Column::text("PROTECTED").wide(),
    Column::text("LEFT").wide(),
    Column::text("RESERVED FOR").wide(),
    Column::number("EPOCH").wide(),
    Column::number("REGISTERED").wide(),
    Column::text("DRAINED").wide(),
];

listed!(LIST_EMS: ListEmsRequest => ListEmsResponse, ems: EmResource, COLUMNS, |em| vec![row(em)]);

impl ListEmsCommand {
    /// Lists the EMs.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let is = |state| (self.state == Some(state)).then_some(true);
        let health = match self.state {
            Some(StateFilter::Healthy) => Health::Healthy,
            Some(StateFilter::Warn) => Health::Warn,
            Some(StateFilter::Unhealthy) => Health::Unhealthy,
            Some(StateFilter::Silent | StateFilter::Draining) | None => Health::Unspecified,
        };
        let question = ListEmsRequest {
            health: health.into(),
            order: match self.sort {
                SortBy::Name => EmOrder::Unspecified,
                SortBy::Full => EmOrder::Fullest,
                SortBy::State => EmOrder::Urgent,
            }
            .into(),
            em_application_name: self.application.unwrap_or_default(),
            labels: self.labels.into_iter().collect(),
            silent: self.silent.or(is(StateFilter::Silent)),
            draining: self.drained.or(is(StateFilter::Draining)),
            min_fullness_percent: self.full.unwrap_or_default(),
            ..Default::default()
        };
        self.list.list(question).await
    }
}

impl GetEmCommand {
    /// Shows the EM.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let show = async |service: &ServiceClient, printer: &mut Printer| {
            let question = proto::GetEmRequest { em: Some(self.em.find(service).await?) };
            let answer = service.make(&calls::GET_EM, &question).await?;
            let text = || details(COLUMNS, &row(&answer.em.clone().unwrap_or_default()));
            printer.answer(&calls::GET_EM, &answer, text)
        };
        self.watching.rounds(TIMEOUT, show).await?;
        Ok(CommandReply::Yes)
    }
}

/// Use of an EM in one dimension.
#[derive(Debug, Clone)]
pub struct DimensionUse {
    /// The dimension.
    pub dimension: Dimension,
    /// Amount used by its engines.
    pub used: i64,
    /// Amount granted and not yet confirmed.
    pub locked: i64,
    /// Total without the protected part.
    pub max: i64,
}

impl DimensionUse {
    /// Returns used + locked.
    pub fn held(&self) -> i64 {
        self.used.saturating_add(self.locked)
    }

    /// Returns used + locked in percent of the maximum; `None` as for [`percent`].
    pub fn percent(&self) -> Option<i64> {
        percent(self.held(), self.max)
    }
}

/// Returns the use of an EM in all its dimensions.
pub fn shares(em: &EmResource) -> Vec<DimensionUse> {
    let of = |resource: &Option<proto::Resource>, wanted: &Dimension| {
        let (amounts, _) = text::amounts(resource.as_ref());
        amounts.into_iter().filter(|(dimension, _)| dimension == wanted).map(|(_, amount)| amount).sum::<i64>()
    };
    let share = |(dimension, total): (Dimension, i64)| DimensionUse {
        used: of(&em.used, &dimension),
        locked: of(&em.locked, &dimension),
        max: total.saturating_sub(of(&em.protected_resource, &dimension)),
        dimension,
    };
    text::amounts(em.total.as_ref()).0.into_iter().map(share).collect()
}

/// Returns `held` in percent of `max`. With a `max` of zero: `None` if `held` is zero, otherwise 100.
pub fn percent(held: i64, max: i64) -> Option<i64> {
    match (held, max) {
        (held, max) if max > 0 => i64::try_from(i128::from(held) * 100 / i128::from(max)).ok(),
        (0, _) => None,
        _ => Some(100),
    }
}

/// Returns the state of an EM, for display.
pub fn state(em: &EmResource) -> String {
    let health = match em.health() {
        Health::Unspecified => "unreported",
        Health::Healthy => "healthy",
        Health::Warn => "warn",
        Health::Unhealthy => "unhealthy",
    };
    let words = [
        em.unregistering.then_some("unregistering"),
        em.drain.as_ref().map(|_| "drained"),
        em.silent.then_some("silent"),
        (!em.silent).then_some(health),
    ];
    words.into_iter().flatten().collect::<Vec<_>>().join(",")
}

fn row(em: &EmResource) -> TableRow {
    use Dimension::{Cores, Instances, Memory};
    let shares = shares(em);
    let shown = |share: &DimensionUse| {
        let amount = |amount| text::amount(&share.dimension, amount);
        text::amount_of(&amount(share.held()), &amount(share.max))
    };
    let of = |wanted: &Dimension| {
        shares.iter().find(|share| share.dimension == *wanted).map_or_else(|| text::NOTHING.to_owned(), shown)
    };
    let others = shares.iter().filter(|share| ![Memory, Cores, Instances].contains(&share.dimension));
    let others: Vec<String> = others.map(|share| format!("{}={}", share.dimension.key(), shown(share))).collect();
    let fullest = shares.iter().filter_map(DimensionUse::percent).max();
    let load = em.load.as_ref().map(|load| {
        let memory = percent(load.memory_used, load.memory_max).map_or_else(String::new, |of| format!(" memory={of}%"));
        format!("cpu={}%{memory}", load.cpu_permille / 10)
    });
    let drain = em
        .drain
        .as_ref()
        .map(|drain| format!("{} by {}: {}", text::time(drain.drain_time.as_ref()), drain.drained_by, drain.reason));
    cells![
        text::em(em.em.as_ref()),
        state(em),
        fullest.map_or_else(|| text::NOTHING.to_owned(), |fullest| format!("{fullest}%")),
        of(&Cores),
        of(&Memory),
        of(&Instances),
        em.last_report_time.as_ref(),
        text::or_nothing(&others.join(" ")),
        text::or_nothing(&load.unwrap_or_default()),
        text::labels(&em.labels),
        text::resource(em.used.as_ref()),
        text::resource(em.locked.as_ref()),
        text::resource(em.protected_resource.as_ref()),
        text::resource(em.left.as_ref()),
        text::labels(&em.reserved_labels),
        em.epoch.to_string(),
        em.register_time.as_ref(),
        text::or_nothing(&drain.unwrap_or_default()),
    ]
}
