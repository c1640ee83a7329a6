//! Surface of the program besides its calls: schema, descriptors, metric names, commands and exit codes, each a text file in `surface/`.
//!
//! Prose is omitted, so that a better sentence is no difference. Caller: `main`.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use prost::bytes::Bytes;
use prost_reflect::{DescriptorPool, EnumDescriptor, MessageDescriptor};
use sqlx::PgPool;

use crate::{
    Settings,
    service::{Postgres, Service},
};

/// Writes the files, or returns their differences from the program.
pub async fn surface(settings: &Settings, postgres: &Postgres) -> Vec<String> {
    let folder = settings.journal.with_file_name("surface");
    let program = &settings.program;
    let pool = postgres.create("surface").await;
    let (port, address) = free_address();
    let arguments = ["--http-listen".to_owned(), address];
    let service = Service::start(program, postgres, "surface", &arguments, Vec::new()).await;
    // The program accepts connections before its migrations are complete.
    let start = Instant::now();
    while let Err(status) = service.call("/linkis.rm.v1.UsageService/ListEms", 0, 0, Bytes::new()).await {
        assert!(start.elapsed() < Duration::from_secs(60), "{status}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let texts = [
        ("schema.txt", schema(&pool).await),
        ("descriptors.txt", descriptors(&service.descriptors().await)),
        ("metrics.txt", metrics(port).await),
        ("help.txt", help(program)),
        ("exit_codes.txt", exit_codes(program)),
    ];
    if settings.record {
        fs::create_dir_all(&folder).unwrap();
    }
    let mut failures = Vec::new();
    for (name, text) in texts {
        let path = folder.join(name);
        if settings.record {
            fs::write(path, text).unwrap();
        } else {
            failures.extend(differences(&path, &text));
        }
    }
    failures
}

fn differences(path: &Path, text: &str) -> Vec<String> {
    let expected = fs::read_to_string(path).unwrap_or_default();
    if expected == text {
        return Vec::new();
    }
    let (before, now): (BTreeSet<&str>, BTreeSet<&str>) = (expected.lines().collect(), text.lines().collect());
    let name = PathBuf::from(path.file_name().unwrap());
    let line = |mark: char, line: &&str| format!("surface/{}: {mark} {line}", name.display());
    let mut found: Vec<String> = before.difference(&now).map(|text| line('-', text)).collect();
    found.extend(now.difference(&before).map(|text| line('+', text)));
    found.truncate(40);
    found.push(format!(
        "surface/{} differs, or its order does: `cargo test --test journal -- surface record` writes it anew",
        name.display()
    ));
    found
}

fn free_address() -> (u16, String) {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    (port, format!("127.0.0.1:{port}"))
}

/// Returns tables, columns, constraints, indexes, functions, and the applied migrations.
async fn schema(pool: &PgPool) -> String {
    let sql = r#"
        SELECT line FROM (
            SELECT 'table ' || c.relname || CASE c.relkind WHEN 'p' THEN ' partitioned' ELSE '' END
                || coalesce(' WITH (' || array_to_string(c.reloptions, ', ') || ')', '') AS line
            FROM pg_class c WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p')
            UNION ALL
            SELECT 'column ' || c.relname || '.' || a.attname || ' ' || format_type(a.atttypid, a.atttypmod)
                || CASE WHEN a.attnotnull THEN ' NOT NULL' ELSE '' END
                || CASE WHEN a.attidentity <> '' THEN ' IDENTITY' ELSE '' END
                || coalesce(' COLLATE ' || l.collname, '')
                || coalesce(' DEFAULT ' || pg_get_expr(d.adbin, d.adrelid), '')
            FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
                LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
                LEFT JOIN pg_collation l ON l.oid = a.attcollation AND l.collname <> 'default'
            WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') AND a.attnum > 0 AND NOT a.attisdropped
            UNION ALL
            SELECT 'constraint ' || c.relname || '.' || k.conname || ' ' || pg_get_constraintdef(k.oid)
            FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid WHERE c.relnamespace = 'public'::regnamespace
            UNION ALL
            SELECT 'index ' || indexdef FROM pg_indexes WHERE schemaname = 'public'
            UNION ALL
            SELECT 'function ' || p.oid::regprocedure::text FROM pg_proc p WHERE p.pronamespace = 'public'::regnamespace
            UNION ALL
            SELECT 'trigger ' || pg_get_triggerdef(t.oid) FROM pg_trigger t WHERE NOT t.tgisinternal
        ) AS lines
        -- Partitions are named after days.
        WHERE line !~ '[0-9]{4}_?[0-9]{2}' ORDER BY line COLLATE "C""#;
    let lines: Vec<String> = sqlx::query_scalar(sql).fetch_all(pool).await.unwrap();
    let line = |line: &String| line.replace('\n', " ") + "\n";
    lines.iter().map(line).collect()
}

/// Returns messages, enums and calls with names, numbers and types.
fn descriptors(bytes: &[u8]) -> String {
    let pool = DescriptorPool::decode(bytes).unwrap();
    let mut lines = BTreeSet::new();
    for message in pool.all_messages().filter(|message| is_ours(message.full_name())) {
        lines.extend(of_message(&message));
    }
    for found in pool.all_enums().filter(|found| is_ours(found.full_name())) {
        lines.extend(of_enum(&found));
    }
    for service in pool.services().filter(|service| is_ours(service.full_name())) {
        for method in service.methods() {
            let stream = if method.is_server_streaming() { "stream " } else { "" };
            let (input, output) = (method.input(), method.output());
            lines.insert(format!(
                "call {}.{} {} returns {stream}{}",
                service.name(),
                method.name(),
                input.name(),
                output.name()
            ));
        }
    }
    lines.iter().fold(String::new(), |text, line| text + line + "\n")
}

fn is_ours(name: &str) -> bool {
    name.starts_with("linkis.rm.v1.")
}

fn of_message(message: &MessageDescriptor) -> Vec<String> {
    let name = message.full_name();
    let field = |field: prost_reflect::FieldDescriptor| {
        let cardinality = if field.is_map() { "map of ".to_owned() } else { format!("{:?} ", field.cardinality()) };
        let one = field.containing_oneof().map_or(String::new(), |one| format!(" in {}", one.name()));
        format!("field {name} {:04} {} {cardinality}{:?}{one}", field.number(), field.name(), field.kind())
    };
    let mut lines: Vec<String> = message.fields().map(field).collect();
    lines.extend(message.reserved_ranges().map(|range| format!("reserved {name} {range:?}")));
    lines
}

fn of_enum(found: &EnumDescriptor) -> Vec<String> {
    let value = |value: prost_reflect::EnumValueDescriptor| {
        format!("value {} {:04} {}", found.full_name(), value.number(), value.name())
    };
    found.values().map(value).collect()
}

/// Metrics that the service has only when its tasks have run.
const LATE: [&str; 3] = [
    "linkis_rm_cluster_waiting_requests",
    "linkis_rm_usage_rolled_up_timestamp_seconds",
    "linkis_rm_users_summed_timestamp_seconds",
];

/// Returns names and types of all metrics.
async fn metrics(port: u16) -> String {
    let start = Instant::now();
    let body = loop {
        let got = read_http(port, "/metrics");
        if LATE.iter().all(|late| got.contains(late)) {
            break got;
        }
        assert!(start.elapsed() < Duration::from_secs(30), "no metrics: {got}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let lines: BTreeSet<&str> = body.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
    lines.iter().fold(String::new(), |text, line| text + line.trim_end() + "\n")
}

fn read_http(port: u16, path: &str) -> String {
    use std::io::{Read as _, Write as _};
    let Ok(mut stream) = std::net::TcpStream::connect(("127.0.0.1", port)) else { return String::new() };
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    let mut bytes = Vec::new();
    let _ = stream.write_all(request.as_bytes()).and_then(|()| stream.read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

fn output(program: &Path, arguments: &[&str]) -> std::process::Output {
    Command::new(program).env_clear().args(arguments).stdin(Stdio::null()).output().unwrap()
}

/// Returns the usage, subcommands and options of each command by `--help`, with values, variables and defaults.
fn help(program: &Path) -> String {
    let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut text = String::new();
    let mut commands: Vec<Vec<String>> = vec![Vec::new()];
    while let Some(command) = commands.pop() {
        let mut arguments: Vec<&str> = command.iter().map(String::as_str).collect();
        arguments.push("--help");
        let whole = String::from_utf8(output(program, &arguments).stdout).unwrap();
        writeln!(text, "linkis-rm {}", command.join(" ")).unwrap();
        let mut section = "";
        for line in whole.lines() {
            if !line.starts_with(' ') && line.ends_with(':') {
                section = line;
            }
            let word = line.trim_start().split("  ").next().unwrap_or_default();
            // The description of a possible value follows a colon.
            let word = if word.starts_with("- ") { word.split(':').next().unwrap_or_default() } else { word };
            let word = word.replace(&name, "linkis-rm");
            match section {
                // The program's commands are in groups, those of a noun are not.
                "Commands:" | "Look:" | "Decide:" | "Outside:" | "Run:"
                    if line.starts_with("  ") && !line.starts_with("   ") && word != "help" =>
                {
                    writeln!(text, "    {word}").unwrap();
                    commands.push([&command[..], &[word]].concat());
                }
                "Commands:" | "Look:" | "Decide:" | "Outside:" | "Run:" => {}
                _ if line.starts_with("Usage:") || line.trim_start().starts_with('-') => {
                    writeln!(text, "    {word}").unwrap();
                }
                "Arguments:" if line.trim_start().starts_with(['<', '[']) => writeln!(text, "    {word}").unwrap(),
                _ => {}
            }
            for mark in ["[env: ", "[default: ", "[possible values: "] {
                if let Some((_, rest)) = line.split_once(mark) {
                    let value = rest.split(']').next().unwrap_or_default();
                    // A default with blanks is prose.
                    let value = if mark == "[default: " && value.contains(' ') { "…" } else { value };
                    writeln!(text, "        {mark}{value}]").unwrap();
                }
            }
        }
    }
    text
}

/// Returns the exit code for each of several wrong inputs.
fn exit_codes(program: &Path) -> String {
    const COMMANDS: &[&str] = &[
        "--version",
        "--help",
        "--listen nonsense",
        "--listen 127.0.0.1:0 --tls-cert /nonexistent",
        "--listen 0.0.0.0:0",
        "--no-such-option",
        "--lock-ttl never --listen 127.0.0.1:0",
        "--em-silent-after 10m --em-lost-after 1m",
        "--limits /nonexistent",
        "--database-url nonsense",
        "nonsense",
        "overview extra",
        "overview --address 127.0.0.1:1",
        "em list --address 127.0.0.1:1",
        "em",
        "em get host --address 127.0.0.1:1",
        "ticket list --state nonsense",
        "ticket",
        "ticket get 00000000-0000-0000-0000-000000000001 --address 127.0.0.1:1",
        "usage --by nonsense",
        "history --address nonsense",
        "limit",
        "limit nonsense",
        "limit diff /nonexistent --address 127.0.0.1:1",
        "limit apply /nonexistent --address 127.0.0.1:1",
        "em drain",
        "em drain host --reason test --address 127.0.0.1:1",
        "ticket release",
        "hold add",
        "hold release",
        "provider list --address 127.0.0.1:1",
        "queue list --address 127.0.0.1:1",
        "audit --address 127.0.0.1:1",
        "repair --address 127.0.0.1:1",
        "token",
        "token create",
        "token create --name a --role nonsense --owner b --database-url postgres://guest@127.0.0.1:1/none",
        "token create --name a --role admin --owner b --database-url postgres://guest@127.0.0.1:1/none",
        "token revoke --database-url postgres://guest@127.0.0.1:1/none",
        "migrate --database-url nonsense",
        "migrate --database-url postgres://guest@127.0.0.1:1/none",
        "health --address 127.0.0.1:1",
        "completions",
        "completions bash",
        "completions nonsense",
        "demo --address 127.0.0.1:1",
    ];
    let mut text = String::new();
    for command in COMMANDS {
        let arguments: Vec<&str> = command.split(' ').collect();
        let done = output(program, &arguments);
        let code = done.status.code().map_or("signal".to_owned(), |code| code.to_string());
        let said = |bytes: &[u8]| if bytes.is_empty() { '-' } else { 'x' };
        writeln!(text, "{code:>3} stdout {} stderr {}  {command}", said(&done.stdout), said(&done.stderr)).unwrap();
    }
    text
}
