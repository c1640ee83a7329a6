//! Documents with console blocks: runs the commands of a document in order and compares their output with it.
//!
//! A `console` block has commands, which begin with `$ `, each followed by its output. A command continues after `\` and inside
//! quotes. A `toml` block is written to the file that the paragraph above it names in backquotes. In an output, a line `...` stands
//! for omitted lines, a word `…` for omitted words, and `…` in a word for its rest.
//!
//! A document is one shell session in a fresh folder. A command that ends with another code than 0 is wrong.
//!
//! - `WRITE_COOKBOOK`: writes the outputs that differ into the document.

use std::{
    env, fmt, fs,
    io::{BufRead as _, BufReader, Write as _},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, sync_channel},
    time::Duration,
};

use rustix::process::{Pid, Signal};
use uuid::Uuid;

use crate::harness::*;

/// Release of grpcurl that is built where none is installed.
const GRPCURL: &str = "github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.3";

/// Line after the output of a command, with its exit code.
const END: &str = "--- exit code";

/// Maximum number of unread output lines of a session.
const LINES_MAX: usize = 1024;

/// Timeout of one command.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

/// Members of JSON messages whose values differ in each run, besides times, UUIDs and tokens.
const VOLATILE: [&str; 8] = ["age", "config", "epoch", "etag", "followToken", "lag", "nextPageToken", "version"];

/// Environment of a document's commands.
pub struct World {
    /// Addresses as the document writes them, and as they are here.
    pub addresses: Vec<(&'static str, String)>,
    pub variables: Vec<(&'static str, String)>,
}

/// Runs the commands of `document`, a path from the root of the source, and panics if an output differs.
pub async fn verify(document: &'static str, world: World) {
    let path = repo_root().join(document);
    let text = fs::read_to_string(&path).unwrap();
    let mut parts = parse(&text).unwrap_or_else(|error| panic!("{document}: {error}"));
    let uses_grpcurl = |part: &Part| matches!(part, Part::Command { command, .. } if command.contains("grpcurl"));
    let grpcurl = grpcurl();
    if grpcurl.is_none() && parts.iter().any(uses_grpcurl) {
        return skip_without("grpcurl", &format!("it cannot be built: go install {GRPCURL}"));
    }
    let name = format!("document-{}", document.replace('/', "-"));
    let (parts, differences) = tokio::task::spawn_blocking(move || {
        let mut session = Session::start(&scratch(&name), world, grpcurl);
        let differences = session.run_all(&mut parts);
        (parts, differences)
    })
    .await
    .unwrap();
    if env::var_os("WRITE_COOKBOOK").is_some() {
        fs::write(&path, parts.iter().map(ToString::to_string).collect::<String>()).unwrap();
        return;
    }
    let differences = differences.join("\n\n");
    assert!(differences.is_empty(), "{document} differs; WRITE_COOKBOOK=1 writes the outputs:\n{differences}");
}

/// Folder of an installed or built grpcurl.
fn grpcurl() -> Option<PathBuf> {
    let tools = repo_root().join("target/tools");
    let home = env::var_os("HOME").map(|home| Path::new(&home).join("go/bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    let places: Vec<PathBuf> = env::split_paths(&path).chain(home).chain([tools.clone()]).collect();
    let find = |places: &[PathBuf]| places.iter().find(|place| place.join("grpcurl").is_file()).cloned();
    if let Some(place) = find(&places) {
        return Some(place);
    }
    let go = env::split_paths(&path).chain(["/usr/local/go/bin".into()]).find(|place| place.join("go").is_file())?;
    let built = Command::new(go.join("go")).args(["install", GRPCURL]).env("GOBIN", &tools).output();
    built.ok().filter(|built| built.status.success())?;
    find(&[tools])
}

/// Part of a document. Written one after another, the parts are the document.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    /// A line that is neither command nor output.
    Line(String),
    /// A file for the later commands. Its lines are parts of their own.
    File {
        name: String,
        text: String,
    },
    Command {
        command: String,
        output: Vec<String>,
    },
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(line) => writeln!(f, "{line}"),
            Self::File { .. } => Ok(()),
            Self::Command { command, output } => {
                writeln!(f, "$ {command}")?;
                output.iter().try_for_each(|line| writeln!(f, "{line}"))
            }
        }
    }
}

/// Parses a document.
///
/// # Errors
/// A block without end, a console block that begins with an output, or a command without end.
fn parse(text: &str) -> Result<Vec<Part>, String> {
    let (mut parts, mut paragraph, mut lines) = (Vec::new(), String::new(), text.lines());
    let mut is_continued = false;
    while let Some(line) = lines.next() {
        parts.push(Part::Line(line.to_owned()));
        let Some(language) = line.strip_prefix("```") else {
            if !line.is_empty() && !is_continued {
                paragraph.clear();
            }
            paragraph.push_str(line);
            paragraph.push('\n');
            is_continued = !line.is_empty();
            continue;
        };
        let mut block = Vec::new();
        loop {
            match lines.next() {
                Some("```") => break,
                Some(line) => block.push(line),
                None => return Err(format!("a block of {language} does not end")),
            }
        }
        match language {
            "console" => parts.extend(commands(&block)?),
            _ => parts.extend(block.iter().map(|line| Part::Line((*line).to_owned()))),
        }
        if let Some(name) = file_name(&paragraph).filter(|_| language == "toml") {
            parts.push(Part::File { name: name.to_owned(), text: block.join("\n") + "\n" });
        }
        parts.push(Part::Line("```".to_owned()));
        is_continued = false;
    }
    Ok(parts)
}

/// The last file that a paragraph names in backquotes.
fn file_name(paragraph: &str) -> Option<&str> {
    let quoted = paragraph.split('`').skip(1).step_by(2);
    let is_plain = |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
    quoted.filter(|name| name.ends_with(".toml") && is_plain(name)).last()
}

/// Commands and outputs of a console block.
fn commands(block: &[&str]) -> Result<Vec<Part>, String> {
    let (mut parts, mut is_open) = (Vec::new(), false);
    for line in block {
        match (parts.last_mut(), line.strip_prefix("$ ")) {
            (Some(Part::Command { command, .. }), _) if is_open => {
                *command = format!("{command}\n{line}");
                is_open = is_unfinished(command);
            }
            (_, Some(command)) => {
                is_open = is_unfinished(command);
                parts.push(Part::Command { command: command.to_owned(), output: vec![] });
            }
            (Some(Part::Command { output, .. }), None) => output.push((*line).to_owned()),
            _ => return Err(format!("a console block begins with an output: {line}")),
        }
    }
    if is_open { Err(format!("a command does not end: {}", block.join("\n"))) } else { Ok(parts) }
}

/// Whether a command continues in the next line.
fn is_unfinished(command: &str) -> bool {
    let (mut quote, mut is_escaped) = (None, false);
    for c in command.chars() {
        match (quote, c) {
            _ if is_escaped => is_escaped = false,
            (None | Some('"'), '\\') => is_escaped = true,
            (None, '\'' | '"') => quote = Some(c),
            (Some(open), c) if open == c => quote = None,
            _ => {}
        }
    }
    quote.is_some() || is_escaped
}

/// One shell, which ends with its descendants when it is dropped.
struct Session {
    shell: Child,
    input: ChildStdin,
    output: Receiver<String>,
    folder: PathBuf,
    addresses: Vec<(&'static str, String)>,
}

impl Session {
    fn start(folder: &Path, world: World, grpcurl: Option<PathBuf>) -> Self {
        fs::create_dir_all(folder).unwrap();
        let path = env::var_os("PATH").unwrap_or_default();
        let program = Path::new(*PROGRAM).parent().unwrap().to_owned();
        let path = env::join_paths([program].into_iter().chain(grpcurl).chain(env::split_paths(&path))).unwrap();
        let mut shell = Command::new("sh");
        for (variable, _) in env::vars_os() {
            if variable.to_string_lossy().starts_with("LINKIS_RM_") {
                shell.env_remove(variable);
            }
        }
        shell.current_dir(folder).env("PATH", path).env_remove("DATABASE_URL").envs(world.variables).process_group(0);
        let mut shell = shell.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (shell.stdin.take().unwrap(), BufReader::new(shell.stdout.take().unwrap()));
        let (sender, receiver) = sync_channel(LINES_MAX);
        std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let mut session =
            Self { shell, input, output: receiver, folder: folder.to_owned(), addresses: world.addresses };
        session.input.write_all(b"exec 2>&1\n").unwrap();
        session
    }

    /// Runs all commands. Stores each output that differs in its part, and returns it with its command and its exit code.
    fn run_all(&mut self, parts: &mut [Part]) -> Vec<String> {
        let mut differences = Vec::new();
        for part in parts {
            match part {
                Part::Line(_) => {}
                Part::File { name, text } => fs::write(self.folder.join(name), self.here(text)).unwrap(),
                Part::Command { command, output } => {
                    let (exit_code, actual) = self.run(command);
                    if exit_code != "0" || !is_like(output, &actual) {
                        differences.push(format!("$ {command}\n{}\nexit code {exit_code}", actual.join("\n")));
                        *output = actual;
                    }
                }
            }
        }
        differences
    }

    /// Runs one command and returns its exit code and its output.
    fn run(&mut self, command: &str) -> (String, Vec<String>) {
        let script = format!("{{\n{}\n}} </dev/null\nprintf '\\n%s %s\\n' '{END}' $?\n", self.here(command));
        self.input.write_all(script.as_bytes()).unwrap_or_else(|error| panic!("{error} before: {command}"));
        let mut output = Vec::new();
        let exit_code = loop {
            let line = self.output.recv_timeout(COMMAND_TIMEOUT);
            let line = line.unwrap_or_else(|error| panic!("{error}: {command}\n{}", output.join("\n")));
            match line.strip_prefix(END) {
                Some(exit_code) => break exit_code.trim().to_owned(),
                None => output.push(self.as_written(line)),
            }
        };
        while output.last().is_some_and(String::is_empty) {
            output.pop();
        }
        (exit_code, output)
    }

    fn here(&self, text: &str) -> String {
        self.addresses.iter().fold(text.to_owned(), |text, (written, here)| text.replace(written, here))
    }

    fn as_written(&self, text: String) -> String {
        self.addresses.iter().fold(text, |text, (written, here)| text.replace(here, written))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = rustix::process::kill_process_group(Pid::from_child(&self.shell), Signal::KILL);
        let _ = self.shell.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Whether an output equals that of the document, without empty lines at its end.
fn is_like(said: &[String], actual: &[String]) -> bool {
    let end = said.iter().rposition(|line| !line.is_empty()).map_or(0, |last| last + 1);
    fits(&said[..end], actual, &|line: &String| line.trim() == "...", &|said, actual| is_line_like(said, actual))
}

/// Whether `actual` matches a pattern in which each gap matches one or more elements.
fn fits<P, A>(pattern: &[P], actual: &[A], is_gap: &dyn Fn(&P) -> bool, is_same: &dyn Fn(&P, &A) -> bool) -> bool {
    let Some((first, pattern)) = pattern.split_first() else { return actual.is_empty() };
    if is_gap(first) {
        return (1..=actual.len()).any(|omitted| fits(pattern, &actual[omitted..], is_gap, is_same));
    }
    let Some((next, actual)) = actual.split_first() else { return false };
    is_same(first, next) && fits(pattern, actual, is_gap, is_same)
}

fn is_line_like(said: &str, actual: &str) -> bool {
    let member =
        |line: &str| line.trim().strip_prefix('"').and_then(|rest| Some(rest.split_once("\": ")?.0.to_owned()));
    if let Some(name) = member(said).filter(|name| VOLATILE.contains(&name.as_str())) {
        return member(actual) == Some(name);
    }
    let [said, actual]: [Vec<&str>; 2] = [said, actual].map(|line| line.split_whitespace().collect());
    fits(&said, &actual, &|word: &&str| *word == "…", &|said, actual| is_word_like(said, actual))
}

fn is_word_like(said: &str, actual: &str) -> bool {
    match said.split_once('…') {
        Some((start, end)) => {
            actual.len() >= start.len() + end.len() && actual.starts_with(start) && actual.ends_with(end)
        }
        None => said == actual || (is_volatile(said) && is_volatile(actual)),
    }
}

/// Whether a word is a time, a duration, a token or a UUID that is not one of the cluster's own.
fn is_volatile(word: &str) -> bool {
    let word = word.trim_matches(|c: char| "\"',;()".contains(c));
    let shape: String = word.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    let is_time = shape.starts_with("0000-00-00") || shape.starts_with("0:00:00") || shape.starts_with("00:00:00");
    let is_duration = word.strip_suffix('s').is_some_and(|number| number.parse::<f64>().is_ok());
    let is_id = Uuid::parse_str(word).is_ok() && !word.starts_with("5d1b8e2c");
    is_time || is_duration || is_id || word.starts_with("lrm_")
}

#[test]
fn documents_with_console_blocks_are_parsed() {
    let text = "A line.\n\n```console\n$ a -d '{\n  \"b\"}' \\\n  \"it's\"\nx: 1\n\n$ d\n```\nend\n";
    let parts = parse(text).unwrap();
    let command = |command: &str, output: &[&str]| Part::Command {
        command: command.to_owned(),
        output: output.iter().map(|line| (*line).to_owned()).collect(),
    };
    let line = |line: &str| Part::Line(line.to_owned());
    let first = command("a -d '{\n  \"b\"}' \\\n  \"it's\"", &["x: 1", ""]);
    let rest = [command("d", &[]), line("```"), line("end")];
    assert_eq!(parts, [vec![line("A line."), line(""), line("```console"), first], rest.to_vec()].concat());
    assert_eq!(parts.iter().map(ToString::to_string).collect::<String>(), text);
}

#[test]
fn documents_with_toml_blocks_name_files() {
    let file = |text: &str| {
        let parts = parse(text).unwrap();
        assert_eq!(parts.iter().map(ToString::to_string).collect::<String>(), text);
        parts.into_iter().find_map(|part| if let Part::File { name, text } = part { Some((name, text)) } else { None })
    };
    let block = "```toml\na = 1\n```\n";
    let found = Some(("limits.toml".to_owned(), "a = 1\n".to_owned()));
    assert_eq!(file(&format!("Write `--x` and\n`limits.toml`:\n\n{block}")), found);
    assert_eq!(file(&format!("Write `limits.toml`.\n\nAnother paragraph.\n\n{block}")), None);
    assert_eq!(file(&format!("Write `../limits.toml`:\n\n{block}")), None);
    assert_eq!(file("Write `limits.toml`:\n\n```text\na = 1\n```\n"), None);
}

#[test]
fn documents_with_incomplete_blocks_are_errors() {
    for text in ["```console\n$ a\n", "```console\nx\n```\n", "```console\n$ a 'b\n```\n", "```toml\n"] {
        assert!(parse(text).is_err(), "{text}");
    }
}

#[test]
fn outputs_with_gaps_fit() {
    let like = |said: &str, actual: &str| {
        let [said, actual] = [said, actual].map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>());
        is_like(&said, &actual)
    };
    assert!(like("a\n...\nd\n\n", "a\nb\nc\nd"));
    assert!(!like("a\n...\nb", "a\nb"), "a gap stands for at least one line");
    assert!(!like("a\n...\nd", "a\nb\nc"));
    assert!(like("id 01a2… of …", "id 01a20477 of a b"));
    assert!(like(
        "TICKET  AGE\n01a2075b-ecde-7260-baf0-b078a56c4c53  2s",
        "TICKET AGE\n01a2075b-ed15-76f3-840f-fc4daa7c6856 13s"
    ));
    assert!(!like("5d1b8e2c-6f0a-4f59-9a55-2f9b1c4f7a01", "5d1b8e2c-6f0a-4f59-9a55-2f9b1c4f7a02"));
    assert!(like("  \"epoch\": \"1\",", "  \"epoch\": \"2\","));
    assert!(!like("  \"cores\": \"1\",", "  \"cores\": \"2\","));
    assert!(like("since 2026-11-24T01:02:03Z", "since 2026-11-25T11:12:13Z"));
}

#[test]
fn sessions_keep_variables_and_report_exit_codes() {
    let world =
        World { addresses: vec![("127.0.0.1:50051", "localhost:1".into())], variables: vec![("A", "b".into())] };
    let mut session = Session::start(&scratch("document-session"), world, None);
    let mut parts = parse(
        "The file `x.toml`:\n\n```toml\naddress = \"127.0.0.1:50051\"\n```\n\n```console\n$ T=$(cat x.toml)\n$ echo \"$T $A\" >&2\n\
         address = \"127.0.0.1:50051\" b\n$ grep -c localhost x.toml\n1\n$ printf x; false\nx\n```\n",
    )
    .unwrap();
    let differences = session.run_all(&mut parts);
    assert_eq!(differences, ["$ printf x; false\nx\nexit code 1"]);
}
