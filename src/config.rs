//! Settings: by flag and environment, read once into typed values, all mistakes reported together.

use std::{
    fmt::Display,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _},
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use clap::{Args, CommandFactory as _, Parser, Subcommand};
use secrecy::{ExposeSecret as _, SecretString};

use crate::{
    commands::Command,
    domain::{limit::Rule, resource::parse_size},
    external::allowed::AllowedHosts,
    limits_file,
    server::Security,
    service::heartbeat::LivenessTimeouts,
    store::target::Target,
    telemetry::{
        LogSettings,
        settings::{self, LogFormat},
        traces,
    },
    tls,
    transport::edge::{BODY_BYTES_LEAST, Bounds, Listen},
};

/// A resource manager for compute clusters in the style of Apache Linkis.
///
/// Serves gRPC, by default with a private PostgreSQL that it starts itself. With a command, asks a service that runs.
#[derive(Debug, Parser)]
#[command(name = "linkis-rm", version, args_conflicts_with_subcommands = true)]
struct CommandLine {
    #[command(subcommand)]
    task: Option<Task>,

    #[command(flatten)]
    serve: Arguments,
}

/// What the process is to do.
#[derive(Debug, Subcommand)]
enum Task {
    /// Serves: the same as no command at all.
    Serve(Box<Arguments>),
    #[command(flatten)]
    Command(Command),
}

/// All that can be set of serving, as it is said.
#[derive(Debug, Args)]
struct Arguments {
    /// Where to serve gRPC: HOST:PORT, of which port 0 picks a free one, or unix:/PATH for a socket on this machine.
    #[arg(long, env = "LINKIS_RM_LISTEN", default_value = "127.0.0.1:50051", value_name = "ADDRESS")]
    listen: String,

    /// Where to serve metrics and health over HTTP; port 0 picks a free one, "" serves none [default: this machine, the port of --listen + 1000]
    #[arg(long, env = "LINKIS_RM_HTTP_LISTEN", value_name = "ADDRESS")]
    http_listen: Option<String>,

    /// Serve others than this machine although nothing is encrypted; as long as no token was made, everybody may do everything.
    #[arg(long, env = "LINKIS_RM_INSECURE", value_parser = clap::builder::FalseyValueParser::new())]
    insecure: bool,

    /// The certificate to encrypt with, in PEM, and those between it and a root; taken up anew when the file changes.
    #[arg(long, env = "LINKIS_RM_TLS_CERT", value_name = "FILE")]
    tls_cert: Option<PathBuf>,

    /// The key of --tls-cert, in PEM.
    #[arg(long, env = "LINKIS_RM_TLS_KEY", value_name = "FILE")]
    tls_key: Option<PathBuf>,

    /// The certificates by which those of callers are believed, in PEM; whoever has none needs a token then.
    #[arg(long, env = "LINKIS_RM_TLS_CLIENT_CA", value_name = "FILE")]
    tls_client_ca: Option<PathBuf>,

    /// A JSON file that says whose JWTs are believed, by which keys, and what their claims make of callers (docs/SECURITY.md); taken up
    /// anew when it changes. Keys are asked for at --external-hosts alone.
    #[arg(long, env = "LINKIS_RM_JWT_CONFIG", value_name = "FILE")]
    jwt_config: Option<PathBuf>,

    #[command(flatten)]
    database: DatabaseArguments,

    /// Leave the schema of the database as it is, for a role that may not change it: linkis-rm migrate brings it up to date.
    #[arg(long, env = "LINKIS_RM_NO_MIGRATE", value_parser = clap::builder::FalseyValueParser::new())]
    no_migrate: bool,

    /// A TOML file with all limits; the server starts with exactly these. Without it, limits are left as they are.
    #[arg(long, env = "LINKIS_RM_LIMITS", value_name = "FILE")]
    limits: Option<PathBuf>,

    /// How long a grant stays locked without its engine reporting in, if the request does not say.
    #[arg(long, env = "LINKIS_RM_LOCK_TTL", default_value = "10m", value_name = "DURATION")]
    lock_ttl: String,

    /// How long a call may wait for resource locks; its own gRPC deadline can only shorten it.
    #[arg(long, env = "LINKIS_RM_REQUEST_TIMEOUT", default_value = "30s", value_name = "DURATION")]
    request_timeout: String,

    /// How long a request may wait in line for resources.
    #[arg(long, env = "LINKIS_RM_MAX_WAIT", default_value = "10m", value_name = "DURATION")]
    max_wait: String,

    /// How long an EM that reports may be silent before it is not chosen for requests any more.
    #[arg(long, env = "LINKIS_RM_EM_SILENT_AFTER", default_value = "30s", value_name = "DURATION")]
    em_silent_after: String,

    /// How long an EM that reports may be silent before it is unregistered with its tickets; at least twice --em-silent-after.
    #[arg(long, env = "LINKIS_RM_EM_LOST_AFTER", default_value = "5m", value_name = "DURATION")]
    em_lost_after: String,

    /// In how many reports of its EM in a row a used ticket may be missing before it is given up, counting the last: 1 to 100.
    #[arg(long, env = "LINKIS_RM_LOST_AFTER_REPORTS", default_value = "3", value_name = "NUMBER")]
    lost_after_reports: String,

    /// How long ended tickets and request ids are remembered.
    #[arg(long, env = "LINKIS_RM_HISTORY", default_value = "7d", value_name = "DURATION")]
    history: String,

    /// How long calls under way may take to finish when the server is told to stop.
    #[arg(long, env = "LINKIS_RM_DRAIN_TIMEOUT", default_value = "10s", value_name = "DURATION")]
    drain_timeout: String,

    /// How long to go on serving, and say that it stops, before the server does.
    #[arg(long, env = "LINKIS_RM_SHUTDOWN_DELAY", default_value = "0s", value_name = "DURATION")]
    shutdown_delay: String,

    /// How many calls that ask for resources, or register, may be judged at once; more are told to try again.
    #[arg(long, env = "LINKIS_RM_MAX_CONCURRENT_CALLS", default_value = "4096", value_name = "NUMBER")]
    max_concurrent_calls: String,

    /// How many requests may wait in line; more are told to try again.
    #[arg(long, env = "LINKIS_RM_MAX_WAITING", default_value = "4000", value_name = "NUMBER")]
    max_waiting: String,

    /// How many connections there may be; more are closed at once.
    #[arg(long, env = "LINKIS_RM_MAX_CONNECTIONS", default_value = "16384", value_name = "NUMBER")]
    max_connections: String,

    /// How old a connection gets, give or take a tenth, before its client is asked to open another, and none of its calls is cut off
    /// [default: as old as it likes]
    #[arg(long, env = "LINKIS_RM_MAX_CONNECTION_AGE", value_name = "DURATION")]
    max_connection_age: Option<String>,

    /// How many calls one connection may have under way; its client holds back more.
    #[arg(long, env = "LINKIS_RM_MAX_CONNECTION_CALLS", default_value = "1024", value_name = "NUMBER")]
    max_connection_calls: String,

    /// How long a new connection may take for its first words.
    #[arg(long, env = "LINKIS_RM_HANDSHAKE_TIMEOUT", default_value = "5s", value_name = "DURATION")]
    handshake_timeout: String,

    /// How long the message of a call may take to arrive.
    #[arg(long, env = "LINKIS_RM_BODY_TIMEOUT", default_value = "10s", value_name = "DURATION")]
    body_timeout: String,

    /// How large the messages of all calls under way may be together; a quarter of it for one connection, half of it for those
    /// above 64 KB.
    #[arg(long, env = "LINKIS_RM_MAX_BODY_BYTES", default_value = "64m", value_name = "SIZE")]
    max_body_bytes: String,

    /// Which hosts external clusters may be asked at, separated by commas: HOST, HOST:PORT, *.DOMAIN, *.DOMAIN:PORT or, for all, *.
    #[arg(long, env = "LINKIS_RM_EXTERNAL_HOSTS", default_value = "", value_name = "HOSTS")]
    external_hosts: String,

    /// How logs are written, to standard error: auto (text at a terminal, else json), text or json.
    #[arg(long, env = "LINKIS_RM_LOG_FORMAT", default_value = "auto", value_name = "FORMAT")]
    log_format: String,

    /// How much is logged: error, warn, info, debug (every decision) or trace. RUST_LOG says it more finely, and wins.
    #[arg(long, env = "LINKIS_RM_LOG_LEVEL", default_value = "info", value_name = "LEVEL")]
    log_level: String,

    /// What RUST_LOG asks for.
    #[arg(skip = std::env::var("RUST_LOG").unwrap_or_default())]
    rust_log: String,
}

/// Which PostgreSQL to use, as it is said.
#[derive(Debug, Clone, Args)]
pub struct DatabaseArguments {
    /// The PostgreSQL (15 or newer) to use, e.g. postgres://user:password@host/database. Without it, a private one is started.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true, value_name = "URL")]
    database_url: Option<SecretString>,

    /// A file with that URL instead, read again when it changes: connections that are made from then on show the new password.
    #[arg(long, env = "DATABASE_URL_FILE", value_name = "FILE")]
    database_url_file: Option<PathBuf>,

    /// Where the private PostgreSQL keeps its data [default: /var/lib/linkis-rm as root, else linkis-rm in the user's data folder]
    #[arg(long, env = "LINKIS_RM_DATA_DIR", value_name = "FOLDER")]
    data_dir: Option<PathBuf>,
}

impl DatabaseArguments {
    /// What is said; the mistake otherwise.
    pub fn choose(&self) -> Result<Database, String> {
        let url = self.database_url.as_ref().filter(|url| !url.expose_secret().is_empty());
        let file = self.database_url_file.clone().filter(|path| is_set(path));
        let (name, target) = match (url, file) {
            (None, None) => return Ok(Database::Embedded(self.data_dir.clone())),
            (Some(_), Some(_)) => {
                return Err(
                    "--database-url-file (DATABASE_URL_FILE): DATABASE_URL is set, too; set only one of them".into()
                );
            }
            (Some(url), None) => ("--database-url (DATABASE_URL)", Target::parse(url.expose_secret())),
            (None, Some(file)) => ("--database-url-file (DATABASE_URL_FILE)", Target::in_file(file)),
        };
        if self.data_dir.is_some() {
            return Err(format!(
                "--data-dir (LINKIS_RM_DATA_DIR): is for the private PostgreSQL, but {name} names another; set only one of them"
            ));
        }
        target.map(Database::External).map_err(|error| format!("{name}: {error}"))
    }
}

/// What the process was started for.
#[derive(Debug)]
pub enum Mode {
    /// To serve, with these settings.
    Serve(Box<Config>),
    /// To ask a service that runs.
    Command(Command),
}

impl Mode {
    /// From the command line and the environment.
    ///
    /// # Errors
    /// [`NotStarted`] also where help or the version is asked for.
    pub fn from_command_line() -> Result<Self, NotStarted> {
        let CommandLine { task, serve } = CommandLine::try_parse()?;
        match task {
            Some(Task::Command(command)) => Ok(Self::Command(command)),
            Some(Task::Serve(serve)) => Ok(Self::Serve(Box::new(serve.check()?))),
            None => Ok(Self::Serve(Box::new(serve.check()?))),
        }
    }
}

/// Why nothing is done.
#[derive(Debug, thiserror::Error)]
pub enum NotStarted {
    /// The command line cannot be understood, or asks for help: it knows what to print, and where.
    #[error(transparent)]
    CommandLine(#[from] clap::Error),
    /// The settings cannot be used.
    #[error(transparent)]
    Settings(#[from] ConfigError),
}

/// The command line with all commands and settings, for those who describe it.
pub fn command_line() -> clap::Command {
    CommandLine::command()
}

/// Everything that can be set, checked.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where to serve gRPC.
    pub listen: Listen,
    /// Where to serve metrics and health: at the first of these addresses that can be had. `None` for nowhere.
    pub http_listen: Option<Vec<SocketAddr>>,
    /// Which PostgreSQL to use.
    pub database: Database,
    /// Whether the database's schema is brought up to date.
    pub migrates: bool,
    /// All limits to start with; `None` to leave them as they are.
    pub limits: Option<Vec<Rule>>,
    /// How long a grant stays locked if the request does not say.
    pub lock_ttl: Duration,
    /// How long a call may wait for resource locks.
    pub request_timeout: Duration,
    /// How long a request may wait in line for resources.
    pub max_wait: Duration,
    /// How long signs of life of EMs may be missing.
    pub patience: LivenessTimeouts,
    /// How long ended tickets and request ids are remembered.
    pub history: Duration,
    /// How long calls may take to finish when the server stops.
    pub drain_timeout: Duration,
    /// How long to go on serving before the server stops.
    pub shutdown_delay: Duration,
    /// What callers may take.
    pub bounds: Bounds,
    /// What callers have to show.
    pub security: Security,
    /// Which hosts external clusters may be asked at.
    pub external_hosts: AllowedHosts,
    /// What is logged, and where traces go.
    pub telemetry: Telemetry,
}

/// What is told beside metrics.
#[derive(Debug, Clone)]
pub struct Telemetry {
    /// What is logged.
    pub log: LogSettings,
    /// Where traces go; `None` for nowhere.
    pub traces: Option<traces::Settings>,
}

/// Which PostgreSQL to use.
#[derive(Debug, Clone)]
pub enum Database {
    /// One that somebody else runs.
    External(Target),
    /// A private one, started here; `None` for the default folder.
    Embedded(Option<PathBuf>),
}

/// All that is wrong with the settings.
#[derive(Debug, thiserror::Error)]
#[error("the settings cannot be used:\n{}", .0.iter().map(|m| format!("  - {m}\n")).collect::<String>())]
pub struct ConfigError(Vec<String>);

impl Arguments {
    fn check(self) -> Result<Config, ConfigError> {
        let mut mistakes = Vec::new();
        let tls = self.tls(&mut mistakes);
        // What is wrong with the certificates is told by itself.
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
        // Shorter, and a call that is repeated after an outage would not be known any more.
        let history = duration("--history (LINKIS_RM_HISTORY)", &self.history, "1h", "3650d");
        let drain_timeout = duration("--drain-timeout (LINKIS_RM_DRAIN_TIMEOUT)", &self.drain_timeout, "1ms", "1h");
        let shutdown_delay = duration("--shutdown-delay (LINKIS_RM_SHUTDOWN_DELAY)", &self.shutdown_delay, "0s", "1h");
        let patience = self.patience(&mut mistakes);
        let bounds = self.bounds(&mut mistakes);
        let external_hosts = self.external_hosts(&mut mistakes);
        let telemetry = self.telemetry(&mut mistakes);
        match (
            listen,
            http_listen,
            database,
            limits,
            lock_ttl,
            request_timeout,
            max_wait,
            patience,
            history,
            drain_timeout,
            shutdown_delay,
            bounds,
            tls,
            external_hosts,
            telemetry,
        ) {
            (
                Some(listen),
                Some(http_listen),
                Some(database),
                Some(limits),
                Some(lock_ttl),
                Some(request_timeout),
                Some(max_wait),
                Some(patience),
                Some(history),
                Some(drain_timeout),
                Some(shutdown_delay),
                Some(bounds),
                Some(tls),
                Some(external_hosts),
                Some(telemetry),
            ) => Ok(Config {
                security: security(tls, self.jwt_config.filter(|path| is_set(path)), &listen, self.insecure),
                migrates: !self.no_migrate,
                listen,
                http_listen,
                database,
                limits,
                lock_ttl,
                request_timeout,
                max_wait,
                patience,
                history,
                drain_timeout,
                shutdown_delay,
                bounds,
                external_hosts,
                telemetry,
            }),
            _ => Err(ConfigError(mistakes)),
        }
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
        let traces = ok_or_record(mistakes, traces::Settings::read(|name| std::env::var(name).ok()));
        Some(Telemetry { log: LogSettings { format: format?, filter: filter? }, traces: traces? })
    }

    fn tls(&self, mistakes: &mut Vec<String>) -> Option<Option<tls::Files>> {
        let (cert, key) =
            (self.tls_cert.clone().filter(|path| is_set(path)), self.tls_key.clone().filter(|path| is_set(path)));
        let client_ca = self.tls_client_ca.clone().filter(|path| is_set(path));
        let missing = match (cert, key, client_ca) {
            (None, None, None) => return Some(None),
            (Some(cert), Some(key), client_ca) => return Some(Some(tls::Files { cert, key, client_ca })),
            (None, ..) => "--tls-cert (LINKIS_RM_TLS_CERT)",
            (Some(_), None, _) => "--tls-key (LINKIS_RM_TLS_KEY)",
        };
        mistakes.push(format!("{missing}: is missing; a certificate and its key belong together"));
        None
    }

    fn bounds(&self, mistakes: &mut Vec<String>) -> Option<Bounds> {
        let name = "--max-connections (LINKIS_RM_MAX_CONNECTIONS)";
        let connections = ok_or_record(mistakes, parse_number(name, &self.max_connections, 1, 1_000_000));
        let name = "--max-connection-age (LINKIS_RM_MAX_CONNECTION_AGE)";
        let age = self.max_connection_age.as_deref().filter(|text| !text.is_empty());
        let age = age.map(|text| parse_duration(name, text, "1s", "365d")).transpose();
        let connection_age = ok_or_record(mistakes, age);
        let name = "--max-concurrent-calls (LINKIS_RM_MAX_CONCURRENT_CALLS)";
        let calls = ok_or_record(mistakes, parse_number(name, &self.max_concurrent_calls, 1, 1_000_000));
        let name = "--max-waiting (LINKIS_RM_MAX_WAITING)";
        let waiting = ok_or_record(mistakes, parse_number(name, &self.max_waiting, 1, 1_000_000));
        let name = "--max-connection-calls (LINKIS_RM_MAX_CONNECTION_CALLS)";
        let connection_streams = ok_or_record(mistakes, parse_number(name, &self.max_connection_calls, 1, 65_536));
        let name = "--handshake-timeout (LINKIS_RM_HANDSHAKE_TIMEOUT)";
        let handshake_timeout = ok_or_record(mistakes, parse_duration(name, &self.handshake_timeout, "100ms", "1h"));
        let name = "--body-timeout (LINKIS_RM_BODY_TIMEOUT)";
        let body_timeout = ok_or_record(mistakes, parse_duration(name, &self.body_timeout, "100ms", "1h"));
        let name = "--max-body-bytes (LINKIS_RM_MAX_BODY_BYTES)";
        let body_bytes = ok_or_record(mistakes, parse_bytes(name, &self.max_body_bytes, BODY_BYTES_LEAST));
        Some(Bounds {
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

    fn patience(&self, mistakes: &mut Vec<String>) -> Option<LivenessTimeouts> {
        let silent = "--em-silent-after (LINKIS_RM_EM_SILENT_AFTER)";
        let silent_after = ok_or_record(mistakes, parse_duration(silent, &self.em_silent_after, "1s", "1d"));
        let lost = "--em-lost-after (LINKIS_RM_EM_LOST_AFTER)";
        let lost_after = ok_or_record(mistakes, parse_duration(lost, &self.em_lost_after, "2s", "30d"));
        let reports = "--lost-after-reports (LINKIS_RM_LOST_AFTER_REPORTS)";
        let reports = ok_or_record(mistakes, parse_number(reports, &self.lost_after_reports, 1, 100));
        let (silent_after, lost_after) = silent_after.zip(lost_after)?;
        // So that every EM has the time for a report after the service was away, or after its clock jumped.
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

/// As with other settings, an empty one is none.
fn is_set(path: &Path) -> bool {
    !path.as_os_str().is_empty()
}

/// Everybody may do everything only where nobody else comes, or on purpose; and never if certificates or JWTs tell who calls.
fn security(tls: Option<tls::Files>, jwt: Option<PathBuf>, listen: &Listen, insecure: bool) -> Security {
    let has_client_ca = tls.as_ref().is_some_and(|tls| tls.client_ca.is_some());
    let is_here = match listen {
        Listen::Tcp(addresses) => addresses.iter().all(|address| address.ip().is_loopback()),
        // Its rights say who may call.
        Listen::Unix(_) => true,
    };
    Security { is_open: !has_client_ca && jwt.is_none() && (insecure || is_here), tls, jwt }
}

/// A whole number between `least` and `most`.
fn parse_number<N: FromStr + PartialOrd + Display>(name: &str, text: &str, least: N, most: N) -> Result<N, String> {
    let number = text.parse().ok().filter(|number| (&least..=&most).contains(&number));
    number.ok_or_else(|| format!("{name}: {text:?} is not a number from {least} to {most}"))
}

/// A size of at least `least` bytes.
fn parse_bytes(name: &str, text: &str, least: usize) -> Result<usize, String> {
    let bytes = parse_size(text).ok().and_then(|bytes| usize::try_from(bytes).ok());
    bytes.filter(|bytes| *bytes >= least).ok_or_else(|| {
        let least = least.div_ceil(1 << 20);
        format!("{name}: {text:?} is not a size of at least {least}m; for example 64m or 1g")
    })
}

fn ok_or_record<T>(mistakes: &mut Vec<String>, parsed: Result<T, String>) -> Option<T> {
    parsed.map_err(|mistake| mistakes.push(mistake)).ok()
}

/// A setting that says where to listen, and an example of it.
type ListenSetting = (&'static str, &'static str);

const LISTEN: ListenSetting = ("--listen (LINKIS_RM_LISTEN)", "127.0.0.1:50051");
const HTTP_LISTEN: ListenSetting = ("--http-listen (LINKIS_RM_HTTP_LISTEN)", "127.0.0.1:51051");

/// How far above the port of gRPC that of metrics and health is, unless it is set.
const HTTP_PORT_ABOVE: u16 = 1000;

/// Where metrics and health are if gRPC is at no port.
const HTTP_PORT: u16 = 51_051;

/// What stands before a path.
const UNIX: &str = "unix:";

/// On this machine only, wherever gRPC is served; on any free port if gRPC is, or if there is none so far above it.
fn http_default(listen: &Listen) -> SocketAddr {
    let first = match listen {
        Listen::Tcp(addresses) => addresses.first(),
        Listen::Unix(_) => None,
    };
    let Some(listen) = first else { return (Ipv4Addr::LOCALHOST, HTTP_PORT).into() };
    let loopback: IpAddr = if listen.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
    let port = if listen.port() == 0 { 0 } else { listen.port().checked_add(HTTP_PORT_ABOVE).unwrap_or(0) };
    SocketAddr::new(loopback, port)
}

/// A file that is a socket is on this machine, and its rights say who may call.
fn parse_listen(text: &str, may_leave: bool) -> Result<Listen, String> {
    let Some(path) = text.strip_prefix(UNIX) else { return parse_addresses(LISTEN, text, may_leave).map(Listen::Tcp) };
    let path = path.strip_prefix("//").unwrap_or(path);
    match path {
        "" => Err(format!("{}: {text:?} names no file; for example unix:/run/linkis-rm/rm.sock", LISTEN.0)),
        path => Ok(Listen::Unix(path.into())),
    }
}

/// All addresses that a host has, each with the port.
fn parse_addresses((name, example): ListenSetting, text: &str, may_leave: bool) -> Result<Vec<SocketAddr>, String> {
    let has_port = text.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    if !has_port {
        return Err(format!("{name}: {text:?} is not HOST:PORT; for example {example}"));
    }
    let found = text.to_socket_addrs().map_err(|error| format!("{name}: {text:?} cannot be found: {error}"))?;
    let addresses: Vec<_> = found.collect();
    match addresses.iter().find(|address| !address.ip().is_loopback()) {
        None if addresses.is_empty() => Err(format!("{name}: {text:?} has no address")),
        Some(address) if !may_leave => Err(format!(
            "{name}: {address} can be reached from other machines, and nothing is encrypted; add --tls-cert and --tls-key, \
             or --insecure (LINKIS_RM_INSECURE=true) if the network is closed"
        )),
        _ => Ok(addresses),
    }
}

/// The largest limits file that is read: a hundred thousand limits, and as much again.
const LIMITS_BYTES_MAX: u64 = 16 << 20;

/// The limits in the file that a setting names; all mistakes otherwise.
pub fn read_limits(setting: &str, path: &Path) -> Result<Vec<Rule>, String> {
    let name = format!("{setting}: {}", path.display());
    let size = std::fs::metadata(path).map_err(|error| format!("{name}: {error}"))?.len();
    if size > LIMITS_BYTES_MAX {
        return Err(format!("{name}: has {size} bytes; at most {LIMITS_BYTES_MAX} are read"));
    }
    let text = std::fs::read_to_string(path).map_err(|error| format!("{name}: {error}"))?;
    limits_file::parse(&text).map_err(|error| format!("{name}:\n{}", error.to_string().replace("line ", "    line ")))
}

/// A duration between `least` and `most`, which are durations themselves; the mistake otherwise.
pub fn parse_duration(name: &str, text: &str, least: &str, most: &str) -> Result<Duration, String> {
    let wrong = |_| format!("{name}: {text:?} is not a duration; for example 500ms, 30s, 10m or 7d");
    let duration = humantime::parse_duration(text).map_err(wrong)?;
    if humantime::parse_duration(least).is_ok_and(|least| duration < least)
        || humantime::parse_duration(most).is_ok_and(|most| duration > most)
    {
        return Err(format!("{name}: {text:?} must be between {least} and {most}"));
    }
    Ok(duration)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(arguments: &[&str]) -> Result<Config, ConfigError> {
        CommandLine::parse_from(std::iter::once(&"linkis-rm").chain(arguments)).serve.check()
    }

    #[test]
    fn the_defaults_hold() {
        let config = check(&[]).unwrap();
        assert_eq!(config.listen.to_string(), "127.0.0.1:50051");
        assert_eq!(config.lock_ttl, Duration::from_secs(600));
        assert_eq!(config.patience, LivenessTimeouts::DEFAULT);
        assert_eq!(config.bounds, Bounds::DEFAULT);
    }

    #[test]
    fn all_mistakes_are_reported_at_once() {
        let error =
            check(&["--listen", "here", "--lock-ttl", "soon", "--history", "0s", "--database-url", "mysql://x"])
                .unwrap_err();
        assert_eq!(error.0.len(), 4, "{error}");
    }

    #[test]
    fn patience_is_checked() {
        for (arguments, told) in [
            (
                &["--em-silent-after", "3m"][..],
                "--em-lost-after (LINKIS_RM_EM_LOST_AFTER): \"5m\" must be at least twice",
            ),
            (&["--em-silent-after", "0s"], "--em-silent-after"),
            (&["--lost-after-reports", "0"], "from 1 to 100"),
            (&["--lost-after-reports", "101"], "from 1 to 100"),
            (&["--lost-after-reports", "few"], "from 1 to 100"),
        ] {
            let error = check(arguments).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        }
        let wrong = ["--em-silent-after", "3m", "--lost-after-reports", "0"];
        assert_eq!(check(&wrong).unwrap_err().0.len(), 2);
        assert!(check(&["--em-silent-after", "150s"]).is_ok());
    }

    #[test]
    fn bounds_are_checked() {
        for (flag, wrong, told) in [
            ("--max-connections", "0", "from 1 to 1000000"),
            ("--max-connections", "many", "from 1 to 1000000"),
            ("--max-connection-calls", "100000", "from 1 to 65536"),
            ("--max-concurrent-calls", "0", "from 1 to 1000000"),
            ("--max-waiting", "none", "from 1 to 1000000"),
            ("--max-connection-age", "1ms", "between 1s and 365d"),
            ("--shutdown-delay", "2h", "between 0s and 1h"),
            ("--handshake-timeout", "0s", "between 100ms and 1h"),
            ("--body-timeout", "2h", "between 100ms and 1h"),
            ("--max-body-bytes", "1m", "at least 8m"),
            ("--max-body-bytes", "all", "at least 8m"),
        ] {
            let error = check(&[flag, wrong]).unwrap_err().to_string();
            assert!(error.contains(flag) && error.contains(told), "{error}");
        }
        assert_eq!(check(&["--max-body-bytes", "16m"]).unwrap().bounds.body_bytes, 16 << 20);
    }

    #[test]
    fn no_setting_shows_a_password() {
        let url = ["--database-url", "postgres://me:hunter2@db.example/rm"];
        let config = check(&url).unwrap();
        assert!(config.migrates && !check(&[url[0], url[1], "--no-migrate"]).unwrap().migrates);
        let arguments = CommandLine::parse_from(["linkis-rm", url[0], url[1]]);
        let command = CommandLine::parse_from(["linkis-rm", "migrate", url[0], url[1]]);
        for shown in [format!("{config:?}"), format!("{arguments:?}"), format!("{command:?}")] {
            assert!(shown.to_lowercase().contains("database") && !shown.contains("hunter2"), "{shown}");
        }
        let error = check(&[url[0], url[1], "--database-url-file", "/x"]).unwrap_err();
        assert!(!format!("{error:?} {error}").contains("hunter2"), "{error}");
    }

    #[test]
    fn a_command_needs_none_of_the_settings() {
        let parse = |line: &str| CommandLine::try_parse_from(line.split(' '));
        for line in ["linkis-rm audit", "linkis-rm repair --address http://rm:1", "linkis-rm audit --address rm:1,rm:2"]
        {
            assert!(parse(line).unwrap().task.is_some(), "{line}");
        }
        for line in ["linkis-rm --listen 127.0.0.1:1 audit", "linkis-rm audit --listen 127.0.0.1:1", "linkis-rm mend"] {
            assert!(parse(line).is_err(), "{line}");
        }
        assert!(parse("linkis-rm --listen 127.0.0.1:1").unwrap().task.is_none());
        let Some(Task::Serve(serve)) = parse("linkis-rm serve --listen 127.0.0.1:1").unwrap().task else {
            panic!("it serves");
        };
        assert_eq!(serve.listen, "127.0.0.1:1");
    }

    #[test]
    fn every_command_is_explained_and_names_its_role() {
        command_line().debug_assert();
        let without_service = ["serve", "migrate", "tokens", "health", "completions", "help"];
        let mut names = 0;
        for command in command_line().get_subcommands().filter(|c| !without_service.contains(&c.get_name())) {
            let leaves: Vec<_> = match command.get_subcommands().collect::<Vec<_>>() {
                none if none.is_empty() => vec![command],
                some => some,
            };
            for leaf in leaves {
                let needs = leaf.get_after_help().map(ToString::to_string).unwrap_or_default();
                assert!(leaf.get_about().is_some() && needs.starts_with("Needs the role "), "{}", leaf.get_name());
                names += 1;
            }
        }
        assert!(names > 20, "{names}");
    }

    #[test]
    fn metrics_are_beside_grpc_and_on_this_machine_unless_told_otherwise() {
        for (arguments, http_listen) in [
            (&[][..], Some("127.0.0.1:51051")),
            (&["--listen", "127.0.0.1:0"], Some("127.0.0.1:0")),
            (&["--listen", "0.0.0.0:7000", "--insecure"], Some("127.0.0.1:8000")),
            (&["--listen", "[::]:7000", "--insecure"], Some("[::1]:8000")),
            (&["--listen", "127.0.0.1:65000"], Some("127.0.0.1:0")),
            (&["--http-listen", "127.0.0.2:9"], Some("127.0.0.2:9")),
            (&["--http-listen", ""], None),
            (&["--listen", "unix:/run/rm.sock"], Some("127.0.0.1:51051")),
        ] {
            let told = check(arguments).unwrap().http_listen.map(|addresses| addresses[0].to_string());
            assert_eq!(told.as_deref(), http_listen, "{arguments:?}");
        }
        let error = check(&["--http-listen", "here"]).unwrap_err().to_string();
        assert!(error.contains("for example 127.0.0.1:51051"), "{error}");
        let error = check(&["--listen", "here"]).unwrap_err();
        assert_eq!(error.0.len(), 1, "{error}");
    }

    #[test]
    fn it_listens_at_names_and_files() {
        let told = |listen: &str| check(&["--listen", listen]).map(|config| config.listen);
        for listen in ["unix:/run/rm.sock", "unix:///run/rm.sock"] {
            assert_eq!(told(listen).unwrap(), Listen::Unix("/run/rm.sock".into()));
        }
        let Listen::Tcp(addresses) = told("localhost:7").unwrap() else { panic!("a name is no file") };
        assert!(!addresses.is_empty() && addresses.iter().all(|address| address.port() == 7), "{addresses:?}");
        for (wrong, why) in [
            ("unix:", "names no file"),
            ("localhost", "is not HOST:PORT"),
            ("localhost:http", "is not HOST:PORT"),
            ("no-such-host.invalid:7", "cannot be found"),
        ] {
            assert!(told(wrong).unwrap_err().to_string().contains(why), "{wrong}");
        }
        assert!(check(&["--http-listen", "localhost:7"]).is_ok());
    }

    #[test]
    fn others_are_served_only_on_purpose() {
        assert!(check(&["--listen", "0.0.0.0:1"]).unwrap_err().to_string().contains("--insecure"));
        assert!(check(&["--listen", "0.0.0.0:1", "--insecure"]).is_ok());
        assert!(check(&["--listen", "[::1]:0"]).is_ok());
        assert!(check(&["--http-listen", "0.0.0.0:1"]).unwrap_err().to_string().contains("--http-listen"));
        assert!(check(&["--http-listen", "0.0.0.0:1", "--insecure"]).is_ok());
    }

    #[test]
    fn everybody_may_do_everything_only_where_nobody_else_comes_or_on_purpose() {
        let tls = ["--tls-cert", "c", "--tls-key", "k"];
        let mutual = ["--tls-cert", "c", "--tls-key", "k", "--tls-client-ca", "a"];
        let (world, insecure) = (["--listen", "0.0.0.0:1"], ["--insecure"]);
        for (arguments, is_open) in [
            (vec![], true),
            ([&world[..], &insecure].concat(), true),
            (tls.to_vec(), true),
            ([&world[..], &tls].concat(), false),
            ([&world[..], &tls, &insecure].concat(), true),
            (mutual.to_vec(), false),
            ([&world[..], &mutual, &insecure].concat(), false),
            (vec!["--jwt-config", "j"], false),
            ([&world[..], &insecure, &["--jwt-config", "j"]].concat(), false),
        ] {
            assert_eq!(check(&arguments).unwrap().security.is_open, is_open, "{arguments:?}");
        }
        for (wrong, told) in [
            (vec!["--tls-cert", "c"], "--tls-key"),
            (vec!["--tls-key", "k"], "--tls-cert"),
            (vec!["--tls-client-ca", "a"], "--tls-cert"),
            ([&world[..], &["--tls-key", "k"]].concat(), "--tls-cert"),
        ] {
            let error = check(&wrong).unwrap_err();
            assert!(error.0.len() == 1 && error.to_string().contains(told), "{error}");
        }
    }

    #[test]
    fn logs_are_set_by_name() {
        let told = |arguments: &[&str]| {
            let arguments = CommandLine::parse_from(std::iter::once(&"linkis-rm").chain(arguments)).serve;
            Arguments { rust_log: String::new(), ..arguments }.check().map(|config| config.telemetry.log)
        };
        let (auto, debug) = (told(&[]).unwrap(), told(&["--log-level", "debug", "--log-format", "json"]).unwrap());
        assert_eq!((auto.format, auto.filter.as_str()), (LogFormat::Auto, "info,sqlx=warn"));
        assert_eq!((debug.format, debug.filter.as_str()), (LogFormat::Json, "info,sqlx=warn,linkis_rm=debug"));
        let error = told(&["--log-level", "loud", "--log-format", "xml"]).unwrap_err();
        assert!(error.0.len() == 2 && error.to_string().contains("(LINKIS_RM_LOG_LEVEL): \"loud\""), "{error}");
        let by_rust_log = |rust_log: &str| {
            let arguments = CommandLine::parse_from(["linkis-rm", "--log-level", "warn"]).serve;
            Arguments { rust_log: rust_log.to_owned(), ..arguments }.check().map(|config| config.telemetry.log.filter)
        };
        assert_eq!(by_rust_log("linkis_rm=trace").unwrap(), "linkis_rm=trace", "it wins");
        assert!(by_rust_log("linkis_rm=loud").unwrap_err().to_string().contains("RUST_LOG"));
    }

    #[test]
    fn a_database_is_said_once_and_its_password_shows_nowhere() {
        let url = "postgres://me:hunter2@db.example/rm";
        let file = std::env::temp_dir().join(format!("linkis-rm-url-{}", std::process::id()));
        std::fs::write(&file, format!("{url}\n")).unwrap();
        let path = file.to_str().unwrap();
        let at_once = CommandLine::parse_from(["linkis-rm", "--database-url", url]);
        let shown =
            format!("{at_once:?} {:?} {:?}", check(&["--database-url", url]), check(&["--database-url-file", path]));
        assert!(!shown.contains("hunter2") && shown.matches("db.example:5432 (rm)").count() == 2, "{shown}");
        for wrong in [
            &["--database-url", url, "--database-url-file", path][..],
            &["--database-url-file", path, "--data-dir", "/x"],
            &["--database-url-file", "/nowhere/at/all"],
        ] {
            let error = check(wrong).unwrap_err().to_string();
            assert!(error.contains("--database-url-file") && !error.contains("hunter2"), "{error}");
        }
        std::fs::remove_file(file).unwrap();
    }
}
