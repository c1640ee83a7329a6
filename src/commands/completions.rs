//! `completions`: completion scripts for shells; and `complete-words`, which the scripts of bash, zsh and fish call.
//!
//! These scripts pass on the line up to the cursor, and the running program returns the words that continue it: commands, options and
//! their values, and names from the service. So a script stays valid after an update. Other shells get generated scripts,
//! without names.
//!
//! - `words`: the line and its grammar; `names`: names from the service.

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use clap::{Args, ValueEnum};
use clap_complete::{Shell, generate};

use crate::config;

use super::{
    error::{CommandFailure, CommandReply, EXIT_NO},
    output::OutputArguments,
};

mod names;
mod words;

use words::{Cursor, Word};

/// Maximum number of words in a reply.
const WORDS_MAX: usize = 100;

const BASH: &str = r#"_linkis_rm() {
    local found word
    COMPREPLY=()
    found=$("$1" complete-words bash "$2" -- "${COMP_LINE:0:COMP_POINT}" 2>/dev/null) || {
        compopt -o default 2>/dev/null
        return
    }
    while IFS= read -r word; do
        [ -n "$word" ] && COMPREPLY+=("$word")
    done <<<"$found"
}
complete -F _linkis_rm linkis-rm
"#;

const ZSH: &str = r#"#compdef linkis-rm
_linkis-rm() {
    local found
    found="$("${words[1]}" complete-words zsh -- "${(j: :)words[1,CURRENT]}" 2>/dev/null)" || { _files; return; }
    [[ -n "$found" ]] || return 1
    local -a lines
    lines=("${(@f)found}")
    _describe 'linkis-rm' lines
}
if [ "$funcstack[1]" = "_linkis-rm" ]; then
    _linkis-rm "$@"
else
    compdef _linkis-rm linkis-rm
fi
"#;

const FISH: &str = r#"function __linkis_rm_words
    set -l line (commandline --current-process --cut-at-cursor)
    set -l words (commandline --current-process --tokenize)
    set -l found ($words[1] complete-words fish -- "$line" 2>/dev/null)
    if test $status -eq 0
        string join \n -- $found
    else
        __fish_complete_path (commandline --current-token)
    end
end
complete --command linkis-rm --no-files --keep-order --arguments '(__linkis_rm_words)'
"#;

/// Arguments of `completions`.
#[derive(Debug, Clone, Args)]
pub struct CompletionsCommand {
    /// Shell of the script.
    #[arg(value_enum)]
    shell: Shell,
}

impl CompletionsCommand {
    /// Prints the script.
    pub fn run(self) -> Result<CommandReply, CommandFailure> {
        let script = match self.shell {
            Shell::Bash => BASH.to_owned(),
            Shell::Zsh => ZSH.to_owned(),
            Shell::Fish => FISH.to_owned(),
            other => generated(other),
        };
        OutputArguments::default().printer().print(&script)?;
        Ok(CommandReply::Yes)
    }
}

fn generated(shell: Shell) -> String {
    let mut script = Vec::new();
    let mut command = config::command_line();
    let name = command.get_name().to_owned();
    generate(shell, &mut command, name, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// A shell whose script calls the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum CallingShell {
    Bash,
    Zsh,
    Fish,
}

/// Arguments of `complete-words`.
#[derive(Debug, Clone, Args)]
pub struct CompleteWordsCommand {
    /// Shell that prints the words.
    #[arg(value_enum)]
    shell: CallingShell,

    /// End of the last word that the shell replaces: bash splits words at signs, too.
    #[arg(default_value = "", hide_default_value = true)]
    end: String,

    /// Line up to the cursor.
    #[arg(last = true, required = true, allow_hyphen_values = true)]
    line: String,
}

impl CompleteWordsCommand {
    /// Prints the words that continue the line, one a line. Exit code 1 if the shell completes names of files there.
    pub async fn run(self) -> ExitCode {
        let mut grammar = config::command_line();
        grammar.build();
        let line = words::split(&self.line);
        let Some(cursor) = Cursor::of(&grammar, &line) else { return ExitCode::SUCCESS };
        if cursor.is_file() {
            return ExitCode::from(EXIT_NO);
        }
        let mut found = cursor.words();
        if let Some(kind) = cursor.names() {
            found.extend(names::of(kind, cursor.typed(), &cursor).await);
        }
        found.truncate(WORDS_MAX);
        let replaced = words::replaced(&line, &self.end);
        let text: String = found.iter().map(|word| self.printed(word, &cursor, &line, replaced)).collect();
        let mut out = io::stdout().lock();
        // Without a reader, the words are dropped.
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        #[expect(clippy::disallowed_methods, reason = "the runtime would wait for a name server that does not reply")]
        std::process::exit(0)
    }

    /// Returns the line of a word in the form of the shell; bash gets only the replaced end, in quotes if it needs them.
    fn printed(&self, word: &Word, cursor: &Cursor<'_>, line: &words::Line, replaced: usize) -> String {
        let whole = format!("{}{}", cursor.prefix(), word.text);
        let about = word.about.lines().next().unwrap_or_default();
        match self.shell {
            CallingShell::Bash => {
                let Some(end) = whole.get(replaced..) else { return String::new() };
                let needs_quotes =
                    !line.is_quoted && end.contains(|c: char| c.is_whitespace() || "\\{}'()*?".contains(c));
                if needs_quotes { format!("\"{end}\"\n") } else { format!("{end}\n") }
            }
            _ if about.is_empty() && self.shell == CallingShell::Fish => format!("{whole}\n"),
            CallingShell::Fish => format!("{whole}\t{about}\n"),
            CallingShell::Zsh => {
                let whole = whole.replace('\\', "\\\\").replace(':', "\\:");
                if about.is_empty() { format!("{whole}\n") } else { format!("{whole}:{about}\n") }
            }
        }
    }
}
