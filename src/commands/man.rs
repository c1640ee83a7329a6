//! `man`: a manual page for each command, from the grammar.
//!
//! The help of a command and its page have the same words. Hidden commands and options have none.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use clap::{Args, Command, builder::Resettable};
use clap_mangen::{
    Man,
    roff::{Roff, bold, roman},
};

use crate::config::{self, ABOUT};

use super::{
    error::{CommandFailure, CommandReply},
    output::OutputArguments,
};

/// Arguments of `man`.
#[derive(Debug, Clone, Args)]
pub struct ManCommand {
    /// Folder of the pages, such as /usr/local/share/man/man1. A missing one is created.
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
}

impl ManCommand {
    /// Writes the pages.
    pub fn run(self) -> Result<CommandReply, CommandFailure> {
        let pages = pages()?;
        write(&self.folder, &pages)
            .map_err(|error| CommandFailure::Refused(format!("{}: {error}", self.folder.display())))?;
        let done = format!("{} pages in {}\n", pages.len(), self.folder.display());
        OutputArguments::default().printer().print(&super::output::text::clean_lines(&done))?;
        Ok(CommandReply::Yes)
    }
}

fn write(folder: &Path, pages: &[ManPage]) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    pages.iter().try_for_each(|page| fs::write(folder.join(&page.file), &page.text))
}

/// A page of the manual.
struct ManPage {
    /// Name of its file.
    file: String,
    /// Text in roff.
    text: Vec<u8>,
}

/// Returns the pages of all commands, the program's last.
fn pages() -> io::Result<Vec<ManPage>> {
    let program = config::command_line().disable_help_subcommand(true);
    let about = program.get_about().map(ToString::to_string).unwrap_or_default();
    let mut program = program.long_about(format!("{about}\n\n{ABOUT}"));
    program.build();
    let mut pages = Vec::new();
    add_pages(&program, &mut pages)?;
    Ok(pages)
}

fn add_pages(command: &Command, pages: &mut Vec<ManPage>) -> io::Result<()> {
    for verb in command.get_subcommands().filter(|verb| !verb.is_hide_set()) {
        add_pages(verb, pages)?;
    }
    pages.push(page(command)?);
    Ok(())
}

/// Returns the page of a command. Its examples keep their lines.
fn page(command: &Command) -> io::Result<ManPage> {
    let end = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let man =
        Man::new(command.clone().after_help(Resettable::Reset)).date(env!("CARGO_PKG_VERSION")).source("linkis-rm");
    let mut text = Vec::new();
    man.render(&mut text)?;
    let mut more = Roff::new();
    if !end.is_empty() {
        more.control("SH", ["EXAMPLES"]).control("nf", []);
        let shown = |line: &&str| !line.starts_with("Example");
        for line in end.lines().filter(shown) {
            more.text([roman(line.trim_start())]);
        }
        more.control("fi", []);
    }
    let (program, section) = (config::command_line().get_name().to_owned(), "(1)");
    if command.get_name() != program {
        more.control("SH", ["SEE ALSO"]).text([bold(program), roman(section)]);
    }
    text.extend(more.to_roff().into_bytes());
    Ok(ManPage { file: man.get_filename(), text })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Returns the names of a command's pages: its own, and those of its verbs.
    fn names(command: &Command, name: &str, found: &mut BTreeSet<String>) {
        found.insert(format!("{name}.1"));
        for verb in command.get_subcommands().filter(|verb| !verb.is_hide_set()) {
            names(verb, &format!("{name}-{}", verb.get_name()), found);
        }
    }

    #[test]
    fn man_pages_cover_each_shown_command() {
        let mut expected = BTreeSet::new();
        names(&config::command_line(), "linkis-rm", &mut expected);
        let pages = pages().unwrap();
        let files: BTreeSet<String> = pages.iter().map(|page| page.file.clone()).collect();
        assert_eq!(files, expected);
        assert!(files.len() > 40 && files.contains("linkis-rm-em-drain.1"), "{files:?}");
        for page in &pages {
            check(&page.file, std::str::from_utf8(&page.text).unwrap());
        }
    }

    /// Checks that a page has a title and no empty section, that its requests are known, and that its blocks end.
    fn check(file: &str, text: &str) {
        const REQUESTS: [&str; 13] =
            [".TH", ".SH", ".TP", ".PP", ".RS", ".RE", ".IP", ".br", ".nf", ".fi", ".ie", ".el", ".\\\""];
        let request = |line: &str| line.split_whitespace().next().unwrap_or_default().to_owned();
        // The first lines define the apostrophe.
        let lines: Vec<&str> = text.lines().filter(|line| ![".ie", ".el"].contains(&request(line).as_str())).collect();
        assert!(lines[0].starts_with(".TH linkis-rm") && lines[0].contains(" 1 "), "{file}: {}", lines[0]);
        let unknown = lines.iter().find(|line| line.starts_with('.') && !REQUESTS.contains(&request(line).as_str()));
        assert_eq!(unknown, None, "{file}");
        assert!(!lines.iter().any(|line| line.starts_with('\'')), "{file}: an apostrophe begins a request");
        for (begin, end) in [(".nf", ".fi"), (".RS", ".RE")] {
            let count = |wanted: &str| lines.iter().filter(|line| request(line) == wanted).count();
            assert_eq!(count(begin), count(end), "{file}: {begin}");
        }
        let sections: Vec<usize> =
            lines.iter().enumerate().filter(|(_, line)| line.starts_with(".SH")).map(|(at, _)| at).collect();
        for (at, next) in sections.iter().zip(sections.iter().skip(1).chain([&lines.len()])) {
            let has_text = lines[at + 1..*next].iter().any(|line| !line.starts_with('.') && !line.trim().is_empty());
            assert!(has_text, "{file}: {} is empty", lines[*at]);
        }
        for section in ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS"] {
            assert!(lines.contains(&format!(".SH {section}").as_str()), "{file}: no {section}");
        }
    }
}
