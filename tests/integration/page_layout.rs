//! Layout of the page: both colour schemes are readable, and narrow windows need no horizontal scrolling.

use rm_client::ResourceRequest;

use crate::{
    browser::{Browser, SHOWN_WITHIN},
    harness::*,
    identity::token,
    page::{furnish, get, start_page},
};

/// Returns the colour of the first EM on the map.
async fn first_host(browser: &Browser) -> String {
    let pixel = "return [...document.getElementById('map').getContext('2d').getImageData(2, 2, 1, 1).data].join()";
    browser.run(pixel).await.as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_layout_fits_colour_schemes_and_narrow_windows() {
    let Some(browser) = Browser::start().await else { return };
    let (database, rm) = start_page().await;
    let url = format!("http://{}/", rm.http);
    browser.go(&url).await;
    browser.shows("#empty-command", "Register").await;
    browser.looks_well("empty").await;

    let waiting = furnish(&rm).await;
    browser.go(&url).await;
    for (place, shown) in [
        ("#refused", "bob"),
        ("#fullest", "user=bob"),
        ("#waiting", "host1"),
        ("#locked", "bob"),
        ("#actions", "drained"),
    ] {
        browser.shows(place, shown).await;
    }
    browser.run("document.getElementById('em-list').open = true").await;
    browser.looks_well("full").await;
    // The map is drawn anew some time after the scheme changes.
    let dark = first_host(&browser).await;
    browser.prefer("light").await;
    eventually("EMs have light colours", SHOWN_WITHIN, || async { first_host(&browser).await != dark }).await;
    browser.prefer("dark").await;
    eventually("EMs have dark colours", SHOWN_WITHIN, || async { first_host(&browser).await == dark }).await;
    browser.run("document.querySelector('#em-rows .link').click()").await;
    browser.shows("#panel", "Last actions").await;
    browser.looks_well("panel").await;
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
    browser.run("document.getElementById('em-list').open = true").await;
    browser.shows("#em-rows", em1.instance.as_str()).await;
    browser.looks_well("unbroken").await;
    // The tooltip of a cell, and the details of an EM and a user.
    let point = "const map = document.getElementById('map'), { x, y } = map.getBoundingClientRect();
        map.dispatchEvent(new PointerEvent('pointermove', { clientX: x + 2, clientY: y + 2 }))";
    browser.run(point).await;
    browser.shows("#map-tip", em1.instance.as_str()).await;
    for (place, title) in [("#em-rows .link", em1.instance.as_str()), ("#locked td:nth-child(2) .link", user.as_str())]
    {
        browser.run(&format!("document.querySelector('{place}').click()")).await;
        browser.shows("#panel h2", title).await;
        browser.shows("#panel", "Tickets").await;
        browser.looks_well("unbroken-panel").await;
    }
    waiting.abort();
    rm.stop().await;
}
