//! The golden journal: recorded calls to the service with all their results, replayed against another build of the program.
//!
//! A change that must not change behaviour must replay the journal without a difference. docs/CONTRIBUTING.md lists the commands.
//! Not covered: more than nine requests that wait at once.
//! Never: uses code of the workspace except the built program. Descriptors of the recording decode messages; SQL reads the tables.
//!
//! - `record`, `replay`: all chapters; `run`: one chapter, with its own database and process;
//! - `generate`: the calls, for `record` only; `file`: format of the journal; `allowed`: allowed differences;
//! - `wire`: messages as trees of field numbers; `ids`: replaced identifiers and times; `tables`: tables and their hashes;
//! - `service`: processes and calls; `cluster`: an external cluster; `surface`: schema, descriptors, metrics, commands and exit codes as texts.

mod allowed;
mod cluster;
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
    /// Whether only the surface is compared, without the calls.
    surface: bool,
}

impl Settings {
    /// Returns whether this chapter is selected.
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
            // Options for the test harness of the other targets.
            _ if argument.starts_with('-') => {}
            // A filter for the tests of other targets.
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
