//! The line up to the cursor: its words, and the words that the grammar allows next.

use clap::{Arg, Command};

/// A word that continues the line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Word {
    /// The word.
    pub text: String,
    /// What it is; empty if its name has it.
    pub about: String,
}

/// A line as words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// Words without quotes, the program's first. The last one is at the cursor, and may be empty.
    words: Vec<String>,
    /// Whether the cursor is in quotes.
    pub is_quoted: bool,
}

impl Line {
    fn last(&self) -> &str {
        self.words.last().map_or("", String::as_str)
    }
}

/// Splits a line as shells do: at blanks outside quotes.
pub fn split(line: &str) -> Line {
    let (mut words, mut quote, mut chars) = (vec![String::new()], None, line.trim_start().chars());
    let mut is_between = false;
    while let Some(c) = chars.next() {
        match (quote, c) {
            (None, c) if c.is_whitespace() => {
                is_between = true;
                continue;
            }
            (Some(open), c) if c == open => quote = None,
            (None, '"' | '\'') => quote = Some(c),
            _ => {}
        }
        if is_between {
            words.push(String::new());
            is_between = false;
        }
        let Some(word) = words.last_mut() else { break };
        match (quote, c) {
            (_, '"') if quote != Some('\'') => {}
            (_, '\'') if quote != Some('"') => {}
            (None, '\\') => word.extend(chars.next()),
            _ => word.push(c),
        }
    }
    if is_between {
        words.push(String::new());
    }
    Line { words, is_quoted: quote.is_some() }
}

/// Returns the number of bytes of the last word before the end that the shell replaces.
pub fn replaced(line: &Line, end: &str) -> usize {
    let last = line.last();
    // The shell's text of a word with quotes or backslashes is another one; then it replaces the whole word.
    last.strip_suffix(end).filter(|start| start.is_empty() || start.ends_with([':', '='])).map_or(0, str::len)
}

/// Kinds of names that the service has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NameKind {
    /// EMs.
    Em,
    /// Users with tickets.
    User,
    /// Live tickets.
    Ticket,
    /// Waiting requests, by their ticket ids.
    Waiting,
    /// Limits, by their labels.
    Limit,
    /// Scopes, by their labels.
    Scope,
    /// Queues of a cluster.
    Queue,
    /// External clusters.
    Provider,
}

/// The cursor in the grammar: what the last word of a line can be.
#[derive(Debug)]
pub struct Cursor<'g> {
    program: &'g Command,
    command: &'g Command,
    /// Words of the command, without the program's name.
    path: Vec<&'g str>,
    /// Options with values before the cursor.
    given: Vec<(&'g Arg, String)>,
    /// Argument whose value is at the cursor; `None` for a command or an option.
    argument: Option<&'g Arg>,
    /// Part of the last word that the value follows, such as `--em=`.
    prefix: String,
    /// Typed beginning of the value or word.
    typed: String,
}

impl<'g> Cursor<'g> {
    /// Returns the cursor of a line; `None` where the grammar has no further word.
    pub fn of(program: &'g Command, line: &Line) -> Option<Self> {
        let (typed, before) = line.words.split_last()?;
        let (mut command, mut path, mut given) = (program, Vec::new(), Vec::new());
        let (mut open, mut positionals, mut is_positional) = (None, 0_usize, false);
        for word in before.iter().skip(1) {
            if let Some(option) = open.take() {
                given.push((option, word.clone()));
            } else if word == "--" {
                is_positional = true;
            } else if word.starts_with('-') && !is_positional {
                let (option, value) = option(command, word)?;
                match value {
                    Some(value) => given.push((option, value)),
                    None if takes_next(option) => open = Some(option),
                    None => {}
                }
            } else if let Some(verb) = command.find_subcommand(word).filter(|_| positionals == 0) {
                (command, path) = (verb, [path, vec![verb.get_name()]].concat());
            } else {
                positionals += 1;
            }
        }
        let mut cursor =
            Self { program, command, path, given, argument: open, prefix: String::new(), typed: typed.clone() };
        if open.is_some() {
            return Some(cursor);
        }
        if typed.starts_with('-') && !is_positional {
            if let Some((name, _)) = typed.split_once('=') {
                let (option, value) = option(command, typed)?;
                (cursor.argument, cursor.prefix) = (Some(option), format!("{name}="));
                cursor.typed = value.unwrap_or_default();
            }
            return Some(cursor);
        }
        if command.has_subcommands() {
            return (positionals == 0).then_some(cursor);
        }
        let mut arguments = command.get_positionals().filter(|argument| !argument.is_hide_set());
        // The last argument can have several words.
        let last = command
            .get_positionals()
            .filter(|argument| argument.get_num_args().is_some_and(|n| n.max_values() > 1))
            .last();
        cursor.argument = Some(arguments.nth(positionals).or(last)?);
        Some(cursor)
    }

    /// Returns the beginning of the wanted value or word.
    pub fn typed(&self) -> &str {
        &self.typed
    }

    /// Returns the part of the last word before the value.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Returns the options before the cursor that have values.
    pub fn given(&self) -> &[(&'g Arg, String)] {
        &self.given
    }

    /// Returns the value of an option before the cursor.
    pub fn value(&self, id: &str) -> Option<&str> {
        self.given.iter().rev().find(|(option, _)| option.get_id() == id).map(|(_, value)| value.as_str())
    }

    /// Returns whether the value is the name of a file.
    pub fn is_file(&self) -> bool {
        self.argument.is_some_and(|argument| ["FILE", "FOLDER"].contains(&value_name(argument)))
    }

    /// Returns the kind of names of the value, if the service has them.
    pub fn names(&self) -> Option<NameKind> {
        let argument = self.argument?;
        let noun = self.path.first().copied().unwrap_or_default();
        match (argument.get_id().as_str(), value_name(argument)) {
            ("em", _) => Some(NameKind::Em),
            ("user", _) => Some(NameKind::User),
            ("queue", _) => Some(NameKind::Queue),
            ("provider", _) => Some(NameKind::Provider),
            (_, "TICKET") if noun == "waiting" => Some(NameKind::Waiting),
            // An adopted ticket gets a new id.
            (_, "TICKET") if !self.path.contains(&"adopt") => Some(NameKind::Ticket),
            ("labels", "LABELS") if noun == "limit" => Some(NameKind::Limit),
            ("labels", "LABELS") if noun == "scope" => Some(NameKind::Scope),
            ("name", _) if noun == "provider" => Some(NameKind::Provider),
            _ => None,
        }
    }

    /// Returns the words of the grammar that begin with the typed ones: commands, options, or values of an argument.
    pub fn words(&self) -> Vec<Word> {
        let word = |text: &str, about: String| Word { text: text.to_owned(), about };
        let all: Vec<Word> = match self.argument {
            Some(argument) => {
                let values = argument.get_possible_values().into_iter().filter(|value| !value.is_hide_set());
                let about = |value: &clap::builder::PossibleValue| {
                    value.get_help().map(ToString::to_string).unwrap_or_default()
                };
                values.map(|value| word(value.get_name(), about(&value))).collect()
            }
            None if self.typed.starts_with('-') => {
                let (own, global) = (self.command.get_arguments(), self.program.get_arguments());
                let mut found: Vec<Word> = Vec::new();
                for option in own.chain(global).filter(|option| !option.is_hide_set()) {
                    let Some(long) = option.get_long().map(|long| format!("--{long}")) else { continue };
                    if found.iter().all(|word| word.text != long) {
                        found.push(word(&long, option.get_help().map(ToString::to_string).unwrap_or_default()));
                    }
                }
                found
            }
            None => {
                let verbs = self.command.get_subcommands().filter(|verb| !verb.is_hide_set());
                verbs
                    .map(|verb| word(verb.get_name(), verb.get_about().map(ToString::to_string).unwrap_or_default()))
                    .collect()
            }
        };
        all.into_iter().filter(|word| word.text.starts_with(&self.typed)).collect()
    }
}

fn value_name(argument: &Arg) -> &str {
    argument.get_value_names().and_then(|names| names.first()).map_or("", |name| name.as_str())
}

/// Returns the option of a word, with its value if the word has it.
fn option<'g>(command: &'g Command, word: &str) -> Option<(&'g Arg, Option<String>)> {
    let find = |is_it: &dyn Fn(&Arg) -> bool| command.get_arguments().find(|option| is_it(option));
    if let Some(long) = word.strip_prefix("--") {
        let (name, value) = long.split_once('=').map_or((long, None), |(name, value)| (name, Some(value.to_owned())));
        return Some((find(&|option| option.get_long() == Some(name))?, value));
    }
    let mut chars = word.chars().skip(1);
    let short = chars.next()?;
    let (option, rest) = (find(&|option| option.get_short() == Some(short))?, chars.collect::<String>());
    Some((option, Some(rest).filter(|rest| !rest.is_empty())))
}

fn takes_next(option: &Arg) -> bool {
    option.get_action().takes_values() && !option.is_require_equals_set()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::command_line;

    #[test]
    fn completion_line_is_split_as_by_shells() {
        for (line, words, is_quoted) in [
            ("linkis-rm ", &["linkis-rm", ""][..], false),
            ("linkis-rm  em\tget h", &["linkis-rm", "em", "get", "h"], false),
            ("rm \"a b\" 'c \"d' e\\ f", &["rm", "a b", "c \"d", "e f"], false),
            ("rm --user \"data sci", &["rm", "--user", "data sci"], true),
            ("rm \"\" ", &["rm", "", ""], false),
        ] {
            let words = words.iter().map(|word| (*word).to_owned()).collect();
            assert_eq!(split(line), Line { words, is_quoted }, "{line}");
        }
    }

    #[test]
    fn completion_words_are_those_of_the_grammar() {
        let mut grammar = command_line();
        grammar.build();
        let words = |line: &str| -> Vec<String> {
            let cursor = Cursor::of(&grammar, &split(line));
            cursor.map(|cursor| cursor.words().into_iter().map(|word| word.text).collect()).unwrap_or_default()
        };
        for (line, found) in [
            ("linkis-rm comp", &["completions"][..]),
            ("linkis-rm -a 127.0.0.1:1 em re", &["resume", "register"]),
            ("linkis-rm em list --st", &["--state"]),
            ("linkis-rm em list --state s", &["silent"]),
            ("linkis-rm em list --state=s", &["silent"]),
            ("linkis-rm em list -o js", &["json", "jsonl"]),
            ("linkis-rm em list --add", &["--address"]),
            ("linkis-rm em nothing ", &[]),
            ("linkis-rm --nothing ", &[]),
            ("linkis-rm ems ", &[]),
        ] {
            assert_eq!(words(line), found, "{line}");
        }
        assert!(words("linkis-rm ").len() > 20 && !words("linkis-rm ").contains(&"complete-words".to_owned()));
    }

    #[test]
    fn completion_names_have_kinds() {
        use NameKind::{Em, Limit, Provider, Queue, Scope, Ticket, User, Waiting};
        let mut grammar = command_line();
        grammar.build();
        for (line, kind, is_file) in [
            ("linkis-rm em get ", Some(Em), false),
            ("linkis-rm hold add --em=", Some(Em), false),
            ("linkis-rm waiting --user ", Some(User), false),
            ("linkis-rm ticket release --reason stuck ", Some(Ticket), false),
            ("linkis-rm ticket adopt ", None, false),
            ("linkis-rm waiting remove ", Some(Waiting), false),
            ("linkis-rm history --ticket ", Some(Ticket), false),
            ("linkis-rm limit get ", Some(Limit), false),
            ("linkis-rm scope get ", Some(Scope), false),
            ("linkis-rm queue get ", Some(Queue), false),
            ("linkis-rm queue list --provider ", Some(Provider), false),
            ("linkis-rm provider check ", Some(Provider), false),
            ("linkis-rm em get host1 ", None, false),
            ("linkis-rm limit apply ", None, true),
            ("linkis-rm --token-file ", None, true),
        ] {
            let cursor = Cursor::of(&grammar, &split(line));
            assert_eq!(cursor.as_ref().and_then(Cursor::names), kind, "{line}");
            assert_eq!(cursor.is_some_and(|cursor| cursor.is_file()), is_file, "{line}");
        }
    }

    #[test]
    fn completion_replaces_the_end_that_bash_names() {
        for (line, end, replaced_from) in [
            ("rm em get host1:91", "91", 6),
            ("rm --em=ho", "ho", 5),
            ("rm em get ho", "ho", 0),
            ("rm em get ", "", 0),
            ("rm --user team\\ da", "team\\ da", 0),
        ] {
            assert_eq!(replaced(&split(line), end), replaced_from, "{line}");
        }
    }
}
