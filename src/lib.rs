//! linkis-rm: a resource manager for compute clusters in the style of Apache Linkis.
//!
//! Before an engine starts, linkis-rm grants its resources on an EM within the limits of users, creators, labels and
//! external queues. It tracks their use while the engine runs, and frees them when the engine ends or fails.
//!
//! The crates, in reading order:
//!
//! - [`rm_model`]: resources, EMs, tickets, limits and the ledger: all decisions, without I/O;
//! - [`rm_store`]: PostgreSQL: the tables, the resource locks and the search for the primary;
//! - [`rm_external`]: YARN and Kubernetes clusters;
//! - [`rm_service`]: the use cases, above all the committer, which alone writes tickets and counters;
//! - [`rm_proto`]: the messages of the API, and their conversion to the model;
//! - [`rm_edge`]: gRPC, TLS, HTTP and the page, authentication;
//! - [`rm_client`]: the RM client, for EMs, LinkisManager and engines written in Rust;
//! - [`rm_telemetry`]: logs, traces and metrics; [`rm_devpg`]: the private PostgreSQL.
//!
//! This crate is the program. It parses the command line, then runs a command or the server, and returns the exit
//! code:
//!
//! - [`server`]: start, operation and stop of an instance; [`notify`]: notifications for systemd;
//! - [`commands`]: the commands, through the client; [`config`]: settings; [`limits_file`]: limits in version control.
//!
//! docs/ARCHITECTURE.md has the walk of one request and the invariants, docs/CHANGING.md the files of each kind of change. The test
//! `workspace` enforces which crate may use which.

#![warn(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::unreachable,
    clippy::print_stdout,
    clippy::too_many_lines
)]

mod commands;
mod config;
mod limits_file;
mod notify;
mod server;

use std::{error::Error, process::ExitCode};

use rm_devpg::EmbeddedPostgres;
use rm_edge::edge;
use rm_model::limit::{LimitChanges, LimitReplacement};
use rm_store::connect_target::ConnectTarget;
use rm_telemetry::traces::TraceExport;
use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    commands::EXIT_USAGE,
    config::{DatabaseSource, LaunchMode, ServiceConfig, StartFailure},
    server::{Options, Server, ServerExit},
};

/// Runs the program.
#[tokio::main]
pub async fn main() -> ExitCode {
    let config = match LaunchMode::from_command_line() {
        Ok(LaunchMode::Serve(config)) => config,
        Ok(LaunchMode::Command(command)) => return command.run().await,
        Err(StartFailure::CommandLine(error)) => {
            if !error.use_stderr() {
                // A failure to write to the standard output has no other place to be reported.
                let _ = error.print();
                return ExitCode::SUCCESS;
            }
            eprint!("{}", rm_telemetry::without_passwords(&error.render().to_string()));
            return ExitCode::from(EXIT_USAGE);
        }
        Err(StartFailure::WrongWords(text)) => {
            eprintln!("error: {}", rm_telemetry::without_passwords(&text));
            return ExitCode::from(EXIT_USAGE);
        }
        Err(StartFailure::Settings(error)) => {
            let text = rm_telemetry::without_passwords(&error.to_string());
            eprintln!("{text}linkis-rm serve --help lists the settings.");
            return ExitCode::from(EXIT_USAGE);
        }
    };
    rm_telemetry::start(&config.telemetry.log);
    match run(*config).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The last line of the log has the format of the others, so that log collectors read it.
            tracing::error!(target: rm_telemetry::EXIT, error = %rm_telemetry::with_causes(&*error), "linkis-rm ends");
            ExitCode::FAILURE
        }
    }
}

async fn run(config: ServiceConfig) -> Result<(), Box<dyn Error>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let listener = server::listen(config.listen).await?;
    let http = match config.http_listen {
        Some(address) => Some(server::listen_http(&address).await?),
        None => None,
    };
    let page = http.as_ref().and_then(|http| server::page_url(http, config.options.security.tls.is_some()));
    tracing::info!(version = env!("CARGO_PKG_VERSION"), revision = env!("REVISION"), page, "linkis-rm starts");
    let (target, private) = database(&config.database).await?;
    let bounds = edge::make_room(config.options.bounds);
    let server = tokio::select! {
        opened = Server::open(listener, http, target, Options { bounds, ..config.options }) => opened?,
        _ = terminate.recv() => return stop_early(private).await,
        _ = interrupt.recv() => return stop_early(private).await,
    };
    let traces =
        config.telemetry.traces.map(|settings| TraceExport::start(settings, server.instance_id())).transpose()?;
    if let Some(new) = config.limits.filter(|new| *new != LimitReplacement::default()) {
        let limits = new.rules.as_ref().map(Vec::len);
        let LimitChanges { rules, queue } = server.replace_limits(new).await?;
        let (added, changed, removed) = (rules.added.len(), rules.changed.len(), rules.removed.len());
        let queue_rules = usize::from(queue.order.is_some()) + queue.priorities.len() + queue.reclaim.len();
        tracing::info!(limits, added, changed, removed, queue_rules, "limits replaced by those of the file");
    }
    if let Some(address) = server.http_address() {
        tracing::info!(%address, "metrics and health over HTTP");
    }
    tracing::info!(address = %server.address()?, "serving");
    notify::notify(NotifyState::Ready);
    let mut died = None;
    let stop = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            status = has_died(private.as_ref()) => died = Some(status),
        }
        notify::notify(NotifyState::Stopping);
    };
    let ending = server.serve(stop).await;
    if let Some(traces) = traces {
        traces.finish().await;
    }
    let ending = ending?;
    if let Some(private) = private {
        if let Some(status) = died {
            let log = private.log_path();
            return Err(format!(
                "the private PostgreSQL ended unexpectedly ({status}); {} has the cause",
                log.display()
            )
            .into());
        }
        tracing::info!("the private PostgreSQL {}", private.stop().await);
    }
    match ending {
        ServerExit::Drained => tracing::info!("stopped; all calls finished"),
        ServerExit::CutOff => tracing::warn!("stopped; some calls were still open after the drain timeout"),
    }
    Ok(())
}

/// Stops before the instance has served a call.
async fn stop_early(private: Option<EmbeddedPostgres>) -> Result<(), Box<dyn Error>> {
    notify::notify(NotifyState::Stopping);
    if let Some(private) = private {
        tracing::info!("the private PostgreSQL {}", private.stop().await);
    }
    tracing::info!("stopped before it served");
    Ok(())
}

async fn database(
    database: &DatabaseSource,
) -> Result<(ConnectTarget, Option<EmbeddedPostgres>), rm_devpg::EmbeddedError> {
    let data_dir = match database {
        DatabaseSource::External(target) => return Ok((target.clone(), None)),
        DatabaseSource::Embedded(Some(data_dir)) => data_dir.clone(),
        DatabaseSource::Embedded(None) => rm_devpg::default_data_dir()?,
    };
    tracing::info!(data_dir = %data_dir.display(), "using a private PostgreSQL");
    let private = EmbeddedPostgres::start(rm_devpg::EmbeddedSettings { data_dir, server_options: vec![] }).await?;
    Ok((private.connect_options().into(), Some(private)))
}

/// Waits for the end of the private PostgreSQL. Never completes without one.
async fn has_died(private: Option<&EmbeddedPostgres>) -> std::process::ExitStatus {
    match private {
        Some(private) => private.died().await,
        None => std::future::pending().await,
    }
}
