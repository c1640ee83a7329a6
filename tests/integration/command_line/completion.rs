//! Completion in bash: words of the grammar, and names from a service; nothing without a service.

use std::{net::TcpListener, path::Path, process::Command};

use super::{program, terminal::Typed, text, world};
use crate::{harness::*, page::insert_ems};

/// Completes as bash does: `end` is the text that bash replaces. Prints the replies, one a line.
const COMPLETE: &str = r#"
eval "$(linkis-rm completions bash)"
complete -p linkis-rm >/dev/null || exit 3
COMP_LINE=$1 COMP_POINT=${#1}
_linkis_rm linkis-rm "$2"
[ ${#COMPREPLY[@]} -eq 0 ] || printf '%s\n' "${COMPREPLY[@]}"
"#;

/// Runs bash with the program in its path, for at most a minute.
fn bash(address: &str, words: &[&str]) -> Command {
    // Takes the variables of the other commands.
    let settings = program(address, &[]);
    let mut command = Command::new("timeout");
    command.args(["60", "bash", "--norc", "--noprofile"]).args(words);
    for (name, value) in settings.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let folder = Path::new(*PROGRAM).parent().unwrap().display();
    command.env("PATH", format!("{folder}:{}", std::env::var("PATH").unwrap())).env("INPUTRC", "/dev/null");
    command
}

/// Returns the words that bash gets for a line.
#[track_caller]
fn completed(address: &str, line: &str, end: &str) -> Vec<String> {
    let output = bash(address, &["-c", COMPLETE, "bash", line, end]).output().unwrap();
    let error = text(&output.stderr);
    assert!(output.status.success() && error.is_empty(), "{line}: {:?} {error}", output.status);
    text(&output.stdout).lines().map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn completion_in_bash_has_names_of_the_service() {
    let world = world().await;
    let address = &world.rm.address;
    let id = world.grants[0].ticket_id.to_string();
    let on_line = format!("linkis-rm -a {address} em get host1");
    let users = || async { completed(address, "linkis-rm waiting --user ha", "ha") == ["hadoop"] };
    eventually("the user is completed", LONG, users).await;
    for (line, end, found) in [
        ("linkis-rm em get ho", "ho", &["host1", "host2", "host3"][..]),
        ("linkis-rm em get host2:9", "9", &["9102"]),
        ("linkis-rm hold add --em=host3", "host3", &["host3"]),
        ("linkis-rm em get nothing", "nothing", &[]),
        ("linkis-rm ticket get ", "", &[&id[28..], &world.grants[1].ticket_id.to_string()[28..]]),
        (&format!("linkis-rm ticket get {}", &id[..30]), &id[..30], &[&id]),
        ("linkis-rm limit get e", "e", &["\"each user\""]),
        ("linkis-rm limit get \"each u", "each u", &["each user"]),
        ("linkis-rm scope get user=ha", "ha", &["hadoop"]),
        ("linkis-rm queue get root.eng.e", "root.eng.e", &["root.eng.etl"]),
        ("linkis-rm provider check ", "", &["default"]),
        ("linkis-rm em list --state s", "s", &["silent"]),
        ("linkis-rm em unr", "unr", &["unregister"]),
        ("linkis-rm limit apply ", "", &[]),
    ] {
        let mut found = found.to_vec();
        found.sort_unstable();
        let is_found = || async {
            let mut got = completed(address, line, end);
            got.sort();
            got == found
        };
        // A tab waits for a second, which may not be enough while other tests run.
        eventually(line, LONG, is_found).await;
    }
    let of_line = || async { completed("127.0.0.1:1", &on_line, "host1") == ["host1"] };
    eventually("the line names the service", LONG, of_line).await;
}

/// The names of the first page fill no reply to a longer prefix.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn completion_finds_names_behind_the_first_page() {
    let (database, rm) = start().await;
    insert_ems(&database, 1010).await;
    let ems = |line: &str| completed(&rm.address, &format!("linkis-rm em get {line}"), line);
    // All pages are read within the second of a tab, but perhaps not while other tests run.
    eventually("the last EMs are completed", LONG, async || ems("openb-node-10").len() == 10).await;
    eventually("the last EM is completed", LONG, async || ems("openb-node-1009") == ["openb-node-1009"]).await;
    eventually("some EMs are completed", LONG, async || ems("openb-node-").len() == 100).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn completion_without_service_is_empty_and_ends() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = silent.local_addr().map(|address| (silent, address.to_string())).unwrap();
    for address in ["127.0.0.1:1", &silent.1, "no address"] {
        assert!(completed(address, "linkis-rm em get ", "").is_empty(), "{address}");
        assert_eq!(completed(address, "linkis-rm em ge", "ge"), ["get"], "{address}");
    }
}

/// An interactive shell inserts the completed name at a tab.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn completion_at_a_tab_inserts_the_name() {
    let (_database, rm) = start_with_em(em("the-only-em"), load(8, 4, 4)).await;
    let mut shell = bash(&rm.address, &["-i"]);
    shell.env("PS1", "ready> ").env("TERM", "dumb");
    // A terminal's foreground process is the shell itself.
    let mut typed = Typed::start(shell);
    typed.until("ready> ");
    typed.types("eval \"$(linkis-rm completions bash)\"; echo do''ne\n");
    typed.until("\r\ndone");
    typed.types("linkis-rm em get the-o");
    typed.until("em get the-o");
    typed.press_until("\t", "em get the-only-em:9102");
    typed.types("\n");
    typed.until("REGISTERED");
    typed.types("exit\n");
    typed.end();
}
