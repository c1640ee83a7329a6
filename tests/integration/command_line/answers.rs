//! What commands print: tables for people, and JSON that the API's own schema parses.

use std::time::{Duration, Instant};

use prost_reflect::Kind;

use crate::{
    certificates::Folder,
    harness::*,
    identity::{token, tokens_command},
};

use super::{HOSTILE, World, parsed, schema, text, world};

/// How long sums, and what is told of tasks, may take to be known.
const LONG: Duration = Duration::from_secs(40);

const TABLES: &[(&[&str], &str)] = &[
    (
        &["ems"],
        "EM          STATE               FULL           MEMORY  CORES  INSTANCES  OTHER\n\
         host1:9102  unreported           55%  33.0 GB/60.0 GB   6/14       2/20  -\n\
         host2:9102  drained,unreported    0%       0 B/8.0 GB    0/4        0/4  -\n\
         host3:9102  unreported            0%                -      -          -  special.gpu=0/8\n",
    ),
    (&["ems", "--no-headers", "--limit", "1"], "host1:9102  unreported  55%  33.0 GB/60.0 GB  6/14  2/20  -\n"),
    (
        &["em", "host2:9102"],
        "EM          host2:9102\n\
         STATE       drained,unreported\n\
         FULL        0%\n\
         MEMORY      0 B/8.0 GB\n\
         CORES       0/4\n\
         INSTANCES   0/4\n\
         LEFT        memory=8.0 GB cores=4 instances=4\n\
         REGISTERED  TIME\n\
         DRAINED     TIME by anonymous: new disks\n",
    ),
    (
        &["scopes"],
        "SCOPE                         DIMENSION  FULL  USED  LOCKED  MAX  LIMIT\n\
         user=hadoop                   instances   50%     1       0    2  each user\n\
         user=mallory\\u{202e}\\u{200b}  instances   50%     0       1    2  each user\n",
    ),
    (
        &["tickets", "--user", "hadoop"],
        "TICKET                                USER    EM          STATE  MEMORY  CORES  INSTANCES  OTHER  CREATOR  ENGINE TYPE  SINCE\n\
         TICKET-1  hadoop  host1:9102  used   3.0 GB      2          1  -      IDE      spark-3.2.1  TIME\n",
    ),
    (
        &["limits", "list"],
        "LIMIT      MAX          MODE      STATE     UPDATED BY  UPDATED\n\
         each user  instances=2  enforced  in force  anonymous   TIME\n",
    ),
    (
        &["policies"],
        "KIND OF EM                   CHECKS               PLACEMENT  REQUIRED LABELS\n\
         linkis-cg-engineconnmanager  creator,user,labels  spread     -\n",
    ),
    (&["holds"], "WHAT  UNTIL  BY  REASON  SINCE\n"),
    (&["waiting", "--no-headers"], ""),
    (
        &["providers"],
        "NAME     TYPE  LABELS  UPDATED BY  UPDATED\n\
         default  Yarn  -       anonymous   TIME\n",
    ),
    (
        &["queues", "--limit", "2"],
        "QUEUE         STATE    FULL            MEMORY  CORES  MEMORY LEFT  CORES LEFT  RUNNING  PENDING\n\
         root          running   12%  12.0 GB/100.0 GB  3/100      88.0 GB          97        -        -\n\
         root.default  running    0%      0 B/100.0 GB  0/100      88.0 GB          97        0        0\n",
    ),
    (
        &["applications", "--limit", "1"],
        "APPLICATION         USER    QUEUE  STATE     MEMORY  CORES  STARTED  NAME\n\
         application_1_0000  hadoop  etl    ACCEPTED  1.0 GB      1  TIME     job 0\n",
    ),
    (&["audit"], "consistent: 3 EMs, 2 scopes, 2 tickets\n"),
    (&["repair", "--yes", "--reason", "r"], "nothing was repaired\n"),
    (
        &["overview"],
        "At          TIME\n\
         EMs         3: 2 unreported, 1 drained\n\
         Tickets     1 used, 1 locked, the first since TIME\n\
         Waiting     0\n\
         Grants/s    N.N\n\
         Refusals/s  N.N\n\
         Scopes      2, 0 over their limits\n\
         \n\
         DIMENSION    FULL    USED   LOCKED     LEFT  PROTECTED    TOTAL\n\
         cores         33%       2        4       12          2       20\n\
         instances      8%       1        1       22          0       24\n\
         memory        48%  3.0 GB  30.0 GB  35.0 GB     4.0 GB  72.0 GB\n\
         special.gpu    0%       0        0        8          0        8\n\
         \n\
         SCOPE                         DIMENSION  FULL  USED  LOCKED  MAX  LIMIT\n\
         user=hadoop                   instances   50%     1       0    2  each user\n\
         user=mallory\\u{202e}\\u{200b}  instances   50%     0       1    2  each user\n",
    ),
    (
        &["instances"],
        "INSTANCE    ADDRESS    VERSION  SINCE  GRANTS/S  REFUSALS/S\n\
         INSTANCE-1  ADDRESS-1  VERSION  TIME        N.N         N.N\n",
    ),
    (
        &["tasks"],
        "TASK             INSTANCE    LAST SUCCESS  LAG  STEPS  ERRORS\n\
         announcing       INSTANCE-1  TIME\n\
         audit            INSTANCE-1  TIME\n\
         cluster          INSTANCE-1  TIME\n\
         em_goes          INSTANCE-1  TIME\n\
         expiry           INSTANCE-1  TIME\n\
         fullest          INSTANCE-1  TIME\n\
         history_indexes  INSTANCE-1  TIME\n\
         holds            INSTANCE-1  TIME\n\
         label_sets       INSTANCE-1  TIME\n\
         lease            INSTANCE-1  TIME\n\
         pruning          INSTANCE-1  TIME\n\
         refusals         INSTANCE-1  TIME\n\
         retention        INSTANCE-1  TIME\n\
         silence          INSTANCE-1  TIME\n\
         tokens           INSTANCE-1  TIME\n\
         usage            INSTANCE-1  TIME\n",
    ),
    (
        &["ticket", "TICKET-1"],
        "TICKET       TICKET-1\n\
         USER         hadoop\n\
         EM           host1:9102\n\
         STATE        used\n\
         MEMORY       3.0 GB\n\
         CORES        2\n\
         INSTANCES    1\n\
         CREATOR      IDE\n\
         ENGINE TYPE  spark-3.2.1\n\
         SINCE        TIME\n\
         ENGINE       linkis-cg-engineconn/host1:34567\n\
         ASKED BY     anonymous\n",
    ),
    (
        &["history"],
        "TIME  ACTION           USER                     WHERE       RESOURCE                              ACTOR      REASON     TICKET\n\
         TIME  registered       -                        host1:9102  memory=64.0 GB cores=16 instances=20  anonymous  -          -\n\
         TIME  registered       -                        host2:9102  memory=8.0 GB cores=4 instances=4     anonymous  -          -\n\
         TIME  registered       -                        host3:9102  special.gpu=8                         anonymous  -          -\n\
         TIME  limit_set        -                        each user   instances=2                           anonymous  -          -\n\
         TIME  limits_in_force  -                        each user   -                                     linkis-rm  -          -\n\
         TIME  granted          hadoop                   host1:9102  memory=4.0 GB cores=2 instances=1     anonymous  -          TICKET-1\n\
         TIME  inited           hadoop                   host1:9102  memory=3.0 GB cores=2 instances=1     anonymous  -          TICKET-1\n\
         TIME  granted          mallory\\u{202e}\\u{200b}  host1:9102  memory=30.0 GB cores=4 instances=1    anonymous  -          TICKET-2\n\
         TIME  granted          hadoop                   host1:9102  memory=1.0 GB cores=1 instances=1     anonymous  -          TICKET-3\n\
         TIME  released         hadoop                   host1:9102  memory=1.0 GB cores=1 instances=1     anonymous  -          TICKET-3\n\
         TIME  drained          -                        host2:9102  memory=8.0 GB cores=4 instances=4     anonymous  new disks  -\n\
         TIME  provider_put     -                        -           -                                     anonymous  -          -\n",
    ),
    (
        &["refusals"],
        "PERIOD  USER    SCOPE                                      DIMENSION  REFUSALS    ASKED  AVAILABLE  LAST  LIMIT\n\
         TIME    hadoop  em=linkis-cg-engineconnmanager/host1:9102  memory            1  70.0 GB    27.0 GB  TIME  -\n",
    ),
    (
        &["usage"],
        "NAME    HOUR  TICKETS  CORE HOURS  GB HOURS  QUEUE CORE HOURS  QUEUE GB HOURS\n\
         hadoop  -           1         0.0       0.0               0.0             0.0\n",
    ),
];

const ANSWERS: &[(&[&str], &str, Option<&str>)] = &[
    (&["overview"], "UsageService/GetOverview", None),
    (&["instances"], "UsageService/ListInstances", Some("instances")),
    (&["tasks"], "UsageService/ListTasks", None),
    (&["ems"], "UsageService/ListEms", Some("ems")),
    (&["ems", "--drained", "true", "--label", "a=b"], "UsageService/ListEms", Some("ems")),
    (&["scopes", "--label", "user=hadoop"], "UsageService/ListScopes", Some("scopes")),
    (&["history", "--newest", "--since", "1h", "--action", "drained"], "UsageService/ListActions", Some("actions")),
    (&["em", "host1:9102"], "UsageService/GetEm", None),
    (&["scopes"], "UsageService/ListScopes", Some("scopes")),
    (&["tickets"], "UsageService/ListTickets", Some("tickets")),
    (&["tickets", "--user", "nobody"], "UsageService/ListTickets", Some("tickets")),
    (&["ticket", "TICKET-1"], "UsageService/GetTicket", None),
    (&["waiting"], "UsageService/ListWaiting", Some("waiting")),
    (&["history"], "UsageService/ListActions", Some("actions")),
    (&["history", "--ticket", "TICKET-1", "--limit", "1"], "UsageService/ListActions", Some("actions")),
    (&["refusals", "--since", "1d"], "UsageService/ListRefusals", Some("refusals")),
    (&["usage", "--by", "engine-type", "--hourly"], "UsageService/GetUsage", Some("sums")),
    (&["limits", "list"], "LimitService/ListLimits", Some("limits")),
    (&["policies"], "LimitService/ListPolicies", Some("policies")),
    (&["holds"], "AdminService/ListHolds", Some("holds")),
    (&["providers"], "ExternalResourceService/ListProviders", Some("providers")),
    (&["queues"], "ExternalResourceService/ListQueues", Some("queues")),
    (&["applications"], "ExternalResourceService/ListApplications", Some("applications")),
    (&["audit"], "AdminService/Audit", None),
    (&["repair", "--yes", "--reason", "r"], "AdminService/Repair", None),
    (&["drain", "host2:9102", "--reason", "new disks"], "AdminService/Drain", None),
];

/// What is done, once and again: each is answered with 0 if it was done, or 1 if there was nothing to do.
const ACTS: &[(&[&str], &str, [i32; 2])] = &[
    (&["resume", "host2:9102"], "AdminService/Resume", [0, 1]),
    (&["hold", "--user", "alice", "--for", "5m", "--reason", "a look"], "AdminService/Hold", [0, 0]),
    (&["unhold", "--user", "alice"], "AdminService/ReleaseHold", [0, 1]),
    (&["release", "TICKET-2", "--yes", "--reason", "stuck"], "AdminService/ForceRelease", [0, 0]),
    (&["limits", "diff", "FILE"], "LimitService/ReplaceLimits", [1, 1]),
    (&["limits", "apply", "FILE", "--yes", "--reason", "as agreed"], "LimitService/ReplaceLimits", [0, 0]),
    (&["limits", "delete", "--yes", "--reason", "too strict", "creator=IDE"], "LimitService/DeleteLimit", [0, 1]),
];

/// Scopes of the same fullness come in no order that means anything, and neither epochs nor rates are numbers to compare.
fn comparable(words: &[&str], told: &str) -> String {
    let mut lines: Vec<String> = told.lines().filter(|line| !line.starts_with("EPOCH")).map(str::to_owned).collect();
    let is_rate = |word: &str| word.contains('.') && word.parse::<f64>().is_ok();
    for line in &mut lines {
        let of_rates = line.starts_with("Grants/s") || line.starts_with("Refusals/s") || line.starts_with("INSTANCE-1");
        match words[0] {
            "overview" | "instances" if of_rates => {
                let word = |word| if is_rate(word) { "N.N" } else { word };
                *line = line.split(' ').map(word).collect::<Vec<_>>().join(" ");
            }
            // How often, and how far behind.
            "tasks" => *line = line.split_once("TIME").map_or(line.clone(), |(task, _)| format!("{task}TIME")),
            _ => {}
        }
    }
    let first = lines.iter().position(|line| line.starts_with("user=")).unwrap_or(lines.len());
    lines[first..].sort_unstable();
    // Of what is as long as its column, nothing is left to compare.
    let squeezed = lines.iter().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    if told.contains("TIME") || told.contains("TICKET-") {
        lines = squeezed.collect();
    }
    lines.join("\n")
}

impl World {
    /// The words of a command with what stands for ids in them.
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

    /// How a command ends, and what it prints.
    fn answer(&self, words: &[String], format: &str) -> (i32, String) {
        let words: Vec<&str> = words.iter().map(String::as_str).chain(["-o", format]).collect();
        let output = self.run(&words);
        assert!(output.status.code().is_some_and(|code| code < 2), "{words:?}: {}", text(&output.stderr));
        (output.status.code().unwrap(), text(&output.stdout))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_command_tells_people_what_the_service_knows() {
    let world = world().await;
    // It announces itself some moments after it serves.
    let announced = async || !text(&world.run(&["instances", "--no-headers"]).stdout).is_empty();
    eventually("it is announced", LONG, announced).await;
    let instances = text(&world.run(&["instances", "-o", "json"]).stdout);
    let instances = parsed(&schema("UsageService/ListInstances"), &instances);
    let instance =
        instances.get_field_by_name("instances").unwrap().as_list().unwrap()[0].as_message().unwrap().clone();
    let instance = instance.get_field_by_name("instance_id").unwrap().as_str().unwrap().to_owned();
    let address = world.rm.address.replace("http://", "");
    let shorts = [(&*instance, "INSTANCE-1"), (&*address, "ADDRESS-1"), (env!("CARGO_PKG_VERSION"), "VERSION")];
    let (begun, mut wrong) = (Instant::now(), String::new());
    for (words, expected) in TABLES {
        let expected = comparable(words, expected);
        let typed = world.words(words, "");
        let typed: Vec<&str> = typed.iter().map(String::as_str).collect();
        loop {
            let told = world.told(&typed, 0);
            let told = comparable(words, &shorts.iter().fold(told, |told, (long, short)| told.replace(long, short)));
            if told == expected {
                break;
            }
            // Sums, and what is told of tasks, are known after some seconds.
            if begun.elapsed() > LONG {
                wrong += &format!("{words:?}:\n{told}\n\ninstead of\n{expected}\n\n");
                break;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    let wide = world.told(&["tickets", "-o", "wide", "--user", HOSTILE], 0);
    assert!(wide.contains("ASKED BY") && wide.contains("mallory\\u{202e}\\u{200b}"), "{wide}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_print_json_of_the_schema() {
    let world = world().await;
    for sums in ["refusals", "usage"] {
        let known = || async { !text(&world.run(&[sums, "--no-headers"]).stdout).is_empty() };
        eventually(&format!("{sums} are known"), LONG, known).await;
    }
    for (words, call, field) in ANSWERS {
        let (words, schema) = (world.words(words, ""), schema(call));
        let run = |format: &str| {
            let (code, told) = world.answer(&words, format);
            assert_eq!(code, 0, "{words:?}: {told}");
            told
        };
        let (document, lines) = (parsed(&schema, &run("json")), run("jsonl"));
        let Some(field) = field else {
            // Audits are of different moments.
            let moves = ["AdminService/Audit", "UsageService/GetOverview", "UsageService/ListTasks"].contains(call);
            assert!(moves || document == parsed(&schema, &lines), "{words:?}");
            continue;
        };
        let Kind::Message(item) = schema.get_field_by_name(field).unwrap().kind() else { panic!("{field}") };
        let lines: Vec<_> = lines.lines().map(|line| parsed(&item, line)).collect();
        let listed = document.get_field_by_name(field).unwrap();
        let listed: Vec<_> = listed.as_list().unwrap().iter().map(|item| item.as_message().unwrap().clone()).collect();
        // Rates are of different moments, too.
        let is_same = if words[0] == "instances" { listed.len() == lines.len() } else { listed == lines };
        assert!(is_same, "{words:?}: {listed:?} {lines:?}");
        let is_nothing = |word: &String| ["nobody", "a=b", "waiting", "holds"].contains(&word.as_str());
        assert_eq!(listed.is_empty(), words.iter().any(is_nothing), "{words:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_act_tells_programs_what_the_schema_says() {
    let world = world().await;
    let folder = Folder::new("command-line-acts");
    folder.write("limits.toml", "[[limit]]\nlabels = { creator = \"IDE\" }\nmax = { instances = 7 }\n");
    let file = folder.0.join("limits.toml");
    for (words, call, codes) in ACTS {
        let (words, schema) = (world.words(words, file.to_str().unwrap()), schema(call));
        for (format, expected) in ["json", "jsonl"].into_iter().zip(codes) {
            let (code, told) = world.answer(&words, format);
            assert_eq!(code, *expected, "{words:?}: {told}");
            // What is not there has no answer but the error.
            let is_absent = code == 1 && call.ends_with("DeleteLimit");
            assert_eq!(told.is_empty(), is_absent, "{words:?}: {told}");
            if !is_absent {
                parsed(&schema, &told);
            }
        }
    }
    let reasons = world.told(&["history", "--no-headers", "--action", "limit_set", "--action", "limit_deleted"], 0);
    let reasons = ["as agreed", "too strict"].map(|reason| reasons.matches(reason).count());
    // The one that came, and the one that went for it; and then the one that came.
    assert_eq!(reasons, [2, 1]);
}

/// The disk on which it should stand is full: it is told which one lets in whoever finds it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn token_unwritten_is_named_for_revocation() {
    let database = Database::fresh().await;
    let words = ["create", "--name", "ada", "--owner", "the tests", "--role", "viewer"];
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let done = tokens_command(&database, &words).stdout(full).output().unwrap();
    let told = text(&done.stderr);
    assert_eq!(done.status.code(), Some(2), "{told}");
    let (_, id) = told.split_once("tokens revoke --id ").unwrap_or_else(|| panic!("{told}"));
    let id = id.get(..36).unwrap_or_else(|| panic!("{told}"));
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
    let told = |name: &str| lines.iter().find(|token| token["name"] == name).unwrap();
    assert_eq!(told("bob")["users"], serde_json::json!(["bob"]));
    assert_eq!((&told("ada")["state"], &told("ada")["revoke_time"]), (&"good".into(), &serde_json::Value::Null));
    assert!(list("wide").starts_with("ID  ") && list("table").contains("  good  "));
    assert!(secrets.iter().all(|secret| !list("json").contains(&secret[4..40])));
}
