//! Tests of parsing and mistakes, and of the completeness of docs/CONFIGURATION.md.

use std::{collections::BTreeSet, time::Duration};

use super::{
    command_line::{CommandLine, ProcessTask},
    *,
};

fn check(arguments: &[&str]) -> Result<ServiceConfig, ServiceConfigError> {
    CommandLine::read(std::iter::once(&"linkis-rm").chain(arguments)).unwrap().serve.check()
}

#[test]
fn defaults_match_constants() {
    let config = check(&[]).unwrap();
    assert_eq!(config.listen.to_string(), "127.0.0.1:50051");
    assert_eq!(config.options.times.lock_ttl, Duration::from_secs(600));
    assert_eq!(config.options.liveness, LivenessTimeouts::DEFAULT);
    assert_eq!(config.options.bounds, EdgeBounds::DEFAULT);
}

#[test]
fn mistakes_are_reported_together() {
    let error = check(&["--listen", "here", "--lock-ttl", "soon", "--history", "0s", "--database-url", "mysql://x"])
        .unwrap_err();
    assert_eq!(error.0.len(), 4, "{error}");
}

#[test]
fn limits_file_mistakes_are_indented() {
    let file = std::env::temp_dir().join(format!("linkis-rm-limits-{}.toml", std::process::id()));
    std::fs::write(&file, "[[limit]]\nmax = { cores = 1\n").unwrap();
    let mistakes = read_limits("FILE", &file).unwrap_err();
    std::fs::remove_file(&file).unwrap();
    assert!(mistakes.contains(":\n    line ") && mistakes.contains("unclosed inline table"), "{mistakes}");
}

#[test]
fn liveness_timeouts_are_checked() {
    for (arguments, text) in [
        (&["--em-silent-after", "3m"][..], "--em-lost-after (LINKIS_RM_EM_LOST_AFTER): \"5m\" must be at least twice"),
        (&["--em-silent-after", "0s"], "--em-silent-after"),
        (&["--lost-after-reports", "0"], "from 1 to 100"),
        (&["--lost-after-reports", "101"], "from 1 to 100"),
        (&["--lost-after-reports", "few"], "from 1 to 100"),
    ] {
        let error = check(arguments).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
    let wrong = ["--em-silent-after", "3m", "--lost-after-reports", "0"];
    assert_eq!(check(&wrong).unwrap_err().0.len(), 2);
    assert!(check(&["--em-silent-after", "150s"]).is_ok());
}

#[test]
fn protection_is_described() {
    let (tls, here) = (["--tls-cert", "c", "--tls-key", "k"], ["--listen", "127.0.0.1:1"]);
    for (arguments, text) in [
        (&[&here[..]][..], "nothing; every caller may do everything until a token is created"),
        (&[&here, &["--jwt-config", "j"]], "tokens or JWTs"),
        (&[&here, &tls], "TLS; every caller may do everything until a token is created"),
        (&[&["--listen", "0.0.0.0:1"], &tls], "TLS, with tokens"),
        (&[&tls, &["--jwt-config", "j"]], "TLS, with tokens or JWTs"),
        (&[&tls, &["--tls-client-ca", "a"]], "TLS, with certificates or tokens"),
        (&[&tls, &["--tls-client-ca", "a", "--jwt-config", "j"]], "TLS, with certificates, tokens or JWTs"),
    ] {
        assert_eq!(check(&arguments.concat()).unwrap().options.security.to_string(), text, "{arguments:?}");
    }
}

#[test]
fn bounds_are_checked() {
    for (flag, wrong, text) in [
        ("--max-connections", "0", "from 1 to 1000000"),
        ("--max-connections", "many", "from 1 to 1000000"),
        ("--max-connection-calls", "100000", "from 1 to 65536"),
        ("--max-concurrent-calls", "0", "from 1 to 1000000"),
        ("--max-waiting", "none", "from 1 to 100000"),
        ("--max-waiting", "100001", "from 1 to 100000"),
        ("--max-connection-age", "1ms", "between 1s and 365d"),
        ("--shutdown-delay", "2h", "between 0s and 1h"),
        ("--handshake-timeout", "0s", "between 100ms and 1h"),
        ("--body-timeout", "2h", "between 100ms and 1h"),
        ("--max-body-bytes", "1m", "at least 8m"),
        ("--max-body-bytes", "all", "at least 8m"),
    ] {
        let error = check(&[flag, wrong]).unwrap_err().to_string();
        assert!(error.contains(flag) && error.contains(text), "{error}");
    }
    assert_eq!(check(&["--max-body-bytes", "16m"]).unwrap().options.bounds.body_bytes, 16 << 20);
}

#[test]
fn removed_settings_are_refused_with_replacement() {
    for (flag, variable, instead) in [
        ("--committers", "LINKIS_RM_COMMITTERS", "each instance has one committer"),
        ("--standby-url", "LINKIS_RM_STANDBY_URL", "name all hosts of the database in DATABASE_URL"),
        ("--standby-url-file", "LINKIS_RM_STANDBY_URL_FILE", "name all hosts of the database in DATABASE_URL"),
    ] {
        for arguments in [&["linkis-rm", flag, "2"][..], &["linkis-rm", "serve", &format!("{flag}=2")]] {
            let error = CommandLine::read(arguments).unwrap_err().to_string();
            assert!(
                error.contains(&format!("{flag} ({variable}): is removed; ")) && error.contains(instead),
                "{error}"
            );
        }
        let by_variable: Vec<String> = removed::variables(|name| name == variable).collect();
        assert_eq!(by_variable, [removed::flag(flag).unwrap()]);
    }
    assert_eq!(removed::variables(|_| false).count(), 0);
    assert!(command_line().get_arguments().all(|known| removed::flag(&format!("--{}", known.get_id())).is_none()));
    let unknown = CommandLine::read(["linkis-rm", "--comitters"]).unwrap_err();
    assert!(matches!(unknown, StartFailure::WrongWords(_)));
}

#[test]
fn no_setting_shows_a_password() {
    let url = ["--database-url", "postgres://me:hunter2@db.example/rm"];
    let config = check(&url).unwrap();
    assert!(config.options.migrates && !check(&[url[0], url[1], "--no-migrate"]).unwrap().options.migrates);
    let arguments = CommandLine::read(["linkis-rm", url[0], url[1]]).unwrap();
    let command = CommandLine::read(["linkis-rm", "migrate", url[0], url[1]]).unwrap();
    for shown in [format!("{config:?}"), format!("{arguments:?}"), format!("{command:?}")] {
        assert!(shown.to_lowercase().contains("database") && !shown.contains("hunter2"), "{shown}");
    }
    let error = check(&[url[0], url[1], "--database-url-file", "/x"]).unwrap_err();
    assert!(!format!("{error:?} {error}").contains("hunter2"), "{error}");
}

#[test]
fn commands_need_no_settings() {
    let parse = |line: &str| CommandLine::read(line.split(' '));
    for line in ["linkis-rm audit", "linkis-rm repair --address http://rm:1", "linkis-rm audit --address rm:1,rm:2"] {
        assert!(parse(line).unwrap().task.is_some(), "{line}");
    }
    for line in ["linkis-rm --listen 127.0.0.1:1 audit", "linkis-rm audit --listen 127.0.0.1:1", "linkis-rm mend"] {
        assert!(parse(line).is_err(), "{line}");
    }
    assert!(parse("linkis-rm --listen 127.0.0.1:1").unwrap().task.is_none());
    let Some(ProcessTask::Serve(serve)) = parse("linkis-rm serve --listen 127.0.0.1:1").unwrap().task else {
        panic!("serve is a task");
    };
    assert_eq!(serve.listen, "127.0.0.1:1");
}

/// Returns all commands that have no verbs, with their words.
fn leaves(command: &clap::Command, words: &str) -> Vec<(String, clap::Command)> {
    let verbs = command.get_subcommands().filter(|verb| verb.get_name() != "help");
    let below: Vec<_> = verbs.flat_map(|verb| leaves(verb, &format!("{words} {}", verb.get_name()))).collect();
    if below.is_empty() { vec![(words.to_owned(), command.clone())] } else { below }
}

#[test]
fn commands_have_help_with_role_and_example() {
    command_line().debug_assert();
    let without_service = ["serve", "migrate", "token", "health", "completions", "complete-words", "man"];
    let leaves = leaves(&command_line(), "linkis-rm");
    for (words, leaf) in &leaves {
        let help = leaf.get_after_help().map(ToString::to_string).unwrap_or_default();
        let noun = words.split(' ').nth(1).unwrap();
        assert!(leaf.get_about().is_some(), "{words}");
        assert!(without_service.contains(&noun) || help.contains("\nNeeds the role "), "{words}");
        let example = help.lines().nth(1).unwrap().trim();
        assert!(example.starts_with(words), "{words}: {example}");
        let blanks = example.split('"').enumerate();
        let quoted = blanks.map(|(at, part)| if at % 2 == 1 { part.replace(' ', "_") } else { part.to_owned() });
        let command_line: String = quoted.collect();
        let parsed = CommandLine::read(command_line.split(" > ").next().unwrap().split(' '));
        assert!(parsed.is_ok(), "{example}: {}", parsed.unwrap_err());
    }
    assert!(leaves.len() > 30, "{}", leaves.len());
}

#[test]
fn wrong_words_name_the_nearest() {
    for (line, text) in [
        ("limits lst", "no command \"limit lst\"; nearest: linkis-rm limit list"),
        ("tikets", "no command \"tikets\"; nearest: linkis-rm ticket"),
        ("xyzzy", "no command \"xyzzy\"; linkis-rm --help lists them"),
        (
            "em list --state slient",
            "--state: no \"slient\"; one of healthy, warn, unhealthy, silent, draining; nearest: silent",
        ),
        ("em list --stat silent", "no option \"--stat\" of linkis-rm em list; nearest: --state"),
        ("overview extra", "no argument \"extra\" of linkis-rm overview; linkis-rm overview --help lists them"),
        ("--listen 127.0.0.1:1 audit", "--listen is a setting of the server; write it after serve, or omit audit"),
        ("--address rm:1", "--address is for a command; without one, the program serves"),
        ("--address rm:1 migrate", "--address has no effect on migrate; omit it"),
        ("demo -o json", "--output has no effect on demo; omit it"),
    ] {
        let error = CommandLine::read(std::iter::once("linkis-rm").chain(line.split(' '))).unwrap_err();
        assert!(matches!(error, StartFailure::WrongWords(_)), "{line}: {error}");
        assert_eq!(error.to_string(), text, "{line}");
    }
}

#[test]
fn global_options_are_valid_before_and_after_the_command() {
    for line in ["-a rm:1 em list -o json", "em -a rm:1 list -o json", "-o json em list -a rm:1"] {
        let parsed = CommandLine::read(std::iter::once("linkis-rm").chain(line.split(' '))).unwrap();
        let shown = format!("{:?}", parsed.task);
        assert!(shown.contains("address: \"rm:1\"") && shown.contains("output: Json,"), "{line}: {shown}");
    }
}

#[test]
fn http_address_defaults_to_loopback_beside_grpc() {
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
        let text = check(arguments).unwrap().http_listen.map(|addresses| addresses[0].to_string());
        assert_eq!(text.as_deref(), http_listen, "{arguments:?}");
    }
    let error = check(&["--http-listen", "here"]).unwrap_err().to_string();
    assert!(error.contains("for example 127.0.0.1:51051"), "{error}");
    let error = check(&["--listen", "here"]).unwrap_err();
    assert_eq!(error.0.len(), 1, "{error}");
}

#[test]
fn listen_address_accepts_names_and_sockets() {
    let text = |listen: &str| check(&["--listen", listen]).map(|config| config.listen);
    for listen in ["unix:/run/rm.sock", "unix:///run/rm.sock"] {
        assert_eq!(text(listen).unwrap(), ListenAddress::Unix("/run/rm.sock".into()));
    }
    let ListenAddress::Tcp(addresses) = text("localhost:7").unwrap() else { panic!("a host name is a TCP address") };
    assert!(!addresses.is_empty() && addresses.iter().all(|address| address.port() == 7), "{addresses:?}");
    for (wrong, why) in [
        ("unix:", "names no file"),
        ("localhost", "is not HOST:PORT"),
        ("localhost:http", "is not HOST:PORT"),
        ("no-such-host.invalid:7", "cannot be resolved"),
    ] {
        assert!(text(wrong).unwrap_err().to_string().contains(why), "{wrong}");
    }
    assert!(check(&["--http-listen", "localhost:7"]).is_ok());
}

#[test]
fn remote_address_needs_tls_or_insecure() {
    assert!(check(&["--listen", "0.0.0.0:1"]).unwrap_err().to_string().contains("--insecure"));
    assert!(check(&["--listen", "0.0.0.0:1", "--insecure"]).is_ok());
    assert!(check(&["--listen", "[::1]:0"]).is_ok());
    assert!(check(&["--http-listen", "0.0.0.0:1"]).unwrap_err().to_string().contains("--http-listen"));
    assert!(check(&["--http-listen", "0.0.0.0:1", "--insecure"]).is_ok());
}

#[test]
fn open_access_needs_loopback_or_insecure() {
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
        ([&tls[..], &["--http-listen", "0.0.0.0:2"]].concat(), false),
        (vec!["--jwt-config", "j"], false),
        ([&world[..], &insecure, &["--jwt-config", "j"]].concat(), false),
    ] {
        let security = check(&arguments).unwrap().options.security;
        assert_eq!((security.is_open, security.is_page_open), (is_open, is_open), "{arguments:?}");
    }
    // File permissions allow the callers of the socket, but the page may have other visitors.
    let socket = ["--listen", "unix:/run/rm.sock"];
    for (arguments, is_page_open) in [(socket.to_vec(), false), ([&socket[..], &insecure].concat(), true)] {
        let security = check(&arguments).unwrap().options.security;
        assert_eq!((security.is_open, security.is_page_open), (true, is_page_open), "{arguments:?}");
    }
    for (wrong, text) in [
        (vec!["--tls-cert", "c"], "--tls-key"),
        (vec!["--tls-key", "k"], "--tls-cert"),
        (vec!["--tls-client-ca", "a"], "--tls-cert"),
        ([&world[..], &["--tls-key", "k"]].concat(), "--tls-cert"),
    ] {
        let error = check(&wrong).unwrap_err();
        assert!(error.0.len() == 1 && error.to_string().contains(text), "{error}");
    }
}

#[test]
fn log_settings_are_parsed_by_name() {
    let text = |arguments: &[&str]| {
        let arguments = CommandLine::read(std::iter::once(&"linkis-rm").chain(arguments)).unwrap().serve;
        Arguments { rust_log: String::new(), ..arguments }.check().map(|config| config.telemetry.log)
    };
    let (auto, debug) = (text(&[]).unwrap(), text(&["--log-level", "debug", "--log-format", "json"]).unwrap());
    assert_eq!((auto.format, auto.filter.as_str()), (LogFormat::Auto, "info,sqlx=warn"));
    assert_eq!((debug.format, debug.filter.as_str()), (LogFormat::Json, "info,sqlx=warn,linkis_rm=debug"));
    let error = text(&["--log-level", "loud", "--log-format", "xml"]).unwrap_err();
    assert!(error.0.len() == 2 && error.to_string().contains("(LINKIS_RM_LOG_LEVEL): \"loud\""), "{error}");
    let by_rust_log = |rust_log: &str| {
        let arguments = CommandLine::read(["linkis-rm", "--log-level", "warn"]).unwrap().serve;
        Arguments { rust_log: rust_log.to_owned(), ..arguments }.check().map(|config| config.telemetry.log.filter)
    };
    assert_eq!(by_rust_log("linkis_rm=trace").unwrap(), "linkis_rm=trace", "RUST_LOG wins");
    assert!(by_rust_log("linkis_rm=loud").unwrap_err().to_string().contains("RUST_LOG"));
}

#[test]
fn database_url_is_unique_and_password_hidden() {
    let url = "postgres://me:hunter2@db.example/rm";
    let file = std::env::temp_dir().join(format!("linkis-rm-url-{}", std::process::id()));
    std::fs::write(&file, format!("{url}\n")).unwrap();
    let path = file.to_str().unwrap();
    let at_once = CommandLine::read(["linkis-rm", "--database-url", url]).unwrap();
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

/// The flags and variables of the server equal the settings in the tables of docs/CONFIGURATION.md.
#[test]
fn configuration_page_lists_every_setting() {
    let page = include_str!("../../docs/CONFIGURATION.md");
    let cells: Vec<&str> =
        page.lines().filter(|line| line.starts_with('|')).flat_map(|line| line.split('|').skip(1).take(2)).collect();
    let listed = |sign: &str| -> BTreeSet<String> {
        let names = cells.iter().flat_map(|cell| cell.split('`').skip(1).step_by(2));
        names.filter(|name| name.starts_with(sign)).map(str::to_owned).collect()
    };
    let command_line = command_line();
    let settings =
        || command_line.get_arguments().filter(|argument| argument.get_env().is_some() && !argument.is_global_set());
    let flags: BTreeSet<String> = settings().filter_map(|flag| Some(format!("--{}", flag.get_long()?))).collect();
    let variables: BTreeSet<String> =
        settings().filter_map(|flag| Some(flag.get_env()?.to_string_lossy().into_owned())).collect();
    assert!(flags.len() > 30, "{flags:?}");
    assert_eq!(listed("--"), flags);
    for prefix in ["LINKIS_RM_", "DATABASE_URL"] {
        let variables = variables.iter().filter(|name| name.starts_with(prefix)).cloned().collect();
        assert_eq!(listed(prefix), variables);
    }
}
