//! Grammar of the command line: `linkis-rm [OPTIONS] [NOUN [VERB]]`. Without a command, the program serves.
//!
//! Global options are valid before and after the command. An option that the command does not use is an error.
//! Caller: `main`.

use std::ffi::OsString;

use clap::{
    ArgMatches, Args as _, CommandFactory as _, FromArgMatches as _, Parser, Subcommand,
    error::{ContextKind, ContextValue, ErrorKind},
    parser::ValueSource,
};

use super::{Arguments, ServiceConfig, ServiceConfigError, former_words, help, removed, wrong_words};
use crate::commands::{Command, ServiceArguments, help::examples};

/// A resource manager for compute clusters in the style of Apache Linkis.
#[derive(Debug, Parser)]
#[command(name = "linkis-rm", version)]
pub(super) struct CommandLine {
    #[command(subcommand)]
    pub(super) task: Option<ProcessTask>,

    #[command(flatten)]
    pub(super) serve: Arguments,
}

/// Task of the process: serve, or run a command.
#[derive(Debug, Subcommand)]
pub(super) enum ProcessTask {
    /// Serve, as without a command.
    #[command(after_help = examples(&["serve --listen 127.0.0.1:50051"]))]
    Serve(Box<Arguments>),
    #[command(flatten)]
    Command(Command),
}

/// Parsed launch of the process.
#[derive(Debug)]
pub enum LaunchMode {
    /// Serve with these settings.
    Serve(Box<ServiceConfig>),
    /// Run a command against a running service.
    Command(Command),
}

impl LaunchMode {
    /// Parses the command line and the environment.
    ///
    /// # Errors
    /// [`StartFailure`], also for requests of help or the version.
    pub fn from_command_line() -> Result<Self, StartFailure> {
        let CommandLine { task, serve } = CommandLine::read(std::env::args_os())?;
        match task {
            Some(ProcessTask::Command(command)) => Ok(Self::Command(command)),
            Some(ProcessTask::Serve(serve)) => Ok(Self::Serve(Box::new(serve.check()?))),
            None => Ok(Self::Serve(Box::new(serve.check()?))),
        }
    }
}

impl CommandLine {
    /// Parses the words of a command line, the program's name first.
    pub(super) fn read(words: impl IntoIterator<Item = impl Into<OsString>>) -> Result<Self, StartFailure> {
        let mut grammar = command_line();
        let words = former_words::replace(words.into_iter().map(Into::into).collect(), &grammar);
        let matches = grammar.try_get_matches_from_mut(&words);
        let matches = matches.map_err(|error| StartFailure::of(error, &words))?;
        if let Some(problem) = unused_option(&matches) {
            return Err(StartFailure::WrongWords(problem));
        }
        Self::from_arg_matches(&matches).map_err(|error| StartFailure::of(error, &words))
    }
}

/// Reason why the process does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartFailure {
    /// The command line requests help or the version, or misses a word; the error has its text and output stream.
    #[error(transparent)]
    CommandLine(#[from] clap::Error),
    /// A word of the command line is not known here.
    #[error("{0}")]
    WrongWords(String),
    /// The settings are not valid.
    #[error(transparent)]
    Settings(#[from] ServiceConfigError),
}

impl StartFailure {
    /// Returns the failure for an error of the parser; a removed flag gets the sentence of the table.
    fn of(error: clap::Error, words: &[OsString]) -> Self {
        let flag = match (error.kind(), error.get(ContextKind::InvalidArg)) {
            (ErrorKind::UnknownArgument, Some(ContextValue::String(flag))) => removed::flag(flag),
            _ => None,
        };
        match flag {
            Some(mistake) => Self::Settings(ServiceConfigError(vec![mistake])),
            None => match wrong_words::text(&error, words) {
                Some(text) => Self::WrongWords(text),
                None => Self::CommandLine(error),
            },
        }
    }
}

/// Returns the command line with all commands and settings.
pub fn command_line() -> clap::Command {
    let globals = ServiceArguments::augment_args(clap::Command::new("globals"));
    help::arrange(CommandLine::command(), &globals)
}

/// Returns the sentence for an option that the command would ignore: a setting of the server before a command, or an option
/// for calls without one.
fn unused_option(matches: &ArgMatches) -> Option<String> {
    let is_given = |matches: &ArgMatches, id: &str| {
        matches.try_contains_id(id).is_ok() && matches.value_source(id) == Some(ValueSource::CommandLine)
    };
    let root = CommandLine::command();
    let Some((name, mut chosen)) = matches.subcommand() else {
        let globals = ServiceArguments::augment_args(clap::Command::new("globals"));
        let given = globals.get_arguments().find(|global| is_given(matches, global.get_id().as_str()))?;
        return Some(format!("--{} is for a command; without one, the program serves", given.get_long()?));
    };
    if let Some(setting) = root.get_arguments().find(|setting| is_given(matches, setting.get_id().as_str())) {
        return Some(format!(
            "--{} is a setting of the server; write it after serve, or omit {name}",
            setting.get_long()?
        ));
    }
    let mut command = root.find_subcommand(name)?;
    while let Some((name, next)) = chosen.subcommand() {
        (command, chosen) = (command.find_subcommand(name)?, next);
    }
    let is_known = |id: &str| command.get_arguments().any(|known| known.get_id() == id);
    let globals = ServiceArguments::augment_args(clap::Command::new("globals"));
    let unused = |global: &&clap::Arg| {
        let id = global.get_id().as_str();
        is_given(chosen, id) && !is_known(id)
    };
    let unused = globals.get_arguments().find(unused)?.get_long()?;
    Some(format!("--{unused} has no effect on {name}; omit it"))
}
