//! JSON that commands print, parsed by the schema of the API; and the commands about tokens.

use prost_reflect::Kind;

use crate::{
    certificates::Folder,
    harness::*,
    identity::{token, tokens_command},
};

use super::{World, parsed, schema, text, world};

const ANSWERS: &[(&[&str], &str, Option<&str>)] = &[
    (&["overview"], "UsageService/GetOverview", None),
    (&["instance", "list"], "UsageService/ListInstances", Some("instances")),
    (&["tasks"], "UsageService/ListTasks", None),
    (&["em", "list"], "UsageService/ListEms", Some("ems")),
    (&["em", "list", "--drained", "true", "--label", "a=b"], "UsageService/ListEms", Some("ems")),
    (&["scope", "list", "--label", "user=hadoop"], "UsageService/ListScopes", Some("scopes")),
    (&["history", "--newest", "--since", "1h", "--action", "drained"], "UsageService/ListActions", Some("actions")),
    (&["em", "get", "host1:9102"], "UsageService/GetEm", None),
    (&["scope", "list"], "UsageService/ListScopes", Some("scopes")),
    (&["ticket", "list"], "UsageService/ListTickets", Some("tickets")),
    (&["ticket", "list", "--user", "nobody"], "UsageService/ListTickets", Some("tickets")),
    (&["ticket", "get", "TICKET-1"], "UsageService/GetTicket", None),
    (&["waiting"], "UsageService/ListWaiting", Some("waiting")),
    (&["history"], "UsageService/ListActions", Some("actions")),
    (&["history", "--ticket", "TICKET-1", "--limit", "1"], "UsageService/ListActions", Some("actions")),
    (&["refusals", "--since", "1d"], "UsageService/ListRefusals", Some("refusals")),
    (&["usage", "--by", "engine-type", "--hourly"], "UsageService/GetUsage", Some("sums")),
    (&["limit", "list"], "LimitService/ListLimits", Some("limits")),
    (&["policy", "list"], "LimitService/ListPolicies", Some("policies")),
    (&["order", "get"], "LimitService/GetOrder", None),
    (&["priority", "list"], "LimitService/ListPriorities", Some("priorities")),
    (&["reclaim", "policy", "list"], "LimitService/ListReclaimPolicies", Some("policies")),
    (&["hold", "list"], "AdminService/ListHolds", Some("holds")),
    (&["provider", "list"], "ExternalResourceService/ListProviders", Some("providers")),
    (&["queue", "list"], "ExternalResourceService/ListQueues", Some("queues")),
    (&["application", "list"], "ExternalResourceService/ListApplications", Some("applications")),
    (&["em", "list", "--sort", "state"], "UsageService/ListEms", Some("ems")),
    (&["user", "list", "--sort", "memory"], "UsageService/ListUsers", Some("users")),
    (&["provider", "check", "default"], "ExternalResourceService/CheckProvider", None),
    (&["scope", "get", "user=hadoop"], "UsageService/GetScope", None),
    (&["queue", "get", "root.eng.etl"], "ExternalResourceService/GetQueue", None),
    (&["audit"], "AdminService/Audit", None),
    (&["repair", "--yes", "--reason", "r"], "AdminService/Repair", None),
    (&["em", "drain", "host2:9102", "--reason", "new disks"], "AdminService/Drain", None),
];

const REQUEST: &str = "ResourceManagerService/RequestResource";

const ADOPT: &[&str] = &[
    "ticket",
    "adopt",
    "5d1b8e2c-6f0a-4f59-9a55-2f9b1c4f7a09",
    "--em",
    "host1",
    "--engine",
    "host1:34567",
    "--user",
    "bob",
    "--creator",
    "IDE",
    "--used",
    "memory=1g,cores=1,instances=1",
];

/// Commands that change something, run twice: exit code 0 if they changed it, 1 if there was nothing to change.
const ACTS: &[(&[&str], &str, [i32; 2])] = &[
    (&["em", "resume", "host2:9102"], "AdminService/Resume", [0, 1]),
    (&["hold", "add", "--user", "alice", "--for", "5m", "--reason", "a look"], "AdminService/Hold", [0, 0]),
    (&["hold", "release", "--user", "alice"], "AdminService/ReleaseHold", [0, 1]),
    (&["ticket", "release", "TICKET-2", "--yes", "--reason", "stuck"], "AdminService/ForceRelease", [0, 0]),
    (&["limit", "diff", "FILE"], "LimitService/ReplaceLimits", [1, 1]),
    (&["limit", "apply", "FILE", "--yes", "--reason", "as agreed"], "LimitService/ReplaceLimits", [0, 0]),
    (&["limit", "delete", "--yes", "--reason", "too strict", "creator=IDE"], "LimitService/DeleteLimit", [0, 1]),
    (&["limit", "set", "creator=X", "--max", "instances=3", "--yes"], "LimitService/SetLimit", [0, 0]),
    (&["order", "set", "--fair-by", "user,creator", "--yes", "--reason", "as agreed"], "LimitService/SetOrder", [0, 0]),
    (
        &["priority", "set", "creator=IDE", "--max", "60", "--yes", "--reason", "as agreed"],
        "LimitService/SetPriority",
        [0, 0],
    ),
    (&["priority", "delete", "creator=IDE", "--yes", "--reason", "no longer"], "LimitService/DeletePriority", [0, 1]),
    (
        &["reclaim", "policy", "set", "creator=IDE", "--mode", "observe", "--yes", "--reason", "as agreed"],
        "LimitService/SetReclaimPolicy",
        [0, 0],
    ),
    (
        &["reclaim", "policy", "delete", "creator=IDE", "--yes", "--reason", "no longer"],
        "LimitService/DeleteReclaimPolicy",
        [0, 1],
    ),
    (&["policy", "set", "other", "--checks", "labels", "--yes"], "LimitService/SetPolicy", [0, 0]),
    (&["request", "memory=1g,cores=1", "--user", "bob", "--creator", "IDE", "--dry-run"], REQUEST, [0, 0]),
    (&["request", "memory=9t,cores=1", "--user", "bob", "--creator", "IDE"], REQUEST, [1, 1]),
    (&["em", "register", "host9:9102", "--total", "memory=1g,cores=1"], "ResourceManagerService/Register", [0, 0]),
    (&["em", "unregister", "host9:9102", "--yes"], "ResourceManagerService/Unregister", [0, 1]),
    (ADOPT, "AdminService/AdoptTicket", [0, 0]),
    (&["provider", "delete", "default", "--yes"], "ExternalResourceService/DeleteProvider", [0, 1]),
];

impl World {
    /// Returns the arguments of a command, with ids and the file instead of their short forms.
    fn words(&self, words: &[&str], file: &str) -> Vec<String> {
        let ids = self.grants.each_ref().map(|grant| grant.ticket_id.to_string());
        let word = |word: &&str| match *word {
            "TICKET-1" => ids[0].clone(),
            "TICKET-2" => ids[1].clone(),
            "FILE" => file.to_owned(),
            word => word.to_owned(),
        };
        words.iter().map(word).collect()
    }

    /// The exit code and the output of a command.
    fn answer(&self, words: &[String], format: &str) -> (i32, String) {
        let words: Vec<&str> = words.iter().map(String::as_str).chain(["-o", format]).collect();
        let output = self.run(&words);
        assert!(output.status.code().is_some_and(|code| code < 2), "{words:?}: {}", text(&output.stderr));
        (output.status.code().unwrap(), text(&output.stdout))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_print_json_of_the_schema() {
    let world = world().await;
    for sums in [&["refusals", "--no-headers"][..], &["usage", "--no-headers"], &["user", "list", "--no-headers"]] {
        let known = || async { !text(&world.run(sums).stdout).is_empty() };
        eventually(&format!("{sums:?} are known"), LONG, known).await;
    }
    for (words, call, field) in ANSWERS {
        let (words, schema) = (world.words(words, ""), schema(call));
        let run = |format: &str| {
            let (code, got) = world.answer(&words, format);
            assert_eq!(code, 0, "{words:?}: {got}");
            got
        };
        let (document, lines) = (parsed(&schema, &run("json")), run("jsonl"));
        let Some(field) = field else {
            // These replies differ from moment to moment.
            let moves = ["Audit", "GetOverview", "ListTasks", "GetQueue", "CheckProvider"]
                .iter()
                .any(|moving| call.ends_with(moving));
            assert!(moves || document == parsed(&schema, &lines), "{words:?}");
            continue;
        };
        let Kind::Message(item) = schema.get_field_by_name(field).unwrap().kind() else { panic!("{field}") };
        let lines: Vec<_> = lines.lines().map(|line| parsed(&item, line)).collect();
        let listed = document.get_field_by_name(field).unwrap();
        let listed: Vec<_> = listed.as_list().unwrap().iter().map(|item| item.as_message().unwrap().clone()).collect();
        // Rates also differ from moment to moment.
        let is_same = if words[0] == "instance" { listed.len() == lines.len() } else { listed == lines };
        assert!(is_same, "{words:?}: {listed:?} {lines:?}");
        let is_nothing =
            |word: &String| ["nobody", "a=b", "waiting", "hold", "priority", "reclaim"].contains(&word.as_str());
        assert_eq!(listed.is_empty(), words.iter().any(is_nothing), "{words:?}");
    }

    let folder = Folder::new("command-line-acts");
    folder.write("limits.toml", "[[limit]]\nlabels = { creator = \"IDE\" }\nmax = { instances = 7 }\n");
    let file = folder.0.join("limits.toml");
    for (words, call, codes) in ACTS {
        let (words, schema) = (world.words(words, file.to_str().unwrap()), schema(call));
        for (format, expected) in ["json", "jsonl"].into_iter().zip(codes) {
            let (code, printed) = world.answer(&words, format);
            assert_eq!(code, *expected, "{words:?}: {printed}");
            // A failed deletion prints only the error.
            let is_absent = code == 1
                && ["DeleteLimit", "DeletePriority", "DeleteReclaimPolicy", "Unregister", "DeleteProvider"]
                    .iter()
                    .any(|end| call.ends_with(end));
            assert_eq!(printed.is_empty(), is_absent, "{words:?}: {printed}");
            if !is_absent {
                parsed(&schema, &printed);
            }
        }
    }
    let reasons = world.output(&["history", "--no-headers", "--action", "limit_set", "--action", "limit_deleted"], 0);
    let reasons = ["as agreed", "too strict"].map(|reason| reasons.matches(reason).count());
    // The replacement sets one limit and deletes another; then the new one is deleted.
    assert_eq!(reasons, [2, 1]);
}

/// A token that cannot be written, because the disk is full, is named by its id, so that it can be revoked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn token_unwritten_is_named_for_revocation() {
    let database = Database::fresh().await;
    let words = ["create", "--name", "ada", "--owner", "the tests", "--role", "viewer"];
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let done = tokens_command(&database, &words).stdout(full).output().unwrap();
    let got = text(&done.stderr);
    assert_eq!(done.status.code(), Some(2), "{got}");
    let (_, id) = got.split_once("token revoke --id ").unwrap_or_else(|| panic!("{got}"));
    let id = id.get(..36).unwrap_or_else(|| panic!("{got}"));
    let revoke = ["revoke", "--id", id, "--yes", "--reason", "nobody has it"];
    let done = tokens_command(&database, &revoke).output().unwrap();
    assert_eq!(text(&done.stdout), format!("revoked {id}\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_list_prints_no_secret() {
    let database = Database::fresh().await;
    let secrets = ["ada", "bob"].map(|name| token(&database, name, &["--role", "viewer", "--user", name]));
    let list = |format: &str| {
        let done = tokens_command(&database, &["list", "-o", format]).output().unwrap();
        assert!(done.status.success(), "{}", text(&done.stderr));
        text(&done.stdout)
    };
    let document: serde_json::Value = serde_json::from_str(&list("json")).unwrap();
    let lines: Vec<serde_json::Value> = list("jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(document["tokens"].as_array().unwrap(), &lines);
    let got = |name: &str| lines.iter().find(|token| token["name"] == name).unwrap();
    assert_eq!(got("bob")["users"], serde_json::json!(["bob"]));
    assert_eq!((&got("ada")["state"], &got("ada")["revoke_time"]), (&"good".into(), &serde_json::Value::Null));
    assert!(list("wide").starts_with("ID  ") && list("table").contains("  good  "));
    assert!(secrets.iter().all(|secret| !list("json").contains(&secret[4..40])));
}
