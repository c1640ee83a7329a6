//! Every filter, chip, sort and letter of the page once, in a browser.

use crate::{
    browser::{Browser, SHOWN_WITHIN},
    external::{FAIR, Yarn, client_of, config, provider, put},
    harness::*,
    page::{HOSTILE, furnish, start_page},
    page_lists::{address_is, column, column_is, filter},
};

/// Filters: list, field, value, and the texts of the first column that names a user, EM, limit or external queue.
const FILTERS: &[(&str, &str, &str, &[&str])] = &[
    ("ems", "part", "OST2", &["host2:9102"]),
    ("ems", "label", "rack=r1", &[]),
    ("users", "part", "bo", &["bob"]),
    ("limits", "label", "user=bob", &["user=bob"]),
    ("limits", "label", "user=zoe", &[]),
    ("waiting", "user", "bob", &[]),
    ("waiting", "em", "host2:9102", &[]),
    ("waiting", "label", "user=bob", &[]),
    ("queues", "part", "ETL", &["root.eng.etl"]),
    ("tickets", "user", "bob", &["bob IDE"]),
    ("tickets", "em", "host3:9102", &[]),
    ("tickets", "engine", "none", &[]),
    ("tickets", "label", "tenant=retail", &[]),
    ("tickets", "age", "600", &[]),
    ("refusals", "user", "carol", &["carol"]),
    ("refusals", "scope", "user=bob", &["bob"]),
    ("refusals", "dimension", "cores", &["carol"]),
    ("history", "user", "bob", &["granted"]),
    ("history", "em", "host2:9102", &["registered"]),
    ("history", "actor", "zoe", &[]),
];

/// Chips: list, text, address, and a text of the list then.
const CHIPS: &[(&str, &str, &str, &str)] = &[
    ("ems", "unhealthy 1", "#/ems?state=unhealthy", "host2"),
    ("users", "cores", "#/users?sort=-cores", "cores ↓"),
    ("users", "memory", "#/users?sort=-memory", "memory ↓"),
    ("users", "queue cores", "#/users?sort=-queue_cores", "No user holds any of it."),
    ("limits", "exceeded", "#/limits?show=exceeded", "No limit applies to a live ticket."),
    ("limits", "as set", "#/limits?show=set", "enforced"),
    ("queues", "bdp", "#/queues?provider=Yarn%2Fbdp", "root.eng.etl"),
    ("tickets", "locked", "#/tickets?state=locked", "bob"),
    ("tickets", "used", "#/tickets?state=used", HOSTILE),
    ("refusals", "last day", "#/refusals?since=day", "carol"),
    ("refusals", "all", "#/refusals?since=all", "carol"),
    ("history", "EMs", "#/history?show=EMs", "drained"),
    ("history", "limits", "#/history?show=limits", "limit set"),
    ("history", "repairs", "#/history?show=repairs", "Nothing has happened."),
    ("history", "ends", "#/history?show=ends", "Nothing has happened."),
    ("history", "newest first", "#/history?order=oldest", "registered"),
];

/// Sorts of EMs: the text of the header, then the address and the first EM.
const SORTS: &[(&str, &str, &str)] = &[
    ("EM", "#/ems?sort=-name", "host3:9102"),
    ("EM ↓", "#/ems?sort=name", "<img"),
    ("full", "#/ems?sort=-full", "<img"),
    ("full ↓", "#/ems?sort=full", "host"),
    ("state", "#/ems?sort=state", "host2:9102"),
];

const LETTERS: &[(&str, &str)] = &[
    ("ge", "#/ems"),
    ("gu", "#/users"),
    ("gl", "#/limits"),
    ("gw", "#/waiting"),
    ("gq", "#/queues"),
    ("gt", "#/tickets"),
    ("gr", "#/refusals"),
    ("gh", "#/history"),
    ("go", "#/"),
];

async fn open(browser: &Browser, list: &str) {
    browser.run(&format!("location.hash = '#/{list}'")).await;
    browser.shows(&format!("#list-{list} .foot"), "1–").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_controls_act_on_every_list() {
    let Some(browser) = Browser::start().await else { return };
    let (_database, rm) = start_page().await;
    let waiting = furnish(&rm).await;
    let yarn = Yarn::start(FAIR).await;
    put(&client_of(&rm).await, provider("bdp", &config(&yarn.address))).await.unwrap();
    browser.go(&format!("http://{}/", rm.http)).await;
    browser.shows("#nav-queues", "External queues").await;
    browser.shows("#users", "bob").await;

    for (list, field, value, expected) in FILTERS {
        open(&browser, list).await;
        filter(&browser, field, value).await;
        let what = format!("{list} with {field} {value} are {expected:?}");
        let number = if ["tickets", "refusals", "history"].contains(list) { 2 } else { 1 };
        eventually(&what, SHOWN_WITHIN, || async { column(&browser, number).await == *expected }).await;
        let written = format!("return new URLSearchParams(location.hash.split('?')[1]).get('{field}')");
        eventually(&what, SHOWN_WITHIN, || async { browser.run(&written).await == *value }).await;
        // The field has the value after the address was opened again.
        browser.run("location.hash = '#/'").await;
        browser.shows("#capacity", "cores").await;
        browser.back().await;
        let shown = format!("return document.querySelector('.filters [name={field}]')?.value");
        eventually(&what, SHOWN_WITHIN, || async { browser.run(&shown).await == *value }).await;
    }
    for (list, chip, address, shown) in CHIPS {
        open(&browser, list).await;
        browser.follow(".chips", chip).await;
        address_is(&browser, address).await;
        browser.shows("#rows", shown).await;
    }
    open(&browser, "ems").await;
    for (header, address, first) in SORTS {
        browser.follow("thead", header).await;
        address_is(&browser, address).await;
        browser.shows("#rows td", first).await;
        browser.shows(".foot", "1–4 of 4").await;
    }
    for (letters, address) in LETTERS {
        browser.press(letters).await;
        address_is(&browser, address).await;
        if let Some(list) = address.strip_prefix("#/").filter(|list| !list.is_empty()) {
            browser.shows(&format!("#list-{list} .foot"), "1–").await;
            // The list at the address before had other links.
            let larger = format!("{address}?size=100");
            let link = format!("return Boolean(document.querySelector('.foot a[href={larger:?}]'))");
            eventually(&larger, SHOWN_WITHIN, || async { browser.run(&link).await == true }).await;
            browser.follow(".foot", "100").await;
            address_is(&browser, &larger).await;
        }
    }
    browser.press("gw").await;
    column_is(&browser, 1, &["1"]).await;
    browser.press("c").await;
    eventually("the command is copied", SHOWN_WITHIN, || async {
        ["copied", "selected"].contains(&browser.text(".copy").await.as_str())
    })
    .await;
    assert_eq!(browser.complaints().await, [""; 0]);
    waiting.abort();
    rm.stop().await;
}
