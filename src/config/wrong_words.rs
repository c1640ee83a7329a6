//! Errors of the grammar: the wrong word, and the nearest right one.
//!
//! Caller: `command_line`. Other errors of the parser keep its text.

use std::ffi::OsString;

use clap::{
    Error,
    error::{ContextKind, ContextValue, ErrorKind},
};

use super::command_line;

/// Returns the text for an unknown command, option or value; `None` for another error.
pub(super) fn text(error: &Error, words: &[OsString]) -> Option<String> {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => vec![text.clone()],
        Some(ContextValue::Strings(texts)) => texts.clone(),
        _ => vec![],
    };
    let first = |kind| context(kind).into_iter().next();
    let command = command_of(words);
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let wrong = first(ContextKind::InvalidSubcommand)?;
            let typed = format!("{command} {wrong}").trim_start_matches("linkis-rm ").to_owned();
            // The parser sorts the nearest last.
            let nearest = context(ContextKind::SuggestedSubcommand).pop();
            let advice = nearest
                .map_or_else(|| format!("{command} --help lists them"), |word| format!("nearest: {command} {word}"));
            Some(format!("no command {typed:?}; {advice}"))
        }
        ErrorKind::UnknownArgument => {
            let wrong = first(ContextKind::InvalidArg)?;
            let nearest = first(ContextKind::SuggestedArg);
            let advice =
                nearest.map_or_else(|| format!("{command} --help lists them"), |word| format!("nearest: {word}"));
            let kind = if wrong.starts_with('-') { "option" } else { "argument" };
            Some(format!("no {kind} {wrong:?} of {command}; {advice}"))
        }
        ErrorKind::InvalidValue => {
            let (option, wrong) = (first(ContextKind::InvalidArg)?, first(ContextKind::InvalidValue)?);
            let valid = context(ContextKind::ValidValue);
            if valid.is_empty() {
                return None;
            }
            let option = option.split(' ').next().unwrap_or_default();
            let nearest =
                first(ContextKind::SuggestedValue).map_or_else(String::new, |word| format!("; nearest: {word}"));
            Some(format!("{option}: no {wrong:?}; one of {}{nearest}", valid.join(", ")))
        }
        _ => None,
    }
}

/// Returns the known command at the beginning of the words, with the program's name.
fn command_of(words: &[OsString]) -> String {
    let grammar = command_line();
    let (mut command, mut name) = (&grammar, "linkis-rm".to_owned());
    for word in words.iter().skip(1).filter_map(|word| word.to_str()) {
        if let Some(next) = command.find_subcommand(word) {
            name = format!("{name} {word}");
            command = next;
        }
    }
    name
}
