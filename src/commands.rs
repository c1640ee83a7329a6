//! Commands of the CLI other than `serve`: they call a running service and print its replies.
//!
//! [`tokens`] and [`migrate`] use the database directly, and [`health`] checks each instance separately. A command never
//! reads the tables of a running service otherwise.
//!
//! - `service`: connection to the service; `failure`: failures and exit codes; `asking`: common arguments;
//! - `output`: tables, JSON, terminals; `list`: paged lists; `consent`: confirmation of destructive commands;
//! - `roles`: roles in help texts; `named`: parsers of argument values; `opened`: database of a command;
//! - all others: one file per command or group of commands.

use std::process::ExitCode;

use clap::Subcommand;

use rm_client::calls;

mod audit;
mod completions;
mod consent;
mod database;
mod demo;
mod drain;
mod ems;
mod error;
mod external;
pub mod health;
mod history;
mod holds;
mod limits;
mod list;
pub mod migrate;
mod output;
mod overview;
mod policies;
mod refusals;
mod roles;
mod scopes;
mod service;
mod service_arguments;
mod tasks;
mod tickets;
pub mod tokens;
mod top;
mod usage;
mod values;
mod waiting;

pub use error::EXIT_USAGE;

use roles::needs;

/// Commands of the CLI other than `serve`.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Tells of the whole cluster in a few numbers.
    #[command(after_help = needs(&calls::GET_OVERVIEW))]
    Overview(Box<overview::OverviewCommand>),
    /// Shows the cluster second by second: hosts as bars, the fullest scopes, the line. Needs a terminal.
    #[command(after_help = needs(&calls::GET_OVERVIEW))]
    Top(Box<top::TopCommand>),
    /// Lists hosts, and how full they are.
    #[command(after_help = needs(&calls::LIST_EMS))]
    Ems(Box<ems::ListEmsCommand>),
    /// Shows a host. Ends with 1 if it is not registered.
    #[command(after_help = needs(&calls::GET_EM))]
    Em(Box<ems::GetEmCommand>),
    /// Lists what users, creators and other labels hold that limits are for, against these.
    #[command(after_help = needs(&calls::LIST_SCOPES))]
    Scopes(Box<scopes::ListScopesCommand>),
    /// Lists what is granted, the oldest first.
    #[command(after_help = needs(&calls::LIST_TICKETS))]
    Tickets(Box<tickets::ListTicketsCommand>),
    /// Shows a live ticket. Ends with 1 if there is none; what is known of its end is told.
    #[command(after_help = needs(&calls::GET_TICKET))]
    Ticket(Box<tickets::GetTicketCommand>),
    /// Lists the requests that wait in line, and what they are short of.
    #[command(after_help = needs(&calls::LIST_WAITING))]
    Waiting(Box<waiting::ListWaitingCommand>),
    /// Lists who was refused by what, how often, the latest first.
    #[command(after_help = needs(&calls::LIST_REFUSALS))]
    Refusals(Box<refusals::ListRefusalsCommand>),
    /// Lists what was used over time, by user, creator, engine type or host: of tickets that ended in the last day, unless it is said otherwise.
    #[command(after_help = needs(&calls::GET_USAGE))]
    Usage(Box<usage::UsageCommand>),
    /// Lists what was done, the oldest first.
    #[command(after_help = needs(&calls::LIST_ACTIONS))]
    History(Box<history::HistoryCommand>),
    /// Lists limits, compares them with a file, makes them those of a file, or removes one.
    #[command(subcommand)]
    Limits(Box<limits::LimitsCommand>),
    /// Lists which limits are for which kinds of hosts.
    #[command(after_help = needs(&calls::LIST_POLICIES))]
    Policies(Box<policies::ListPoliciesCommand>),
    /// Has nothing new granted on a host; what lives there stays.
    #[command(after_help = needs(&calls::DRAIN))]
    Drain(Box<drain::DrainCommand>),
    /// Has a host grant again. Ends with 1 if it was not drained.
    #[command(after_help = needs(&calls::RESUME))]
    Resume(Box<drain::ResumeCommand>),
    /// Gives back what a ticket holds, whether or not its engine still runs. Ends with 1 if there never was such a ticket.
    #[command(after_help = needs(&calls::FORCE_RELEASE))]
    Release(Box<tickets::ReleaseCommand>),
    /// Keeps everybody from changing anything about a host or a user for up to ten minutes. Ends with 1 if somebody else does.
    #[command(after_help = needs(&calls::HOLD))]
    Hold(Box<holds::HoldCommand>),
    /// Ends a hold before its time. Ends with 1 if there was none.
    #[command(after_help = needs(&calls::RELEASE_HOLD))]
    Unhold(Box<holds::ReleaseHoldCommand>),
    /// Lists what is held.
    #[command(after_help = needs(&calls::LIST_HOLDS))]
    Holds(Box<holds::ListHoldsCommand>),
    /// Lists the clusters whose queues can be asked for.
    #[command(after_help = needs(&calls::LIST_PROVIDERS))]
    Providers(Box<external::ListProvidersCommand>),
    /// Lists the queues of a cluster.
    #[command(after_help = needs(&calls::LIST_QUEUES))]
    Queues(Box<external::ListQueuesCommand>),
    /// Lists the applications of a cluster that run or wait to.
    #[command(after_help = needs(&calls::LIST_APPLICATIONS))]
    Applications(Box<external::ListApplicationsCommand>),
    /// Lists the instances of the service that live.
    #[command(after_help = needs(&calls::LIST_INSTANCES))]
    Instances(Box<tasks::ListInstancesCommand>),
    /// Shows what is done in the background, and what is left of large work.
    #[command(after_help = needs(&calls::LIST_TASKS))]
    Tasks(Box<tasks::ListTasksCommand>),
    /// Compares every counter with what the tickets say, while the service runs. Ends with 0 if nothing differs, 1 if something
    /// does, 2 if the service does not answer.
    #[command(after_help = needs(&calls::AUDIT))]
    Audit(Box<audit::AuditCommand>),
    /// Makes every counter what the tickets say, while the service runs. Ends with 0 if all is in order then, 1 if something could
    /// not be repaired, 2 if the service does not answer.
    #[command(after_help = needs(&calls::REPAIR))]
    Repair(Box<audit::RepairCommand>),
    /// Makes, lists and revokes what callers show to say who they are. Straight on the database: whoever may write there needs no token.
    /// Ends with 0 if that was done, 1 if there was nothing to revoke, 2 if the database does not answer, 64 if something was said wrongly.
    #[command(subcommand)]
    Tokens(tokens::TokensCommand),
    /// Brings the schema of a database up to date, for services that run with --no-migrate. Several may do so at once, also beside services
    /// that run. Ends with 0 if it is up to date then, 2 if the database does not answer or does not allow it, 64 if something was said wrongly.
    Migrate(migrate::MigrateCommand),
    /// Asks an instance, or each of several, whether calls may be sent to it. Ends with 0 if so, else with 1, and says why: for whoever
    /// looks after containers.
    Health(health::HealthCommand),
    /// Runs a small cluster on a service without EMs for up to ten minutes, then removes it. Ends with 1 if another EM is registered.
    #[command(after_help = needs(&calls::SET_LIMIT))]
    Demo(Box<demo::DemoCommand>),
    /// Prints what a shell needs to complete commands.
    Completions(completions::CompletionsCommand),
}

impl Command {
    /// Runs the command, prints its reply, and returns the exit code.
    pub async fn run(self) -> ExitCode {
        let answer = match self {
            Self::Migrate(migrate) => return migrate.run().await,
            Self::Tokens(tokens) => return tokens.run().await,
            Self::Health(health) => return health.run().await,
            Self::Overview(command) => command.run().await,
            Self::Top(command) => command.run().await,
            Self::Instances(command) => command.run().await,
            Self::Tasks(command) => command.run().await,
            Self::Ems(command) => command.run().await,
            Self::Em(command) => command.run().await,
            Self::Scopes(command) => command.run().await,
            Self::Tickets(command) => command.run().await,
            Self::Ticket(command) => command.run().await,
            Self::Waiting(command) => command.run().await,
            Self::Refusals(command) => command.run().await,
            Self::Usage(command) => command.run().await,
            Self::History(command) => command.run().await,
            Self::Limits(command) => command.run().await,
            Self::Policies(command) => command.run().await,
            Self::Drain(command) => command.run().await,
            Self::Resume(command) => command.run().await,
            Self::Release(command) => command.run().await,
            Self::Hold(command) => command.run().await,
            Self::Unhold(command) => command.run().await,
            Self::Holds(command) => command.run().await,
            Self::Providers(command) => command.run().await,
            Self::Queues(command) => command.run().await,
            Self::Applications(command) => command.run().await,
            Self::Audit(command) => command.run().await,
            Self::Repair(command) => command.run().await,
            Self::Demo(command) => command.run().await,
            Self::Completions(command) => command.run(),
        };
        match answer {
            Ok(answer) => answer.into(),
            Err(failure) => {
                failure.tell();
                failure.exit_code()
            }
        }
    }
}
