//! Commands of the CLI other than `serve`: they call a running service and print its replies. Caller: `main`.
//!
//! [`tokens`] and [`migrate`] use the database directly, and [`health`] checks each instance separately. A command never
//! reads the tables of a running service otherwise.
//!
//! - `service`: connection to the service; `error`: failures and exit codes; `service_arguments`: common arguments;
//! - `output`: tables, JSON, terminals; `list`: paged lists; `consent`: confirmation of destructive commands;
//! - `roles`: roles in help texts; `values`: parsers of argument values; `database`: database of a command;
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
    /// Print the cluster totals.
    #[command(after_help = needs(&calls::GET_OVERVIEW))]
    Overview(Box<overview::OverviewCommand>),
    /// Show the cluster each second on a terminal: EMs as bars, the fullest scopes, the wait queue.
    #[command(after_help = needs(&calls::GET_OVERVIEW))]
    Top(Box<top::TopCommand>),
    /// List EMs: their state, and how full they are.
    #[command(after_help = needs(&calls::LIST_EMS))]
    Ems(Box<ems::ListEmsCommand>),
    /// Show an EM. Exit code 1 if it is not registered.
    #[command(after_help = needs(&calls::GET_EM))]
    Em(Box<ems::GetEmCommand>),
    /// List the use of users, creators and other labels, against their limits.
    #[command(after_help = needs(&calls::LIST_SCOPES))]
    Scopes(Box<scopes::ListScopesCommand>),
    /// List live tickets, the oldest first.
    #[command(after_help = needs(&calls::LIST_TICKETS))]
    Tickets(Box<tickets::ListTicketsCommand>),
    /// Show a live ticket. Exit code 1 if it has ended or never existed; the error states how it ended.
    #[command(after_help = needs(&calls::GET_TICKET))]
    Ticket(Box<tickets::GetTicketCommand>),
    /// List waiting requests with their positions and shortfalls.
    #[command(after_help = needs(&calls::LIST_WAITING))]
    Waiting(Box<waiting::ListWaitingCommand>),
    /// List refusals by user and limit with their numbers, the latest first.
    #[command(after_help = needs(&calls::LIST_REFUSALS))]
    Refusals(Box<refusals::ListRefusalsCommand>),
    /// Sum use over time by user, creator, engine type or EM. Default: tickets that ended in the last day.
    #[command(after_help = needs(&calls::GET_USAGE))]
    Usage(Box<usage::UsageCommand>),
    /// List changes with actor and reason, the oldest first.
    #[command(after_help = needs(&calls::LIST_ACTIONS))]
    History(Box<history::HistoryCommand>),
    /// List, compare, replace or delete limits.
    #[command(subcommand)]
    Limits(Box<limits::LimitsCommand>),
    /// List the limits of each kind of EM.
    #[command(after_help = needs(&calls::LIST_POLICIES))]
    Policies(Box<policies::ListPoliciesCommand>),
    /// Stop new grants on an EM. Its tickets stay.
    #[command(after_help = needs(&calls::DRAIN))]
    Drain(Box<drain::DrainCommand>),
    /// Allow grants on a drained EM again. Exit code 1 if it was not drained.
    #[command(after_help = needs(&calls::RESUME))]
    Resume(Box<drain::ResumeCommand>),
    /// End a ticket, whether or not its engine still runs. Exit code 1 if the ticket never existed.
    #[command(after_help = needs(&calls::FORCE_RELEASE))]
    Release(Box<tickets::ReleaseCommand>),
    /// Block changes of an EM or user for up to ten minutes. Exit code 1 if another caller holds it.
    #[command(after_help = needs(&calls::HOLD))]
    Hold(Box<holds::HoldCommand>),
    /// End a hold before its deadline. Exit code 1 if there is none.
    #[command(after_help = needs(&calls::RELEASE_HOLD))]
    Unhold(Box<holds::ReleaseHoldCommand>),
    /// List holds.
    #[command(after_help = needs(&calls::LIST_HOLDS))]
    Holds(Box<holds::ListHoldsCommand>),
    /// List the external clusters whose queues requests can name.
    #[command(after_help = needs(&calls::LIST_PROVIDERS))]
    Providers(Box<external::ListProvidersCommand>),
    /// List the queues of an external cluster.
    #[command(after_help = needs(&calls::LIST_QUEUES))]
    Queues(Box<external::ListQueuesCommand>),
    /// List the running and pending applications of an external cluster.
    #[command(after_help = needs(&calls::LIST_APPLICATIONS))]
    Applications(Box<external::ListApplicationsCommand>),
    /// List the live instances of the service.
    #[command(after_help = needs(&calls::LIST_INSTANCES))]
    Instances(Box<tasks::ListInstancesCommand>),
    /// List background tasks, and the remaining work of large jobs.
    #[command(after_help = needs(&calls::LIST_TASKS))]
    Tasks(Box<tasks::ListTasksCommand>),
    /// Compare the stored counters with the tickets, while the service runs. Exit code 0 without differences, 1 with differences,
    /// 2 if the service does not reply.
    #[command(after_help = needs(&calls::AUDIT))]
    Audit(Box<audit::AuditCommand>),
    /// Set the stored counters to the sums of the tickets, while the service runs. Exit code 0 if all counters are right then, 1 if
    /// some could not be repaired, 2 if the service does not reply.
    #[command(after_help = needs(&calls::REPAIR))]
    Repair(Box<audit::RepairCommand>),
    /// Create, list and revoke the tokens of callers, directly in the database: write access to it is enough. Exit code 0 if done, 1 if
    /// there was nothing to revoke, 2 if the database does not reply, 64 for wrong arguments.
    #[command(subcommand)]
    Tokens(tokens::TokensCommand),
    /// Migrate the schema of a database, for services with --no-migrate. Concurrent runs and running services are allowed. Exit code 0
    /// if the schema is up to date then, 2 if the database does not reply or denies it, 64 for wrong arguments.
    Migrate(migrate::MigrateCommand),
    /// Check that each named instance serves, for the probes of containers. Exit code 0 if all serve, otherwise 1 with the reason.
    Health(health::HealthCommand),
    /// Run a small cluster on a service without EMs for up to ten minutes, then remove it. Exit code 1 if another EM is registered.
    #[command(after_help = needs(&calls::SET_LIMIT))]
    Demo(Box<demo::DemoCommand>),
    /// Print the completion script of a shell.
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
                failure.print();
                failure.exit_code()
            }
        }
    }
}
