//! Commands of the CLI other than `serve`: they call a running service and print its replies. Caller: `main`.
//!
//! A command is a noun and a verb. [`token`](tokens) and [`migrate`] use the database directly, and [`health`] checks each
//! instance separately. A command never reads the tables of a running service otherwise.
//!
//! - `service`: connection to the service; `error`: failures and exit codes; `service_arguments`: common arguments;
//! - `output`: tables, JSON, terminals; `list`: paged lists; `consent`: confirmation of destructive commands;
//! - `help`: ends of help texts; `values`: parsers of argument values; `database`: database of a command;
//! - all others: one file per noun.

use std::process::ExitCode;

use clap::Subcommand;

use rm_client::calls;

mod amounts;
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
pub mod help;
mod history;
mod holds;
mod limits;
mod list;
mod man;
pub mod migrate;
mod named;
mod order;
mod output;
mod overview;
mod policies;
mod priorities;
mod providers;
mod reclaim;
mod refusals;
mod register;
mod request;
mod scopes;
mod service;
mod service_arguments;
mod tasks;
mod tickets;
pub mod tokens;
mod top;
mod usage;
mod users;
mod values;
mod waiting;

pub use error::EXIT_USAGE;
pub use output::text::is_harmful;
pub use service_arguments::ServiceArguments;

use help::{end, examples};

/// Commands of the CLI other than `serve`.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Cluster totals.
    #[command(after_help = end("overview", &calls::GET_OVERVIEW))]
    Overview(Box<overview::OverviewCommand>),
    /// The cluster each second on a terminal: EMs as bars, the fullest scopes, the wait queue.
    #[command(after_help = end("top --interval 5s", &calls::GET_OVERVIEW))]
    Top(Box<top::TopCommand>),
    /// EMs
    #[command(subcommand)]
    Em(Box<ems::EmCommand>),
    /// Tickets
    #[command(subcommand)]
    Ticket(Box<tickets::TicketCommand>),
    /// Waiting requests: their positions, and the resources that they are short of.
    #[command(after_help = end("waiting --user alice", &calls::LIST_WAITING))]
    Waiting(Box<waiting::WaitingCommand>),
    /// Refusals by user and limit with their numbers, the latest first.
    #[command(after_help = end("refusals --since 1h", &calls::LIST_REFUSALS))]
    Refusals(Box<refusals::ListRefusalsCommand>),
    /// Users, and what each uses
    #[command(subcommand)]
    User(Box<users::UserCommand>),
    /// Use of users, creators and other labels, against their limits
    #[command(subcommand)]
    Scope(Box<scopes::ScopeCommand>),
    /// Use over time, by user, creator, engine type or EM. Default: tickets that ended in the last day.
    #[command(after_help = end("usage --by creator --since 7d", &calls::GET_USAGE))]
    Usage(Box<usage::UsageCommand>),
    /// Changes with actor and reason, the oldest first.
    #[command(after_help = end("history --newest --user alice", &calls::LIST_ACTIONS))]
    History(Box<history::HistoryCommand>),
    /// Request resources. Exit code 1 if they are refused.
    #[command(after_help = end("request memory=4g,cores=2 --user alice --creator IDE --dry-run", &calls::REQUEST_RESOURCE))]
    Request(Box<request::RequestCommand>),
    /// Limits
    #[command(subcommand)]
    Limit(Box<limits::LimitCommand>),
    /// Order of waiting requests
    #[command(subcommand)]
    Order(Box<order::OrderCommand>),
    /// Priorities of waiting requests
    #[command(subcommand)]
    Priority(Box<priorities::PriorityCommand>),
    /// Engines that are taken back for waiting requests
    #[command(subcommand)]
    Reclaim(Box<reclaim::ReclaimCommand>),
    /// Limits that apply to each kind of EM
    #[command(subcommand)]
    Policy(Box<policies::PolicyCommand>),
    /// Locks of operators on an EM or a user, for up to ten minutes
    #[command(subcommand)]
    Hold(Box<holds::HoldCommand>),
    /// YARN and Kubernetes clusters
    #[command(subcommand)]
    Provider(Box<providers::ProviderCommand>),
    /// Queues of a cluster
    #[command(subcommand)]
    Queue(Box<external::QueueCommand>),
    /// Running and pending applications of a cluster
    #[command(subcommand)]
    Application(Box<external::ApplicationCommand>),
    /// Run a small cluster on a service without EMs for up to ten minutes, then remove it. Exit code 1 if another EM is registered.
    #[command(after_help = end("demo --duration 2m", &calls::SET_LIMIT))]
    Demo(Box<demo::DemoCommand>),
    /// Tokens of callers, in the database
    #[command(subcommand)]
    Token(tokens::TokenCommand),
    /// Compare the stored counters with the tickets, while the service runs. Exit code 0 without differences, 1 with differences,
    /// 2 if the service does not reply.
    #[command(after_help = end("audit", &calls::AUDIT))]
    Audit(Box<audit::AuditCommand>),
    /// Set the stored counters to the sums of the tickets, while the service runs. Exit code 0 if all counters are right then, 1 if
    /// some could not be repaired, 2 if the service does not reply.
    #[command(after_help = end("repair --em host1:9102 --reason \"after the audit\" --yes", &calls::REPAIR))]
    Repair(Box<audit::RepairCommand>),
    /// Background tasks, and the remaining work of large jobs.
    #[command(after_help = end("tasks", &calls::LIST_TASKS))]
    Tasks(Box<tasks::ListTasksCommand>),
    /// Live instances of the service
    #[command(subcommand)]
    Instance(Box<tasks::InstanceCommand>),
    /// Check that each named instance serves, for the probes of containers. Exit code 0 if all serve, otherwise 1 with the reason.
    #[command(after_help = examples(&["health --address rm1:50051,rm2:50051"]))]
    Health(health::HealthCommand),
    /// Migrate the schema of a database, for services with --no-migrate. Concurrent runs and running services are allowed. Exit code 0
    /// if the schema is up to date then, 2 if the database does not reply or denies it, 64 for wrong arguments.
    #[command(after_help = examples(&["migrate --database-url-file /etc/linkis-rm/url"]))]
    Migrate(migrate::MigrateCommand),
    /// Print the completion script of a shell. A tab also completes names of the service: at most 100, from the first 20,000, and from
    /// those that are read within a second.
    #[command(after_help = examples(&["completions bash > /etc/bash_completion.d/linkis-rm"]))]
    Completions(completions::CompletionsCommand),
    /// Print the words that continue a line, for the completion scripts.
    #[command(hide = true, after_help = examples(&["complete-words bash -- \"linkis-rm em get \""]))]
    CompleteWords(completions::CompleteWordsCommand),
    /// Write the manual pages of all commands to a folder.
    #[command(after_help = examples(&["man /usr/local/share/man/man1"]))]
    Man(man::ManCommand),
}

impl Command {
    /// Runs the command, prints its reply, and returns the exit code.
    pub async fn run(self) -> ExitCode {
        let reply = match self {
            Self::Migrate(command) => return command.run().await,
            Self::Token(command) => return command.run().await,
            Self::Health(command) => return command.run().await,
            Self::CompleteWords(command) => return command.run().await,
            Self::Overview(command) => command.run().await,
            Self::Top(command) => command.run().await,
            Self::Em(command) => command.run().await,
            Self::Ticket(command) => command.run().await,
            Self::Waiting(command) => command.run().await,
            Self::Refusals(command) => command.run().await,
            Self::User(command) => command.run().await,
            Self::Scope(command) => command.run().await,
            Self::Usage(command) => command.run().await,
            Self::History(command) => command.run().await,
            Self::Request(command) => command.run().await,
            Self::Limit(command) => command.run().await,
            Self::Order(command) => command.run().await,
            Self::Priority(command) => command.run().await,
            Self::Reclaim(command) => command.run().await,
            Self::Policy(command) => command.run().await,
            Self::Hold(command) => command.run().await,
            Self::Provider(command) => command.run().await,
            Self::Queue(command) => command.run().await,
            Self::Application(command) => command.run().await,
            Self::Demo(command) => command.run().await,
            Self::Audit(command) => command.run().await,
            Self::Repair(command) => command.run().await,
            Self::Tasks(command) => command.run().await,
            Self::Instance(command) => command.run().await,
            Self::Completions(command) => command.run(),
            Self::Man(command) => command.run(),
        };
        match reply {
            Ok(reply) => reply.into(),
            Err(failure) => {
                failure.print();
                failure.exit_code()
            }
        }
    }
}
