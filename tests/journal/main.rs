//! The golden journal: calls to the service, recorded with all that came of them, and replayed against another build of the program.
//!
//!     cargo test --test journal                      # replays the first segment of each chapter
//!     cargo test --test journal -- replay            # replays everything
//!     cargo test --test journal -- record            # records anew, into tests/journal/journal.gz
//!     cargo test --test journal -- surface           # compares the files of tests/journal/surface
//!     cargo test --test journal -- surface record    # writes them anew
//!
//! `--program FILE` takes another program than cargo's, `--journal FILE` another journal, `--chapter NAME,NAME` some chapters. `--dump FOLDER` writes each
//! answer and each table as text, so that `diff` can compare two runs.
//!
//! The journal judges a change that must not change behaviour. It depends on nothing of this package but the built program: messages are
//! decoded by the descriptors of the recording and compared by field numbers, tables are read by SQL. `allowed.txt` lists what may differ.
//!
//! - `generate`: the calls, by a seeded generator; only recording uses it;
//! - `record` and `replay` run chapters, each a `run` with a database and a process of its own;
//! - `file`: the journal's format; `wire`: messages as trees of field numbers; `ids`: identifiers and times are replaced;
//! - `surface`: the schema, the descriptors, the metrics, the commands and their exit codes, as texts;
//! - `tables`: the tables and their columns; `service`: the processes and the calls; `allowed`: the allowed differences.

mod allowed;
mod file;
mod generate;
mod ids;
mod record;
mod replay;
mod run;
mod service;
mod surface;
mod tables;
mod wire;

use std::{path::PathBuf, time::Instant};

use service::Postgres;

struct Settings {
    record: bool,
    whole: bool,
    program: PathBuf,
    journal: PathBuf,
    chapters: Vec<String>,
    dump: Option<PathBuf>,
    /// Only the surface, without the calls.
    surface: bool,
}

impl Settings {
    /// Whether this chapter is wanted.
    fn has(&self, name: &str) -> bool {
        self.chapters.is_empty() || self.chapters.iter().any(|wanted| wanted == name)
    }
}

fn settings() -> Option<Settings> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("journal");
    let program =
        std::env::var_os("LINKIS_RM_JOURNAL_PROGRAM").map_or_else(|| (*rm_tests::PROGRAM).into(), PathBuf::from);
    let journal = folder.join("journal.gz");
    let mut settings =
        Settings { record: false, whole: false, program, journal, chapters: Vec::new(), dump: None, surface: false };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().unwrap_or_else(|| panic!("{argument} needs a value"));
        match argument.as_str() {
            "record" => settings.record = true,
            "replay" => settings.whole = true,
            "surface" => settings.surface = true,
            "--program" => settings.program = value().into(),
            "--journal" => settings.journal = value().into(),
            "--chapter" => settings.chapters = value().split(',').map(str::to_owned).collect(),
            "--dump" => settings.dump = Some(value().into()),
            "--test-threads" | "--skip" => drop(value()),
            "--list" => return None,
            // Options of the test harness that other targets have.
            _ if argument.starts_with('-') => {}
            // A filter for tests.
            _ if "journal".contains(argument.as_str()) => {}
            _ => return None,
        }
    }
    Some(settings)
}

fn main() -> std::process::ExitCode {
    let Some(settings) = settings() else { return std::process::ExitCode::SUCCESS };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let start = Instant::now();
    let failures = runtime.block_on(async {
        let postgres = Postgres::start();
        if settings.surface {
            return surface::surface(&settings, &postgres).await;
        }
        if settings.record {
            return record::record(&settings, &postgres).await;
        }
        let mut failures = replay::replay(&settings, &postgres).await;
        if settings.chapters.is_empty() {
            failures.extend(surface::surface(&settings, &postgres).await);
        }
        failures
    });
    println!("journal: {:.0?}", start.elapsed());
    for failure in &failures {
        println!("{failure}");
    }
    if failures.is_empty() { std::process::ExitCode::SUCCESS } else { std::process::ExitCode::FAILURE }
}
