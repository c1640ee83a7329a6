//! Command line and settings of the server: read once from flags and environment into typed values. All mistakes of the
//! settings are reported together.
//!
//! Callers: `main` and the tests of the documentation. Never: prints a secret; a setting with one has no `Debug` output for
//! it.
//!
//! - `parse`: durations, numbers and sizes; `listen`: listen addresses; `database`: selection of the PostgreSQL;
//! - `command_line`: the grammar; `help`: help of the program; `wrong_words`: errors of the grammar;
//! - `former_words`: commands of earlier versions; `removed`: settings of earlier versions.

use std::{net::SocketAddr, path::PathBuf};

use clap::Args;

use crate::server::{Options, SecuritySettings};
use rm_edge::{
    edge::{BODY_BYTES_LEAST, EdgeBounds, ListenAddress},
    resource_manager::RequestTimeouts,
    tls,
};
use rm_external::allowed::AllowedHosts;
use rm_model::limit::LimitReplacement;
use rm_service::heartbeat::LivenessTimeouts;
use rm_telemetry::{
    LogSettings,
    settings::{self, LogFormat},
    traces,
};

mod command_line;
mod database;
mod former_words;
mod help;
mod listen;
mod parse;
mod removed;
mod wrong_words;

use listen::{HTTP_LISTEN, http_default, parse_addresses, parse_listen};
use parse::{is_set, ok_or_record, parse_bytes, parse_number};

pub use command_line::{LaunchMode, StartFailure, command_line};
pub use database::{DatabaseArguments, DatabaseSource};
pub use help::ABOUT;
pub use parse::{parse_duration, read_limits};

/// Arguments of `serve`, not validated.
#[derive(Debug, Args)]
struct Arguments {
    /// Address of gRPC: HOST:PORT, with port 0 for a free port, or unix:/PATH for a socket.
    #[arg(long, env = "LINKIS_RM_LISTEN", default_value = "127.0.0.1:50051", value_name = "ADDRESS")]
    listen: String,

    /// Address of the page, metrics and health over HTTP; "" for no HTTP [default: loopback, port of --listen + 1000].
    #[arg(long, env = "LINKIS_RM_HTTP_LISTEN", value_name = "ADDRESS")]
    http_listen: Option<String>,

    /// Allow addresses beyond loopback without a certificate. Until the first token exists, every caller may do everything.
    #[arg(long, env = "LINKIS_RM_INSECURE", value_parser = clap::builder::FalseyValueParser::new())]
    insecure: bool,

    /// File with the certificate chain (PEM) of both addresses; a changed file is read again.
    #[arg(long, env = "LINKIS_RM_TLS_CERT", value_name = "FILE")]
    tls_cert: Option<PathBuf>,

    /// File with the key (PEM) of --tls-cert.
    #[arg(long, env = "LINKIS_RM_TLS_KEY", value_name = "FILE")]
    tls_key: Option<PathBuf>,

    /// File with the authorities (PEM) of client certificates; callers without a certificate need a token.
    #[arg(long, env = "LINKIS_RM_TLS_CLIENT_CA", value_name = "FILE")]
    tls_client_ca: Option<PathBuf>,

    /// JSON file with the trusted JWT issuers, their keys and the roles of their claims (docs/SECURITY.md); a changed file is read
    /// again. Keys are fetched from --external-hosts only.
    #[arg(long, env = "LINKIS_RM_JWT_CONFIG", value_name = "FILE")]
    jwt_config: Option<PathBuf>,

    #[command(flatten)]
    database: DatabaseArguments,

    /// Leave the schema unchanged, for a database role that may not change it; linkis-rm migrate brings it up to date.
    #[arg(long, env = "LINKIS_RM_NO_MIGRATE", value_parser = clap::builder::FalseyValueParser::new())]
    no_migrate: bool,

    /// TOML file with all limits, as limit export writes it; the start replaces the stored ones [default: they stay].
    #[arg(long, env = "LINKIS_RM_LIMITS", value_name = "FILE")]
    limits: Option<PathBuf>,

    /// Time after which a ticket without a confirmed engine expires, if the request sets none.
    #[arg(long, env = "LINKIS_RM_LOCK_TTL", default_value = "10m", value_name = "DURATION")]
    lock_ttl: String,

    /// Maximum time that a call waits for resource locks. The deadline of the call can shorten it.
    #[arg(long, env = "LINKIS_RM_REQUEST_TIMEOUT", default_value = "30s", value_name = "DURATION")]
    request_timeout: String,

    /// Maximum time of a request in a wait queue.
    #[arg(long, env = "LINKIS_RM_MAX_WAIT", default_value = "10m", value_name = "DURATION")]
    max_wait: String,

    /// Time without reports after which an EM is silent: requests without an EM are not placed there.
    #[arg(long, env = "LINKIS_RM_EM_SILENT_AFTER", default_value = "30s", value_name = "DURATION")]
    em_silent_after: String,

    /// Time without reports after which an EM is lost and unregistered with its tickets; at least twice --em-silent-after.
    #[arg(long, env = "LINKIS_RM_EM_LOST_AFTER", default_value = "5m", value_name = "DURATION")]
    em_lost_after: String,

    /// Number of consecutive reports without a used ticket after which the ticket is lost: 1 to 100.
    #[arg(long, env = "LINKIS_RM_LOST_AFTER_REPORTS", default_value = "3", value_name = "NUMBER")]
    lost_after_reports: String,

    /// Time that ended tickets and request ids are stored.
    #[arg(long, env = "LINKIS_RM_HISTORY", default_value = "7d", value_name = "DURATION")]
    history: String,

    /// Time that open calls get when the instance stops.
    #[arg(long, env = "LINKIS_RM_DRAIN_TIMEOUT", default_value = "10s", value_name = "DURATION")]
    drain_timeout: String,

    /// Time between SIGTERM and the stop: calls are served meanwhile, and health is NOT_SERVING.
    #[arg(long, env = "LINKIS_RM_SHUTDOWN_DELAY", default_value = "0s", value_name = "DURATION")]
    shutdown_delay: String,

    /// Maximum number of requests and registrations that are decided at one time; more are rejected for a retry.
    #[arg(long, env = "LINKIS_RM_MAX_CONCURRENT_CALLS", default_value = "4096", value_name = "NUMBER")]
    max_concurrent_calls: String,

    /// Maximum number of requests in wait queues; more are rejected for a retry.
    #[arg(long, env = "LINKIS_RM_MAX_WAITING", default_value = "4000", value_name = "NUMBER")]
    max_waiting: String,

    /// Maximum number of connections; more are closed.
    #[arg(long, env = "LINKIS_RM_MAX_CONNECTIONS", default_value = "16384", value_name = "NUMBER")]
    max_connections: String,

    /// Age at which a connection is closed after its calls have ended, ± 10 % [default: none].
    #[arg(long, env = "LINKIS_RM_MAX_CONNECTION_AGE", value_name = "DURATION")]
    max_connection_age: Option<String>,

    /// Maximum number of open calls of one connection; the client delays more.
    #[arg(long, env = "LINKIS_RM_MAX_CONNECTION_CALLS", default_value = "1024", value_name = "NUMBER")]
    max_connection_calls: String,

    /// Timeout of a handshake; in a crowd, timeout of the authentication of a connection.
    #[arg(long, env = "LINKIS_RM_HANDSHAKE_TIMEOUT", default_value = "5s", value_name = "DURATION")]
    handshake_timeout: String,

    /// Timeout of the message of a call.
    #[arg(long, env = "LINKIS_RM_BODY_TIMEOUT", default_value = "10s", value_name = "DURATION")]
    body_timeout: String,

    /// Budget of the messages of all open calls. One connection gets a quarter; messages above 64 KB share a half.
    #[arg(long, env = "LINKIS_RM_MAX_BODY_BYTES", default_value = "64m", value_name = "SIZE")]
    max_body_bytes: String,

    /// Allowed hosts of external clusters, separated by commas: HOST, HOST:PORT, *.DOMAIN, *.DOMAIN:PORT, or * for all.
    #[arg(long, env = "LINKIS_RM_EXTERNAL_HOSTS", default_value = "", value_name = "HOSTS")]
    external_hosts: String,

    /// Format of logs on standard error: text, json, or auto (text on a terminal, otherwise JSON).
    #[arg(long, env = "LINKIS_RM_LOG_FORMAT", default_value = "auto", value_name = "FORMAT")]
    log_format: String,

    /// Log level: error, warn, info, debug (each decision) or trace. RUST_LOG sets it by module, and wins.
    #[arg(long, env = "LINKIS_RM_LOG_LEVEL", default_value = "info", value_name = "LEVEL")]
    log_level: String,

    /// Value of the variable RUST_LOG.
    #[arg(skip = std::env::var("RUST_LOG").unwrap_or_default())]
    rust_log: String,
}

/// Validated settings of the server.
#[derive(Debug, Clone)]
pub struct ServiceConfig {
    /// Address of the gRPC server.
    pub listen: ListenAddress,
    /// Addresses for metrics and health; the first free one is used. `None` to disable them.
    pub http_listen: Option<Vec<SocketAddr>>,
    /// The PostgreSQL to use.
    pub database: DatabaseSource,
    /// Complete set of limits at the start; `None` to keep the stored ones.
    pub limits: Option<LimitReplacement>,
    /// Settings of the instance.
    pub options: Options,
    /// Logs and traces.
    pub telemetry: Telemetry,
}

/// Log and trace settings.
#[derive(Debug, Clone)]
pub struct Telemetry {
    /// Log settings.
    pub log: LogSettings,
    /// Trace export; `None` to disable it.
    pub traces: Option<traces::TraceSettings>,
}

/// All mistakes in the settings.
#[derive(Debug, thiserror::Error)]
#[error("the settings cannot be used:\n{}", .0.iter().map(|m| format!("  - {m}\n")).collect::<String>())]
pub struct ServiceConfigError(Vec<String>);

impl Arguments {
    fn check(self) -> Result<ServiceConfig, ServiceConfigError> {
        let variable = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let mut mistakes: Vec<String> = removed::variables(variable).collect();
        let tls = self.tls(&mut mistakes);
        // Mistakes in the certificates are reported separately.
        let may_leave = self.insecure || tls.as_ref().is_none_or(Option::is_some);
        let listen = ok_or_record(&mut mistakes, parse_listen(&self.listen, may_leave));
        let http_listen = match &self.http_listen {
            None => Some(listen.as_ref().map(|listen| vec![http_default(listen)])),
            Some(text) if text.is_empty() => Some(None),
            Some(text) => ok_or_record(&mut mistakes, parse_addresses(HTTP_LISTEN, text, may_leave)).map(Some),
        };
        let database = ok_or_record(&mut mistakes, self.database.choose());
        let limits = self.limits.as_deref().map(|file| read_limits("--limits (LINKIS_RM_LIMITS)", file)).transpose();
        let limits = ok_or_record(&mut mistakes, limits);
        let mut duration = |name: &str, text: &str, least: &str, most: &str| {
            ok_or_record(&mut mistakes, parse_duration(name, text, least, most))
        };
        let lock_ttl = duration("--lock-ttl (LINKIS_RM_LOCK_TTL)", &self.lock_ttl, "1ms", "24h");
        let request_timeout =
            duration("--request-timeout (LINKIS_RM_REQUEST_TIMEOUT)", &self.request_timeout, "1ms", "1h");
        let max_wait = duration("--max-wait (LINKIS_RM_MAX_WAIT)", &self.max_wait, "1s", "24h");
        // A shorter retention could delete a request id that is repeated after an outage.
        let history = duration("--history (LINKIS_RM_HISTORY)", &self.history, "1h", "3650d");
        let drain_timeout = duration("--drain-timeout (LINKIS_RM_DRAIN_TIMEOUT)", &self.drain_timeout, "1ms", "1h");
        let shutdown_delay = duration("--shutdown-delay (LINKIS_RM_SHUTDOWN_DELAY)", &self.shutdown_delay, "0s", "1h");
        let liveness = self.liveness(&mut mistakes);
        let bounds = self.bounds(&mut mistakes);
        let external_hosts = self.external_hosts(&mut mistakes);
        let telemetry = self.telemetry(&mut mistakes);
        // A missing value has recorded a mistake.
        let config = || {
            let (listen, http_listen) = (listen?, http_listen?);
            let jwt = self.jwt_config.filter(|path| is_set(path));
            let options = Options {
                times: RequestTimeouts { lock_ttl: lock_ttl?, request_timeout: request_timeout?, max_wait: max_wait? },
                liveness: liveness?,
                history: history?,
                drain_timeout: drain_timeout?,
                shutdown_delay: shutdown_delay?,
                bounds: bounds?,
                security: security(tls?, jwt, (&listen, http_listen.as_deref()), self.insecure),
                external_hosts: external_hosts?,
                migrates: !self.no_migrate,
            };
            Some(ServiceConfig {
                listen,
                http_listen,
                database: database?,
                limits: limits?,
                options,
                telemetry: telemetry?,
            })
        };
        config().filter(|_| mistakes.is_empty()).ok_or(ServiceConfigError(mistakes))
    }

    fn external_hosts(&self, mistakes: &mut Vec<String>) -> Option<AllowedHosts> {
        let hosts = AllowedHosts::parse(&self.external_hosts);
        ok_or_record(
            mistakes,
            hosts.map_err(|problem| format!("--external-hosts (LINKIS_RM_EXTERNAL_HOSTS): {problem}")),
        )
    }

    fn telemetry(&self, mistakes: &mut Vec<String>) -> Option<Telemetry> {
        let format = LogFormat::parse("--log-format (LINKIS_RM_LOG_FORMAT)", &self.log_format);
        let format = ok_or_record(mistakes, format);
        let filter = match self.rust_log.as_str() {
            "" => settings::filter("--log-level (LINKIS_RM_LOG_LEVEL)", &self.log_level),
            directives => settings::directives(directives),
        };
        let filter = ok_or_record(mistakes, filter);
        let traces = ok_or_record(mistakes, traces::TraceSettings::read(|name| std::env::var(name).ok()));
        Some(Telemetry { log: LogSettings { format: format?, filter: filter? }, traces: traces? })
    }

    fn tls(&self, mistakes: &mut Vec<String>) -> Option<Option<tls::TlsFiles>> {
        let (cert, key) =
            (self.tls_cert.clone().filter(|path| is_set(path)), self.tls_key.clone().filter(|path| is_set(path)));
        let client_ca = self.tls_client_ca.clone().filter(|path| is_set(path));
        let missing = match (cert, key, client_ca) {
            (None, None, None) => return Some(None),
            (Some(cert), Some(key), client_ca) => return Some(Some(tls::TlsFiles { cert, key, client_ca })),
            (None, ..) => "--tls-cert (LINKIS_RM_TLS_CERT)",
            (Some(_), None, _) => "--tls-key (LINKIS_RM_TLS_KEY)",
        };
        mistakes.push(format!("{missing}: is missing; a certificate needs its key, and a key its certificate"));
        None
    }

    fn bounds(&self, mistakes: &mut Vec<String>) -> Option<EdgeBounds> {
        let name = "--max-connections (LINKIS_RM_MAX_CONNECTIONS)";
        let connections = ok_or_record(mistakes, parse_number(name, &self.max_connections, 1, 1_000_000));
        let name = "--max-connection-age (LINKIS_RM_MAX_CONNECTION_AGE)";
        let age = self.max_connection_age.as_deref().filter(|text| !text.is_empty());
        let age = age.map(|text| parse_duration(name, text, "1s", "365d")).transpose();
        let connection_age = ok_or_record(mistakes, age);
        let name = "--max-concurrent-calls (LINKIS_RM_MAX_CONCURRENT_CALLS)";
        let calls = ok_or_record(mistakes, parse_number(name, &self.max_concurrent_calls, 1, 1_000_000));
        let name = "--max-waiting (LINKIS_RM_MAX_WAITING)";
        let waiting = ok_or_record(mistakes, parse_number(name, &self.max_waiting, 1, 100_000));
        let name = "--max-connection-calls (LINKIS_RM_MAX_CONNECTION_CALLS)";
        let connection_streams = ok_or_record(mistakes, parse_number(name, &self.max_connection_calls, 1, 65_536));
        let name = "--handshake-timeout (LINKIS_RM_HANDSHAKE_TIMEOUT)";
        let handshake_timeout = ok_or_record(mistakes, parse_duration(name, &self.handshake_timeout, "100ms", "1h"));
        let name = "--body-timeout (LINKIS_RM_BODY_TIMEOUT)";
        let body_timeout = ok_or_record(mistakes, parse_duration(name, &self.body_timeout, "100ms", "1h"));
        let name = "--max-body-bytes (LINKIS_RM_MAX_BODY_BYTES)";
        let body_bytes = ok_or_record(mistakes, parse_bytes(name, &self.max_body_bytes, BODY_BYTES_LEAST));
        Some(EdgeBounds {
            connections: connections?,
            connection_age: connection_age?,
            calls: calls?,
            waiting: waiting?,
            connection_streams: connection_streams?,
            handshake_timeout: handshake_timeout?,
            body_timeout: body_timeout?,
            body_bytes: body_bytes?,
        })
    }

    fn liveness(&self, mistakes: &mut Vec<String>) -> Option<LivenessTimeouts> {
        let silent = "--em-silent-after (LINKIS_RM_EM_SILENT_AFTER)";
        let silent_after = ok_or_record(mistakes, parse_duration(silent, &self.em_silent_after, "1s", "1d"));
        let lost = "--em-lost-after (LINKIS_RM_EM_LOST_AFTER)";
        let lost_after = ok_or_record(mistakes, parse_duration(lost, &self.em_lost_after, "2s", "30d"));
        let reports = "--lost-after-reports (LINKIS_RM_LOST_AFTER_REPORTS)";
        let reports = ok_or_record(mistakes, parse_number(reports, &self.lost_after_reports, 1, 100));
        let (silent_after, lost_after) = silent_after.zip(lost_after)?;
        // Every EM then has time for a report after an outage of the service or a jump of its clock.
        if lost_after < silent_after * 2 {
            mistakes.push(format!(
                "{lost}: {:?} must be at least twice {silent}, which is {:?}",
                self.em_lost_after, self.em_silent_after
            ));
            return None;
        }
        Some(LivenessTimeouts { silent_after, lost_after, lost_after_reports: reports? })
    }
}

/// Unauthenticated callers are accepted only on local addresses or with `insecure`, and never with client certificates or
/// JWTs configured.
fn security(
    tls: Option<tls::TlsFiles>,
    jwt: Option<PathBuf>,
    (listen, http_listen): (&ListenAddress, Option<&[SocketAddr]>),
    insecure: bool,
) -> SecuritySettings {
    let has_client_ca = tls.as_ref().is_some_and(|tls| tls.client_ca.is_some());
    let are_here = |addresses: &[SocketAddr]| addresses.iter().all(|address| address.ip().is_loopback());
    let (is_here, is_http_as_open) = match listen {
        ListenAddress::Tcp(addresses) => (are_here(addresses), true),
        // File permissions of the socket control the callers, but not the visitors of the page.
        ListenAddress::Unix(_) => (true, insecure),
    };
    let is_here = is_here && http_listen.is_none_or(are_here);
    let is_open = !has_client_ca && jwt.is_none() && (insecure || is_here);
    SecuritySettings { is_open, is_page_open: is_open && is_http_as_open, tls, jwt }
}

#[cfg(test)]
mod tests;
