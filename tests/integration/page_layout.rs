//! Layout of the page: both colour schemes are readable, and narrow windows need no horizontal scrolling.

use rm_client::ResourceRequest;

use crate::{
    browser::{Browser, axe},
    external::{FAIR, Yarn, client_of, config, provider, put},
    harness::*,
    identity::token,
    page::{furnish, get, start_page},
};

/// Returns the colour of the first tile of an EM.
async fn first_tile(browser: &Browser) -> String {
    let colour = "return getComputedStyle(document.querySelector('.tile')).color";
    browser.run(colour).await.as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_layout_fits_colour_schemes_and_narrow_windows() {
    let Some(browser) = Browser::start().await else { return };
    if axe().is_none() {
        skip_without("axe-core", "npm has it");
    }
    let (database, rm) = start_page().await;
    let url = format!("http://{}/", rm.http);
    browser.go(&url).await;
    browser.shows("#empty", "em register").await;
    browser.looks_well("empty").await;

    let waiting = furnish(&rm).await;
    let yarn = Yarn::start(FAIR).await;
    put(&client_of(&rm).await, provider("bdp", &config(&yarn.address))).await.unwrap();
    browser.go(&url).await;
    for (place, shown) in [
        ("#refused", "bob"),
        ("#fullest", "user=bob"),
        ("#waiting", "host1"),
        ("#locked", "bob"),
        ("#actions", "drained"),
        ("#users", "bob"),
    ] {
        browser.shows(place, shown).await;
    }
    browser.looks_well("full").await;
    let dark = first_tile(&browser).await;
    browser.prefer("light").await;
    assert_ne!(first_tile(&browser).await, dark);
    for list in ["ems", "users", "limits", "waiting", "queues", "tickets", "refusals", "history", "limits?show=set"] {
        browser.go(&format!("{url}#/{list}")).await;
        let name = list.split('?').next().unwrap();
        browser.shows(&format!("#list-{name} .foot"), "1–").await;
        browser.looks_well(&list.replace('?', "-")).await;
    }
    let ticket = rm.client.tickets(None).await.unwrap()[0].id;
    for (panel, shown) in [
        ("em/host1:9102", "History"),
        ("user/bob", "History"),
        ("scope/user=bob", "Set by"),
        ("em/none", "not registered"),
        (&format!("ticket/{ticket}"), "History"),
        ("queue/bdp/root.eng.etl", "Applications"),
    ] {
        browser.go(&format!("{url}#/{panel}")).await;
        browser.shows("#panel", shown).await;
        browser.looks_well(&format!("panel-{}", panel.replace('/', "-"))).await;
    }
    waiting.abort();

    token(&database, "olga", &["--role", "viewer"]);
    let asked_for = || async { get(rm.http, "/api/v1/GetOverview", "").await.status == 401 };
    eventually("tokens are asked for", LONG, asked_for).await;
    browser.go(&url).await;
    browser.shows("#login", "Sign in").await;
    browser.run("document.getElementById('token').value = 'lrm_nothing'; document.getElementById('login-form').requestSubmit()").await;
    browser.shows("#login-error", "is unknown").await;
    browser.looks_well("login").await;
    rm.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_layout_with_unbroken_names_keeps_width() {
    let Some(browser) = Browser::start().await else { return };
    let (_database, rm) = start_page().await;
    let (em1, user) = (em(&"h".repeat(200)), "u".repeat(200));
    rm.client.register(registration(em1.clone(), load(10, 10, 10))).await.unwrap();
    rm.client.set_limit(&each_user(5)).await.unwrap();
    rm.client.request_resource(&request(&em1, &user, load(1, 6, 1))).await.granted();
    rm.client.request_resource(&request(&em1, &user, load(1, 100, 1))).await.refused();
    let patient = ResourceRequest { wait_timeout: 10 * LONG, ..request(&em1, &user, load(1, 9, 1)) };
    let client = rm.client.clone();
    let waiting = tokio::spawn(async move { drop(client.request_resource(&patient).await) });
    let got =
        || async { !get(rm.http, "/api/v1/ListRefusals", "").await.json()["refusals"].as_array().unwrap().is_empty() };
    eventually("the refusal is shown", LONG, got).await;
    browser.go(&format!("http://{}/", rm.http)).await;
    for place in ["#waiting", "#locked", "#fullest", "#refused", "#actions"] {
        browser.shows(place, &user).await;
    }
    browser.looks_well("unbroken").await;
    browser.resize(1400, 900).await;
    let point = "document.querySelector('.tile').dispatchEvent(new PointerEvent('pointermove', { bubbles: true }))";
    browser.run(point).await;
    browser.shows("#map-tip", em1.instance.as_str()).await;
    for (panel, title) in [("em", em1.instance.as_str()), ("user", user.as_str()), ("scope", user.as_str())] {
        let name = if panel == "scope" { format!("user={title}") } else { title.to_owned() };
        browser.go(&format!("http://{}/#/{panel}/{name}", rm.http)).await;
        browser.shows("#panel h1", title).await;
        browser.shows("#panel", "linkis-rm").await;
        browser.looks_well("unbroken-panel").await;
    }
    waiting.abort();
    rm.stop().await;
}
