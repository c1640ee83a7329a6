//! Commands of earlier versions, replaced by the present noun and verb. Scripts may still use them; help and completions do not.
//!
//! Caller: `command_line`.

use std::ffi::OsString;

/// Former commands, each with its present words.
const FORMER: [(&str, &[&str]); 17] = [
    ("applications", &["application", "list"]),
    ("drain", &["em", "drain"]),
    ("ems", &["em", "list"]),
    ("holds", &["hold", "list"]),
    ("instances", &["instance", "list"]),
    ("limits", &["limit"]),
    ("policies", &["policy", "list"]),
    ("providers", &["provider", "list"]),
    ("queues", &["queue", "list"]),
    ("release", &["ticket", "release"]),
    ("resume", &["em", "resume"]),
    ("scopes", &["scope", "list"]),
    ("tickets", &["ticket", "list"]),
    ("tokens", &["token"]),
    ("unhold", &["hold", "release"]),
    ("em", &["em", "get"]),
    ("ticket", &["ticket", "get"]),
];

/// Options of the former command `hold`, which is `hold add`.
const HOLD_OPTIONS: [&str; 4] = ["--user", "--em", "--for", "--reason"];

/// Returns the command line with present words.
pub(super) fn replace(mut words: Vec<OsString>, grammar: &clap::Command) -> Vec<OsString> {
    let Some(at) = command_at(&words, grammar) else { return words };
    let text = |at: usize| words.get(at).and_then(|word| word.to_str()).unwrap_or_default();
    let (word, next) = (text(at), text(at + 1));
    let present: &[&str] = match word {
        "hold" if HOLD_OPTIONS.iter().any(|option| next.split('=').next() == Some(option)) => &["hold", "add"],
        // A verb has only letters, an EM and a ticket have others, too.
        "em" | "ticket" if next.starts_with('-') || next.chars().all(|c| c.is_ascii_alphabetic()) => return words,
        _ => match FORMER.iter().find(|(former, _)| *former == word) {
            Some((_, present)) => present,
            None => return words,
        },
    };
    words.splice(at..=at, present.iter().map(OsString::from));
    words
}

/// Returns the index of the command among the words: the first that is neither an option nor its value.
fn command_at(words: &[OsString], grammar: &clap::Command) -> Option<usize> {
    let mut at = 1;
    loop {
        let word = words.get(at)?.to_str()?;
        if !word.starts_with('-') {
            return Some(at);
        }
        let takes_next = grammar.get_arguments().any(|option| {
            let is_long = option.get_long().is_some_and(|long| word.strip_prefix("--") == Some(long));
            let is_short = option.get_short().is_some_and(|short| word.strip_prefix('-') == Some(&short.to_string()));
            (is_long || is_short) && option.get_action().takes_values()
        });
        at += if takes_next { 2 } else { 1 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::command_line;

    #[test]
    fn former_words_become_noun_and_verb() {
        let grammar = command_line();
        for (line, present) in [
            ("ems --full 80", "em list --full 80"),
            ("em host1:9102", "em get host1:9102"),
            ("ticket 5d1b8e2c", "ticket get 5d1b8e2c"),
            ("hold --user alice --for 1m", "hold add --user alice --for 1m"),
            ("hold list", "hold list"),
            ("limits list", "limit list"),
            ("-a drain:1 ems", "-a drain:1 em list"),
            ("--address ems tickets", "--address ems ticket list"),
            ("--address=ems tickets", "--address=ems ticket list"),
            ("em lst", "em lst"),
            ("--listen drain", "--listen drain"),
        ] {
            let words = |line: &str| std::iter::once("linkis-rm").chain(line.split(' ')).map(OsString::from).collect();
            let present: Vec<OsString> = words(present);
            assert_eq!(replace(words(line), &grammar), present, "{line}");
        }
        for (_, present) in FORMER {
            let noun = grammar.find_subcommand(present[0]).unwrap();
            assert!(present.get(1).is_none_or(|verb| noun.find_subcommand(verb).is_some()), "{present:?}");
        }
    }
}
