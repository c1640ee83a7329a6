//! `limit set`, `get`, `export`: one limit, what it replaces, and the file of all limits.

use std::fs;

use super::{program, terminal::typed_on, text};
use crate::{certificates::Folder, harness::*};

/// Returns the exit code and all output of a command without a terminal.
fn run(rm: &Instance, words: &[&str]) -> (i32, String) {
    let output = program(&rm.address, words).output().unwrap();
    (output.status.code().unwrap(), text(&output.stdout) + &text(&output.stderr))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_set_shows_and_confirms_the_replaced_limit() {
    let (database, rm) = start_with_em(em("host1"), load(64, 16, 20)).await;
    for _ in 0..2 {
        rm.client.request_resource(&request(&em("host1"), "hadoop", load(1, 1, 1))).await.granted();
    }
    let set = ["limit", "set", "user=hadoop", "--max", "instances=2,memory=20g"];
    let done = "set the limit user=hadoop: instances=2 memory=20 GB\n";
    assert_eq!(run(&rm, &set), (0, done.to_owned()), "a new limit needs no confirmation");
    let (code, got) = run(&rm, &["limit", "get", "user=hadoop"]);
    assert!(code == 0 && got.contains("MAX    instances=2 memory=20 GB\n"), "{got}");

    let lower = ["limit", "set", "user=hadoop", "--max", "instances=1"];
    let (code, got) = run(&rm, &lower);
    let question = [
        "user=hadoop\n  now  instances=2 memory=20 GB  set ",
        "\n  new  instances=1\nChange it? ",
        "add --yes to confirm",
    ];
    assert!(code == 64 && question.iter().all(|part| got.contains(part)), "{got}");
    let (code, got) = typed_on(80, &rm.address, &lower, "n\n");
    assert!(code == Some(1) && got.contains("nothing was done"), "{got}");
    assert!(run(&rm, &["limit", "get", "user=hadoop"]).1.contains("instances=2"), "a declined change changes nothing");
    let (code, got) = typed_on(80, &rm.address, &lower, "y\n");
    assert!(code == Some(0) && got.contains("over its limit: user=hadoop: instances=2 of 1; nothing ends"), "{got}");
    let (code, got) = run(&rm, &["limit", "set", "user=hadoop", "--mode", "advisory", "--yes"]);
    assert!(
        code == 0 && got.starts_with("changed the limit user=hadoop: instances=1  advisory\n"),
        "the maximum stays: {got}"
    );
    assert!(got.ends_with("over its limit: user=hadoop: instances=2 of 1 (advisory)\n"), "{got}");

    for (words, code, problem) in [
        (&["limit", "set", "user=hadoop", "--max", "cpus=1"][..], 64, "no dimension \"cpus\"; one of memory, cores"),
        (&["limit", "set", "user=hadoop", "--max", "cores=-1"], 64, "cores: \"-1\" is not a whole number from 0 on"),
        (&["limit", "set", "user=hadoop", "--max", "cores=1,cores=2"], 64, "cores is named twice"),
        (&["limit", "set", "user=hadoop", "--max", "memory"], 64, "\"memory\" is not DIMENSION=AMOUNT"),
        (&["limit", "set", "user=hadoop"], 64, "--max"),
        (
            &["limit", "set", "each", "tenant", "--max", "cores=1"],
            64,
            "write \"each tenant\" with its label, in quotes",
        ),
        (&["limit", "set", "tenant", "red", "--max", "cores=1"], 64, "\"tenant\" has no value; write LABEL=VALUE"),
        (&["limit", "set", "bob", "--max", "cores=1"], 64, "\"bob\" has no value; write LABEL=VALUE, or \"each bob\""),
        (
            &["reclaim", "policy", "set", "tenant:red", "--mode", "off"],
            64,
            "\"tenant:red\" has no value; write LABEL=VALUE",
        ),
        (&["order", "set", "--fair-by", "each tenant"], 64, "--fair-by: names labels alone"),
        (&["limit", "set", "team=a", "--max", "cores=4", "--guarantee", "cores=2"], 0, "set the limit team=a"),
        (
            &["limit", "set", "team=a", "--max", "waiting=5"],
            64,
            "--max: replaces all maxima, and the guarantee of cores",
        ),
        (&["priority", "set", "team=a", "--max", "1m"], 64, "is no number of seconds, such as 60"),
        (&["limit", "get", "user=alice"], 1, "there is no limit user=alice; linkis-rm limit list has all"),
        (
            &["request", "cores=1,special.gpu=1", "--user", "a", "--creator", "b"],
            64,
            "no resource has cores=1 special.gpu=1",
        ),
        (&["request", "queue_cores=1", "--user", "a", "--creator", "b"], 64, "--queue: is required"),
    ] {
        let (got_code, got) = run(&rm, words);
        assert!(got_code == code && got.contains(problem), "{words:?}: {got_code} {got}");
    }
    assert_invariants(&database, &rm.client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_export_is_read_by_limit_apply() {
    let (_database, rm) = start().await;
    for words in [
        &["limit", "set", "user=hadoop,creator=IDE", "--max", "instances=2,memory=1537m"][..],
        &["limit", "set", "each user", "--max", "special.gpu=1", "--mode", "advisory"],
        &["limit", "set", "team=data \"science\"", "--max", "cores=7"],
        &["limit", "set", "each creator", "--mode", "off"],
        &["order", "set", "--fair-by", "creator", "--yes", "--reason", "a test"],
        &["priority", "set", "creator=IDE", "--default", "30", "--max", "60", "--yes", "--reason", "a test"],
        &["reclaim", "policy", "set", "each user", "--mode", "observe", "--yes", "--reason", "a test"],
    ] {
        let (code, got) = run(&rm, words);
        assert_eq!(code, 0, "{words:?}: {got}");
    }
    let (code, got) = {
        let folder = Folder::new("limit-none");
        let file = folder.0.join("none.toml");
        fs::write(&file, "# Nothing.\n").unwrap();
        run(&rm, &["limit", "apply", file.to_str().unwrap(), "--yes", "--reason", "a test"])
    };
    assert!(code == 0 && got.ends_with("the limits stay; limit = [] deletes them\n"), "{got}");
    let (code, exported) = run(&rm, &["limit", "export"]);
    assert!(code == 0 && exported.matches("[[limit]]").count() == 4, "{exported}");
    let folder = Folder::new("limit-export");
    let file = folder.0.join("limits.toml");
    fs::write(&file, &exported).unwrap();
    let file = file.to_str().unwrap();
    let same = (0, "the limits are those of the file\n".to_owned());
    assert_eq!(run(&rm, &["limit", "diff", file]), same, "{exported}");
    for words in [
        &["limit", "delete", "each user"][..],
        &["order", "set", "--fair-by", "none"],
        &["priority", "set", "creator=IDE", "--default", "20"],
        &["reclaim", "policy", "delete", "each user"],
        &["priority", "set", "creator=batch", "--default=-60", "--max", "0"],
    ] {
        let (code, got) = run(&rm, &[words, &["--yes", "--reason", "a test"]].concat());
        assert_eq!(code, 0, "{words:?}: {got}");
    }
    let changes = "+ each user: special.gpu=1 advisory\n1 would be added, 0 would be changed, 0 would be removed\n\
        ~ order: turns by creator, positions kept for 1m0s, was turns by none, positions kept for 1m0s\n\
        ~ priority creator=IDE: default 30s, max 60s, was default 20s, max 60s\n\
        - priority creator=batch: default -60s, max 0s\n\
        + reclaim policy each user: observe, idle after 5m0s, grace 30s, 60 per minute\n\
        not all scopes were checked: linkis-rm scope list lists the others\n";
    assert_eq!(run(&rm, &["limit", "diff", file]), (1, changes.to_owned()));
    assert_eq!(run(&rm, &["limit", "apply", file, "--yes", "--reason", "as exported"]).0, 0);
    assert_eq!(run(&rm, &["limit", "export"]), (0, exported));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_command_grants_waits_and_refuses_with_readable_amounts() {
    let (_database, rm) = start_with_em(em("host1"), load(8, 4, 4)).await;
    let request = |more: &[&str]| run(&rm, &[&["request", "--user", "alice", "--creator", "IDE"], more].concat());
    let (code, got) = request(&["memory=6g,cores=1,instances=1", "--dry-run"]);
    assert!(code == 0 && got.starts_with("it fits on host1:9102\n") && got.contains(" of 8 GB\n"), "{got}");
    assert!(rm.client.tickets(None).await.unwrap().is_empty(), "a dry run grants nothing");
    let (code, got) = request(&["memory=6g,cores=1,instances=1"]);
    assert!(code == 0 && got.starts_with("granted ticket ") && got.contains(" on host1:9102; "), "{got}");
    let (code, got) = request(&["memory=6g,cores=1,instances=1", "--wait", "1s"]);
    let refusal = "it does not fit now\nshort: host1:9102  memory wants 6 GB, free 2 GB of 8 GB\n";
    assert!(code == 1 && got == refusal, "{got}");
    let (code, got) = request(&["memory=9g,cores=1,instances=1"]);
    assert!(code == 1 && got.starts_with("it never fits\n"), "{got}");
}
