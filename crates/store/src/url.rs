//! Database URL with several hosts, as libpq parses it. sqlx accepts one host and no `target_session_attrs`.
//!
//! The module rewrites a URL into one sqlx URL per host. Errors never contain a piece of the URL, which may be a
//! password. Caller: [`super::connect_target`].

use std::{fmt, str::FromStr as _, time::Duration};

use sqlx::postgres::PgConnectOptions;

use super::{connect_target::UrlError, endpoint::Settings, session::CONNECT_TIMEOUT};

/// Maximum number of hosts in a URL.
pub const HOSTS_MAX: usize = 16;

/// Bounds of `connect_timeout` per host. A second is too short, as in libpq.
const TIMEOUT_MIN: Duration = Duration::from_secs(2);
const TIMEOUT_MAX: Duration = Duration::from_secs(10);

/// Parameters that are passed to sqlx. The parser drops all others, because sqlx logs their names and values, which may
/// be pieces of a password.
const PARAMETERS: [&str; 13] = [
    "sslmode",
    "ssl-mode",
    "sslrootcert",
    "ssl-root-cert",
    "ssl-ca",
    "sslcert",
    "ssl-cert",
    "sslkey",
    "ssl-key",
    "statement-cache-capacity",
    "dbname",
    "user",
    "password",
];

/// Value of `target_session_attrs`: which of several hosts to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionAttrs {
    /// Any host that accepts connections; the default.
    Any,
    /// A host that accepts writes.
    ReadWrite,
    /// A host that accepts no writes.
    ReadOnly,
    /// A host that is not in recovery.
    Primary,
    /// A host in recovery.
    Standby,
    /// A host in recovery, or else any host.
    PreferStandby,
}

impl SessionAttrs {
    const ALL: [(&'static str, Self); 6] = [
        ("any", Self::Any),
        ("read-write", Self::ReadWrite),
        ("read-only", Self::ReadOnly),
        ("primary", Self::Primary),
        ("standby", Self::Standby),
        ("prefer-standby", Self::PreferStandby),
    ];

    fn parse(text: &str) -> Result<Self, UrlError> {
        let found = Self::ALL.iter().find(|(name, _)| *name == text);
        found.map(|(_, attrs)| *attrs).ok_or(UrlError::SessionAttrs)
    }

    /// Returns whether the value admits a host that accepts writes.
    pub fn may_write(self) -> bool {
        matches!(self, Self::Any | Self::ReadWrite | Self::Primary)
    }
}

impl fmt::Display for SessionAttrs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::ALL.iter().find(|(_, attrs)| attrs == self).map_or("any", |(name, _)| name))
    }
}

/// Parsed URL. No `Debug`, because it may contain a password.
#[derive(Clone)]
pub struct UrlHosts {
    /// Connection options of each host, in the order of the URL; at least one.
    pub options: Vec<PgConnectOptions>,
    /// Connect timeout per host.
    pub timeout: Duration,
    /// Which host to use.
    pub attrs: SessionAttrs,
    /// Session settings.
    pub settings: Settings,
}

impl From<PgConnectOptions> for UrlHosts {
    fn from(options: PgConnectOptions) -> Self {
        Self {
            options: vec![options],
            timeout: CONNECT_TIMEOUT,
            attrs: SessionAttrs::Any,
            settings: Settings::default(),
        }
    }
}

/// Split URL: the parts that sqlx does not support, and the rest.
struct UrlParts<'a> {
    userinfo: Option<&'a str>,
    path: &'a str,
    hosts: Vec<String>,
    ports: Vec<String>,
    timeout: Duration,
    attrs: SessionAttrs,
    settings: Settings,
    /// Parameters for sqlx, unchanged.
    others: Vec<&'a str>,
    /// Parameters with the address (`host`, `hostaddr`, `port`), unchanged.
    place: Vec<&'a str>,
    authority: &'a str,
}

/// Parses a URL.
///
/// # Errors
/// [`UrlError`], by the first fault of the URL.
pub fn parse(url: &str) -> Result<UrlHosts, UrlError> {
    let rest = url.strip_prefix("postgres://").or_else(|| url.strip_prefix("postgresql://")).ok_or(UrlError::Url)?;
    let parts = UrlParts::of(rest)?;
    let options = match parts.hosts.len() {
        // sqlx rejects a user without a host after it.
        0 | 1 if !parts.authority.ends_with('@') => vec![parse_one(&parts.alone())?],
        hosts if hosts > HOSTS_MAX => return Err(UrlError::TooManyHosts(hosts)),
        _ => parts.each()?.iter().map(|url| parse_one(url)).collect::<Result<_, _>>()?,
    };
    Ok(UrlHosts { options, timeout: parts.timeout, attrs: parts.attrs, settings: parts.settings })
}

fn parse_one(url: &str) -> Result<PgConnectOptions, UrlError> {
    PgConnectOptions::from_str(url).map_err(|_| UrlError::Url)
}

impl<'a> UrlParts<'a> {
    fn of(rest: &'a str) -> Result<Self, UrlError> {
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        // The text before the end may be the first part of a password, and the supposed host another part.
        if rest.get(end..).is_some_and(|rest| rest.contains('@')) {
            return Err(UrlError::Unescaped);
        }
        let rest = rest.split('#').next().unwrap_or_default();
        let (authority, rest) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (userinfo, places) = match authority.rsplit_once('@') {
            Some((userinfo, places)) => (Some(userinfo), places),
            None => (None, authority),
        };
        let (hosts, ports) = split_places(places)?;
        let mut parts = Self {
            userinfo,
            path,
            hosts,
            ports,
            timeout: CONNECT_TIMEOUT,
            attrs: SessionAttrs::Any,
            settings: Settings::default(),
            others: vec![],
            place: vec![],
            authority,
        };
        let mut addresses = None;
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let list = || decode(value).map(|list| list.split(',').map(str::to_owned).collect::<Vec<_>>());
            let key = decode(key)?;
            // A plus sign in `options` is a space.
            let text = || decode(&value.replace('+', " "));
            match key.as_str() {
                "host" => parts.hosts = list()?,
                "hostaddr" => addresses = Some(list()?),
                "port" => parts.ports = list()?,
                "target_session_attrs" => parts.attrs = SessionAttrs::parse(&decode(value)?)?,
                "connect_timeout" => parts.timeout = parse_timeout(&decode(value)?)?,
                "options" => parts.settings = parts.settings.and(Settings::parse(&text()?)),
                key if PARAMETERS.contains(&key) => parts.others.push(pair),
                key => {
                    if let Some(name) = key.strip_prefix("options[").and_then(|key| key.strip_suffix(']')) {
                        parts.settings = parts.settings.with([(name, text()?)]);
                    }
                }
            }
            if ["host", "hostaddr", "port"].contains(&key.as_str()) {
                parts.place.push(pair);
            }
        }
        if let Some(addresses) = addresses {
            parts.connect_at(addresses)?;
        }
        Ok(parts)
    }

    /// Replaces host names by `hostaddr`, which needs no name resolution.
    fn connect_at(&mut self, addresses: Vec<String>) -> Result<(), UrlError> {
        let named = self.hosts.iter().any(|host| !host.is_empty());
        if named && self.hosts.len() != addresses.len() {
            return Err(UrlError::Counts { hosts: self.hosts.len(), what: "addresses", count: addresses.len() });
        }
        let mut names = std::mem::take(&mut self.hosts).into_iter();
        let or_name = |address: String| match names.next() {
            Some(name) if address.is_empty() => name,
            _ => address,
        };
        self.hosts = addresses.into_iter().map(or_name).collect();
        Ok(())
    }

    /// Returns the URL of a single host without the parameters that sqlx does not support.
    fn alone(&self) -> String {
        let query: Vec<_> = self.place.iter().chain(&self.others).copied().collect();
        format!("postgres://{}{}?{}", self.authority, self.path, query.join("&"))
    }

    /// Returns one URL per host. User and password become parameters, because no host follows them.
    fn each(&self) -> Result<Vec<String>, UrlError> {
        let as_value = |text: &str| text.replace('&', "%26").replace('+', "%2B");
        let mut common: Vec<String> = self.others.iter().map(|pair| (*pair).to_owned()).collect();
        if let Some(userinfo) = self.userinfo {
            let (user, password) = userinfo.split_once(':').map_or((userinfo, None), |(user, word)| (user, Some(word)));
            let said = [("user", Some(user).filter(|user| !user.is_empty())), ("password", password)];
            // Placed first: later parameters take precedence.
            let said = said.into_iter().filter_map(|(key, text)| Some(format!("{key}={}", as_value(text?))));
            common.splice(0..0, said);
        }
        let ports = match self.ports.len() {
            1 => self.ports.iter().cycle().take(self.hosts.len()).cloned().collect(),
            ports if ports == self.hosts.len() => self.ports.clone(),
            0 => vec![String::new(); self.hosts.len()],
            count => return Err(UrlError::Counts { hosts: self.hosts.len(), what: "ports", count }),
        };
        let of_host = |(host, port): (&String, &String)| {
            if host.is_empty() {
                return Err(UrlError::NamelessHost);
            }
            let mut query = common.clone();
            query.push(format!("host={}", encode(host)));
            query.extend(Some(format!("port={}", encode(port))).filter(|_| !port.is_empty()));
            Ok(format!("postgres:///{}?{}", self.path.trim_start_matches('/'), query.join("&")))
        };
        self.hosts.iter().zip(&ports).map(of_host).collect()
    }
}

/// Splits `host:port,host:port` into the list of hosts and the list of ports, as libpq does.
fn split_places(places: &str) -> Result<(Vec<String>, Vec<String>), UrlError> {
    let (mut hosts, mut ports) = (vec![], vec![]);
    for place in places.split(',') {
        let (host, port) = match place.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((host, port)) => (host, port.strip_prefix(':').unwrap_or(port)),
            None => place.split_once(':').unwrap_or((place, "")),
        };
        hosts.push(decode(host)?);
        ports.push(port.to_owned());
    }
    if ports.iter().all(String::is_empty) {
        ports.clear();
    }
    Ok((hosts, ports))
}

/// Parses `connect_timeout` in seconds. Zero and negative values mean no bound in libpq; here they mean `TIMEOUT_MAX`.
fn parse_timeout(text: &str) -> Result<Duration, UrlError> {
    let seconds: i64 = text.trim().parse().map_err(|_| UrlError::Timeout)?;
    let timeout = u64::try_from(seconds).ok().filter(|seconds| *seconds > 0).map(Duration::from_secs);
    Ok(timeout.unwrap_or(TIMEOUT_MAX).clamp(TIMEOUT_MIN, TIMEOUT_MAX))
}

/// Decodes percent escapes.
fn decode(text: &str) -> Result<String, UrlError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digits = [rest.next(), rest.next()].map(|digit| digit.and_then(|digit| char::from(digit).to_digit(16)));
        let [Some(high), Some(low)] = digits else { return Err(UrlError::Url) };
        bytes.push(u8::try_from(high * 16 + low).map_err(|_| UrlError::Url)?);
    }
    String::from_utf8(bytes).map_err(|_| UrlError::Url)
}

/// Encodes with percent escapes.
fn encode(text: &str) -> String {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._".contains(byte);
    let shown = |byte: u8| if is_plain(&byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns user, address and database of each host, or the error text.
    fn shown_hosts(url: &str) -> Result<(Vec<String>, SessionAttrs), String> {
        let hosts = parse(url).map_err(|error| error.to_string())?;
        let place = |options: &PgConnectOptions| match options.get_socket() {
            Some(socket) => format!("{}:{}", socket.display(), options.get_port()),
            None => format!("{}:{}", options.get_host(), options.get_port()),
        };
        let shown = |options: &PgConnectOptions| {
            let database = options.get_database().unwrap_or_default();
            format!("{}@{}/{database}", options.get_username(), place(options))
        };
        Ok((hosts.options.iter().map(shown).collect(), hosts.attrs))
    }

    #[test]
    fn url_with_several_hosts_is_parsed_like_libpq() {
        use SessionAttrs::{Any, Primary, ReadWrite, Standby};
        for (url, hosts, attrs) in [
            ("postgres://u@h1:1,h2:2/db?target_session_attrs=read-write", &["u@h1:1/db", "u@h2:2/db"][..], ReadWrite),
            ("postgresql://u@/db?host=h1,h2&port=1,2&target_session_attrs=any", &["u@h1:1/db", "u@h2:2/db"], Any),
            ("postgres:///db?user=u&host=h1,h2&port=7", &["u@h1:7/db", "u@h2:7/db"], Any),
            ("postgres://u@h1,h2:2/db", &["u@h1:5432/db", "u@h2:2/db"], Any),
            ("postgres://u@h1,h2/db", &["u@h1:5432/db", "u@h2:5432/db"], Any),
            ("postgres://u:p@h1,h2/db?port=8", &["u@h1:8/db", "u@h2:8/db"], Any),
            ("postgres://u@[::1]:1,[::2]/db", &["u@::1:1/db", "u@::2:5432/db"], Any),
            (
                "postgres://u@%2Frun%2Fa,h2/db?target_session_attrs=primary",
                &["u@/run/a:5432/db", "u@h2:5432/db"],
                Primary,
            ),
            ("postgres://u@/db?host=/run/a,/run/b&port=1,2", &["u@/run/a:1/db", "u@/run/b:2/db"], Any),
            ("postgres://u@a,b/db?hostaddr=127.0.0.1,", &["u@127.0.0.1:5432/db", "u@b:5432/db"], Any),
            ("postgres://a%20b%26c:x@h1,h2/db", &["a b&c@h1:5432/db", "a b&c@h2:5432/db"], Any),
            ("postgres://u@one:3/db?target_session_attrs=standby", &["u@one:3/db"], Standby),
            ("postgres://u@one/db?connect_timeout=5", &["u@one:5432/db"], Any),
            ("postgres://u@x:1/db?host=/run/one", &["u@/run/one:1/db"], Any),
            ("postgres://u@/db?host=/run/one", &["u@/run/one:5432/db"], Any),
        ] {
            let hosts = hosts.iter().map(|host| (*host).to_owned()).collect();
            assert_eq!(shown_hosts(url), Ok((hosts, attrs)), "{url}");
        }
    }

    #[test]
    fn url_that_libpq_rejects_is_refused_with_cause() {
        let many = format!("postgres://{}/db", vec!["h"; HOSTS_MAX + 1].join(","));
        for (url, why) in [
            ("postgres://h1,h2,h3/db?port=1,2", "names 3 hosts and 2 ports"),
            ("postgres://h1,h2/db?hostaddr=127.0.0.1", "names 2 hosts and 1 addresses"),
            ("postgres://h1,/db", "without a name"),
            ("postgres://h1,h2/db?target_session_attrs=master", "target_session_attrs must be"),
            ("postgres://h1,h2/db?connect_timeout=soon", "connect_timeout is not a number"),
            ("postgres://u:a/b@h/db", "an @ after"),
            ("postgres://h1:x,h2:2/db", "is not a PostgreSQL URL"),
            ("postgres://h1,%zz/db", "is not a PostgreSQL URL"),
            ("mysql://h1,h2/db", "is not a PostgreSQL URL"),
            (&many, "17 hosts"),
        ] {
            let error = shown_hosts(url).unwrap_err();
            assert!(error.contains(why), "{url}: {error}");
        }
    }

    #[test]
    fn connect_timeout_of_host_is_bounded() {
        for (seconds, timeout) in [("0", 10), ("-1", 10), ("1", 2), ("2", 2), ("7", 7), ("3600", 10)] {
            let hosts = parse(&format!("postgres://h1,h2/db?connect_timeout={seconds}")).unwrap();
            assert_eq!(hosts.timeout, Duration::from_secs(timeout), "{seconds}");
        }
        assert_eq!(parse("postgres://h1/db").unwrap().timeout, CONNECT_TIMEOUT);
    }

    #[test]
    fn url_password_with_escapes_is_kept_whole() {
        let hosts = parse("postgres://u:a%40b+c&d%25:e@h1,h2/db").unwrap();
        for options in hosts.options {
            use sqlx::ConnectOptions as _;
            let url = options.to_url_lossy();
            assert_eq!(url.password(), Some("a%40b%2Bc%26d%25%3Ae"), "{url}");
        }
    }

    #[test]
    fn url_options_become_settings_of_the_session() {
        for (query, settings) in [
            (
                "options=-c%20search_path%3Da%5C%20b%20-cgeqo=off+--work-mem=1MB",
                &[("search_path", "a b"), ("geqo", "off"), ("work_mem", "1MB")][..],
            ),
            ("options[search_path]=x&options%5Bgeqo%5D=off", &[("search_path", "x"), ("geqo", "off")]),
            ("options=-c%20Geqo%3Don&options[geqo]=off", &[("geqo", "off")]),
            ("options=-d%203&schema=public", &[]),
        ] {
            let hosts = parse(&format!("postgres://h/db?{query}")).unwrap();
            assert_eq!(hosts.settings, Settings::default().with(settings.iter().copied()), "{query}");
            assert!(hosts.options[0].get_options().is_none(), "the startup message has no options");
        }
    }

    #[test]
    fn url_error_and_display_show_no_password_piece() {
        const PIECES: [&str; 3] = ["Kw7x", "Qz9v", "Lm3t"];
        let marks = [
            "", ":", "/", "?", "#", "@", "&", "=", ",", "[", "]", "%", "%4", " ", "\\", ";", "+", "\u{e9}", "://",
            "?host=",
        ];
        let templates = [
            "postgres://u:{}@h/db",
            "postgres://u:{}@h1,h2/db",
            "postgres://u:{}@/db?host=/run/x",
            "postgresql://u:{}@h:1/db?target_session_attrs=any",
            "postgres://h/db?user=u&password={}",
            "postgres://h/db?user=u&pasword={}",
            "postgres://h/db?target_session_attrs={}",
            "postgres://h/db?connect_timeout={}",
            "postgres://h/db?sslmode={}",
            "postgres:/u:{}@h/db",
            "postgre://u:{}@h/db",
            "jdbc:postgresql://h/db?user=u&password={}",
            "host=h user=u password={}",
            "{}",
        ];
        for template in templates {
            for first in marks {
                for second in marks {
                    // A password that starts with digits could be parsed as a port.
                    for start in ["", "5432"] {
                        let password = format!("{start}{}{first}{}{second}{}", PIECES[0], PIECES[1], PIECES[2]);
                        let password = if start.is_empty() { password } else { password.replacen(PIECES[0], "", 1) };
                        let url = template.replace("{}", &password);
                        let shown = match super::super::connect_target::ConnectTarget::parse(&url) {
                            Ok(target) => format!("{target} {target:?}"),
                            Err(error) => format!("{error} {error:?}"),
                        };
                        assert!(!PIECES.iter().any(|piece| shown.contains(piece)), "{url}: {shown}");
                    }
                }
            }
        }
    }
}
