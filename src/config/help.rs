//! Help of the program: commands in groups, and options that are shown once.
//!
//! Caller: `command_line`.

use clap::{Arg, Command};

use crate::commands::help::examples;

/// Commands by what they are for.
const GROUPS: [(&str, &[&str]); 4] = [
    ("Look", &["overview", "top", "em", "ticket", "waiting", "refusals", "user", "scope", "usage", "history"]),
    ("Decide", &["request", "limit", "order", "priority", "reclaim", "policy", "hold"]),
    ("Outside", &["provider", "queue", "application"]),
    (
        "Run",
        &["serve", "demo", "token", "audit", "repair", "tasks", "instance", "health", "migrate", "completions", "man"],
    ),
];

/// Width of the help on a wider terminal, in columns.
const WIDTH_MAX: usize = 100;

/// What the program does without a command, and with one.
pub const ABOUT: &str = "\
Without a command it serves, with a private PostgreSQL unless --database-url names another.
With a command it calls a service that runs.";

const END: &str =
    "Options to serve with: linkis-rm serve --help. Exit codes: 0 yes or done, 1 no, 2 no reply, 64 wrong words.";

/// Adds the global options, and arranges the help: the program's has groups of commands and the global options, that of a
/// command its own options only.
pub(super) fn arrange(program: Command, globals: &Command) -> Command {
    let globals: Vec<Arg> = globals.get_arguments().cloned().collect();
    let template = format!(
        "{{about}}\n\n{{usage-heading}} {{usage}}\n\n{ABOUT}\n\n{}Global options, before or after the command:\n{{options}}{{after-help}}",
        groups(&program)
    );
    let examples = examples(&["em list --state silent", "ticket list --user alice", "limit list"]);
    let program = program.mut_args(|setting| setting.hide(true)).args(&globals);
    let program = program.help_template(template).after_help(format!("{examples}\n\n{END}")).max_term_width(WIDTH_MAX);
    program.mut_subcommands(|command| hide(command, &globals))
}

/// Hides the global options in the help of a command and its verbs.
fn hide(command: Command, globals: &[Arg]) -> Command {
    let missing: Vec<Arg> = globals.iter().filter(|global| !has(&command, global)).cloned().collect();
    let command = command.args(missing).mut_args(|option| {
        let is_global = globals.iter().any(|global| global.get_id() == option.get_id());
        if is_global { option.hide(true) } else { option }
    });
    command.mut_subcommands(|verb| hide(verb, globals))
}

fn has(command: &Command, option: &Arg) -> bool {
    command.get_arguments().any(|known| known.get_id() == option.get_id())
}

/// Returns the commands in their groups; a noun has its verbs behind it.
fn groups(program: &Command) -> String {
    let commands = || GROUPS.iter().flat_map(|(_, names)| names.iter());
    let widest = commands().map(|name| name.len()).max().unwrap_or(0);
    let line = |name: &&str| {
        let command = program.find_subcommand(name);
        let about = command.and_then(Command::get_about).map(ToString::to_string).unwrap_or_default();
        let verbs: Vec<&str> =
            command.iter().flat_map(|command| command.get_subcommands()).map(Command::get_name).collect();
        let about = match verbs.is_empty() {
            true => about.split(['.', ':']).next().unwrap_or_default().to_owned(),
            false => format!("{about}: {}", verbs.join(", ")),
        };
        format!("  {name:widest$}  {about}\n")
    };
    let group =
        |(title, names): &(&str, &[&str])| format!("{title}:\n{}\n", names.iter().map(line).collect::<String>());
    GROUPS.iter().map(group).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn help_groups_name_each_command_once() {
        let named: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        let command_line = crate::config::command_line();
        let shown = command_line.get_subcommands().filter(|command| !command.is_hide_set());
        let known: BTreeSet<&str> = shown.map(Command::get_name).collect();
        assert_eq!(named.iter().copied().collect::<BTreeSet<_>>(), known);
        assert_eq!(named.len(), known.len());
    }
}
