//! The page in a browser: it shows the state of the service soon, and nothing to a viewer without a token.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::{
    browser::{Browser, SHOWN_WITHIN, within},
    harness::*,
    identity::{token, tokens},
    page::{HOSTILE, furnish, get, start_page},
};

/// Maximum times until a page shows a grant, and until a page with a revoked token shows nothing.
const GRANT_WITHIN: Duration = Duration::from_secs(3);
const LOGIN_WITHIN: Duration = Duration::from_secs(5);

/// Cell of the locked cores in the capacity table.
const LOCKED_CORES: &str = "#capacity tbody tr:nth-child(2) td:nth-child(5)";

async fn overview(rm: &Instance) -> Value {
    get(rm.http, "/api/v1/GetOverview", "").await.json()["overview"].take()
}

/// Text of the row of a dimension in the capacity table, by an overview.
fn capacity(overview: &Value, dimension: &str) -> String {
    let sum = |field: &str, is_counted: &dyn Fn(&str) -> bool| -> i64 {
        let groups = overview["ems"].as_array().unwrap().iter();
        let counted = groups.filter(|group| is_counted(group["state"].as_str().unwrap()));
        counted.map(|group| group["dimensions"][dimension][field].as_str().unwrap().parse::<i64>().unwrap()).sum()
    };
    let all = |field: &str| sum(field, &|_| true);
    // The remaining amount on selectable EMs is free.
    let is_chosen = |state: &str| ["EM_STATE_HEALTHY", "EM_STATE_UNREPORTED", "EM_STATE_WARN"].contains(&state);
    let (free, out) = (sum("left", &is_chosen), sum("left", &|state| !is_chosen(state)));
    let (used, locked, kept, total) = (all("used"), all("locked"), all("protected_amount"), all("total"));
    let shown = |amount: i64| match dimension {
        "memory" if amount < 1024 => format!("{amount} B"),
        "memory" => format!("{:.1} GB", amount as f64 / GB as f64).replace(".0 ", " "),
        _ => amount.to_string(),
    };
    let amounts = [used, locked, out, kept, free, total].map(shown).join("|");
    format!("{dimension}|{}%||{amounts}|", (used + locked) * 100 / (total - kept))
}

/// Visible texts of the cells of the rows in a part of the page.
async fn rows(browser: &Browser, place: &str) -> Vec<String> {
    let script = format!(
        "return [...document.querySelectorAll('{place} tbody tr')].map((row) => [...row.cells].map((cell) => cell.innerText).join('|'))"
    );
    serde_json::from_value(browser.run(&script).await).unwrap()
}

/// A rate as the page writes it: with a digit behind the point, unless that is nought.
fn rate(of: &Value) -> String {
    let text = format!("{:.1}", of.as_f64().unwrap_or_default());
    text.strip_suffix(".0").unwrap_or(&text).to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_content_equals_service_state() {
    let Some(browser) = Browser::start().await else { return };
    let (database, rm) = start_page().await;
    let waiting = furnish(&rm).await;
    browser.go(&format!("http://{}/", rm.http)).await;
    browser.shows("#live", "live").await;

    let got = overview(&rm).await;
    let expected = ["memory", "cores", "instances"].map(|dimension| capacity(&got, dimension));
    eventually("the capacity is that of the overview", SHOWN_WITHIN, || async {
        rows(&browser, "#capacity").await == expected
    })
    .await;
    assert_eq!(expected[1], "cores|37%||5|10|20|4|5|44|");
    for (place, shown) in [
        ("#strip", "1 EM unhealthy: host2"),
        ("#ems .note", "1 draining"),
        ("#locked .note", "2 locked, 1 in use"),
        ("#waiting .note", "1, longest"),
        ("#waiting", HOSTILE),
        ("#waiting", "host1"),
        ("#waiting", "has its turn"),
        ("#locked", HOSTILE),
        ("#actions", "drained"),
        ("#fullest", "user=bob"),
        ("#who", "no sign-in: everybody may do everything"),
    ] {
        browser.shows(place, shown).await;
    }
    assert_eq!(browser.text("#empty").await, "(unseen)");
    // The locked ticket counts.
    assert_eq!(rows(&browser, "#fullest").await, ["user=bob||100%|1|1|instances"]);
    browser.resize(400, 900).await;
    assert!(rows(&browser, "#fullest").await[0].starts_with("user=bob\n1 of 1 instances|"), "in narrow windows");
    browser.resize(1400, 900).await;
    for refused in ["carol", "host1", "cores", "bob", "user=bob", "instances"] {
        browser.shows("#refused", refused).await;
    }
    let rates = || async {
        rm.client.request_resource(&request(&em("host1"), "carol", load(1, 100, 1))).await.refused();
        let got = overview(&rm).await["throughput"].take();
        let refusals = rate(&got["refusals_per_second"]);
        refusals != "0"
            && browser.text("#actions .note").await == format!("granted {}/s ", rate(&got["grants_per_second"]))
            && browser.text("#refused .note").await == format!("now {refusals}/s ")
    };
    eventually("its rates are those of the overview", SHOWN_WITHIN, rates).await;

    // A grant is seen soon.
    let mut before = None;
    within("a grant is seen", GRANT_WITHIN, async || {
        if let Some(grant) = before.take() {
            rm.client.resource_released(&release(&grant, "carol")).await.unwrap();
            browser.shows(LOCKED_CORES, "10").await;
        }
        let granted = Instant::now();
        before = Some(rm.client.request_resource(&request(&em(HOSTILE), "carol", load(1, 1, 1))).await.granted());
        browser.shows(LOCKED_CORES, "11").await;
        browser.shows("#locked", "carol").await;
        granted.elapsed()
    })
    .await;

    // Details of an EM, found by its name; and a user whose name would be markup.
    browser.run("document.getElementById('search').focus()").await;
    browser.press("onerror\u{e007}").await;
    browser.shows("#panel h1", &format!("{HOSTILE}:9102")).await;
    browser.shows("#panel", "bob").await;
    let cores = "cores|100%||0|10|1|0|11|";
    eventually("the EM has its amounts", SHOWN_WITHIN, || async {
        rows(&browser, "#panel").await.iter().any(|row| row == cores.trim_end_matches('|'))
    })
    .await;
    for action in ["granted", "registered"] {
        browser.shows("#panel section:nth-of-type(3)", action).await;
    }
    for (width, name) in [(400, "panel-narrow"), (1400, "panel-wide")] {
        browser.resize(width, 900).await;
        browser.picture(name).await;
        assert_eq!(browser.overflow().await, 0, "{width} pixels");
    }
    browser.back().await;
    browser.shows("#locked", HOSTILE).await;
    browser.follow("#locked", HOSTILE).await;
    browser.shows("#panel h1", &format!("User {HOSTILE}")).await;
    browser.shows("#panel", "9 GB, 9 cores, 9 instances").await;
    assert_eq!(browser.run("return document.querySelectorAll('img').length").await, 0);
    browser.go(&format!("http://{}/#/em/host2:9102", rm.http)).await;
    browser.shows("#panel", "unhealthy").await;
    browser.shows("#panel", "load 42.5% of all cores, 6 GB of 8 GB memory").await;
    browser.follow("#panel", "close").await;
    assert_eq!(browser.complaints().await, [""; 0]);

    // The instance stops and starts again.
    let (http, place) = (rm.http, rm.address.replace("http://", ""));
    waiting.abort();
    rm.stop().await;
    browser.shows("#live", "no connection").await;
    let rm = Instance::start_by(settings().with("--database-url", database.url()), &place, &http.to_string()).await;
    browser.shows("#live", "live").await;
    browser.shows("#rows", "host1:9102").await;

    // Amounts of idle engines are a column, if there are some.
    browser.go(&format!("http://{}/#/", rm.http)).await;
    browser.shows(LOCKED_CORES, "11").await;
    database.execute("UPDATE linkis_user_resource_meta_data SET idle_since = now() WHERE used_time IS NOT NULL").await;
    browser.shows("#capacity", "of these idle").await;
    browser.shows(LOCKED_CORES, "5").await;
    rm.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_without_ems_shows_commands_that_work() {
    let Some(browser) = Browser::start().await else { return };
    let (_database, rm) = start_page().await;
    browser.go(&format!("http://{}/", rm.http)).await;
    browser.shows("#empty", "Three commands").await;
    assert_eq!(browser.text("#ems").await, "(unseen)");
    let commands =
        browser.run("return [...document.querySelectorAll('#empty .command code')].map((code) => code.textContent)");
    let commands: Vec<String> = serde_json::from_value(commands.await).unwrap();
    let succeeds = |command: &str| {
        let words = command.strip_prefix("linkis-rm ").unwrap().split(' ');
        std::process::Command::new(*PROGRAM).args(words).output().unwrap().status.success()
    };
    assert!(succeeds(&commands[0]) && succeeds(&format!("{} --yes", commands[1])), "{commands:?}");
    assert_eq!([0; 3].map(|_| succeeds(&commands[2])), [true, true, false], "{commands:?}");
    browser.shows("#ems .note", "1 unreported").await;
    assert_eq!(browser.text("#empty").await, "(unseen)");
    assert_eq!(browser.complaints().await, [""; 0]);
    rm.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_without_token_shows_only_login() {
    let Some(browser) = Browser::start().await else { return };
    let (database, rm) = start_page().await;
    furnish(&rm).await.abort();
    let mut viewer = token(&database, "olga", &["--role", "viewer"]);
    let known = || async { get(rm.http, "/api/v1/GetOverview", "").await.status == 401 };
    eventually("tokens are asked for", LONG, known).await;
    browser.go(&format!("http://{}/", rm.http)).await;
    browser.shows("#login", "Sign in").await;
    assert_eq!(browser.text("#page").await, "(unseen)");
    let fill = |token: &str| {
        let fill = "document.getElementById('token').value";
        format!("{fill} = '{token}'; document.getElementById('login-form').requestSubmit()")
    };
    assert_eq!(browser.complaints().await, [""; 0]);
    browser.run(&fill("lrm_nothing")).await;
    browser.shows("#login-error", "is unknown").await;
    within("the login is back", LOGIN_WITHIN, async || {
        browser.run(&fill(&viewer)).await;
        browser.shows("#who", "olga (viewer)").await;
        browser.shows("#ems .note", "2 unreported").await;
        assert_eq!(browser.run("return document.cookie").await, "", "no script reads the token");
        browser.complaints().await;
        tokens(&database, &["revoke", "--name", "olga"]);
        let revoked = browser.shows("#login-error", "revoked").await;
        viewer = token(&database, "olga", &["--role", "viewer"]);
        revoked
    })
    .await;
    assert_eq!(browser.text("#page").await, "(unseen)");
    let left = browser
        .run("return document.getElementById('view').textContent + document.getElementById('panel-body').textContent")
        .await;
    assert_eq!(left, "", "nothing of what was shown is left");
    let others: Vec<String> = browser.complaints().await.into_iter().filter(|line| !line.contains("401")).collect();
    assert_eq!(others, [""; 0], "complaints about open list calls only");
    rm.stop().await;
}
