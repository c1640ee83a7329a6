//! Addresses, lists and keys of the page in a browser: every object and list has an address, and Back returns to it.

use rm_client::ResourceRequest;
use rm_model::{
    limit::{LabelPattern, Rule},
    name::Labels,
    operation::RegisterEm,
};

use crate::{
    browser::{Browser, SHOWN_WITHIN},
    harness::*,
    page::{HOSTILE, furnish, start_page},
};

/// Key codes of WebDriver.
pub const ENTER: &str = "\u{e007}";
const ESCAPE: &str = "\u{e00c}";
const RIGHT: &str = "\u{e014}";
const DOWN: &str = "\u{e015}";
const LEFT: &str = "\u{e012}";
pub const UP: &str = "\u{e013}";

/// Returns the texts of a column of the list, without those for narrow windows.
pub async fn column(browser: &Browser, number: usize) -> Vec<String> {
    let script = format!(
        "const isWide = (part) => !part.classList?.contains('narrow');
         return [...document.querySelectorAll('#rows td:nth-child({number})')].map((cell) =>
            [...cell.childNodes].filter(isWide).map((part) => part.textContent).join(''))"
    );
    serde_json::from_value(browser.run(&script).await).unwrap()
}

pub async fn column_is(browser: &Browser, number: usize, expected: &[&str]) {
    let what = format!("column {number} is {expected:?}");
    eventually(&what, SHOWN_WITHIN, || async { column(browser, number).await == expected }).await;
}

pub async fn address_is(browser: &Browser, expected: &str) {
    let what = format!("the address is {expected}");
    eventually(&what, SHOWN_WITHIN, || async { browser.address().await == expected }).await;
}

/// Sets the value of a filter, as typing does.
pub async fn filter(browser: &Browser, name: &str, value: &str) {
    let script = format!(
        "const field = document.querySelector('[name={name}]'); field.value = '{value}';
         field.dispatchEvent(new Event(field.tagName === 'SELECT' ? 'change' : 'input', {{ bubbles: true }}))"
    );
    browser.run(&script).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_addresses_open_every_list_and_object() {
    let Some(browser) = Browser::start().await else { return };
    let (_database, rm) = start_page().await;
    let waiting = furnish(&rm).await;
    let grant = rm.client.request_resource(&request(&em(HOSTILE), "erin", load(1, 0, 0))).await.granted();
    let ticket = grant.ticket_id;
    let url = format!("http://{}/", rm.http);
    for (address, place, shown) in [
        ("#/", "#capacity", "cores"),
        ("#/ems", "#rows", "host2:9102"),
        ("#/ems?state=draining", "#rows", "host3:9102"),
        ("#/limits", "#rows", "user=bob"),
        ("#/limits?show=set", "#rows", "enforced"),
        ("#/waiting", "#rows", HOSTILE),
        ("#/waiting?em=host1:9102", "#rows", HOSTILE),
        ("#/tickets?state=locked", "#rows", "erin"),
        ("#/refusals", "#rows", "carol"),
        ("#/history?show=limits", "#rows", "limit set"),
        ("#/em/host1:9102", "#panel", "Waiting for this EM"),
        ("#/user/bob", "#panel", "user=bob"),
        ("#/scope/user=bob", "#panel", "Holds it"),
        ("#/scope/tenant=x", "#panel", "No limit in force counts tenant=x"),
        (&format!("#/ticket/{ticket}"), "#panel", "erin"),
        ("#/nothing", "#capacity", "cores"),
        ("#/em/%", "#panel", "is not registered"),
    ] {
        browser.go("about:blank").await;
        browser.go(&format!("{url}{address}")).await;
        browser.shows(place, shown).await;
    }
    // Objects that have ended are shown with their history.
    rm.client.resource_released(&release(&grant, "erin")).await.unwrap();
    browser.go(&format!("{url}#/ticket/{ticket}")).await;
    browser.shows("#panel", "This ticket has ended: released").await;
    rm.client.unregister(&em("host3")).await.unwrap();
    browser.go(&format!("{url}#/em/host3:9102")).await;
    browser.shows("#panel", "host3:9102 is not registered.").await;
    browser.shows("#panel", "It had 11 GB, 11 cores, 10 instances.").await;
    waiting.abort();
    rm.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_back_returns_to_list_with_filter() {
    let Some(browser) = Browser::start().await else { return };
    let (_database, rm) = start_page().await;
    let waiting = furnish(&rm).await;
    browser.go(&format!("http://{}/", rm.http)).await;
    browser.shows("#strip", "1 EM unhealthy").await;
    browser.follow("#strip", "1 EM unhealthy").await;
    address_is(&browser, "#/ems?state=unhealthy").await;
    column_is(&browser, 1, &["host2:9102"]).await;
    browser.follow("#rows", "host2:9102").await;
    address_is(&browser, "#/em/host2:9102?from=ems%3Fstate%3Dunhealthy").await;
    browser.shows("#panel h1", "host2:9102").await;
    column_is(&browser, 1, &["host2:9102"]).await;
    browser.shows("#rows .selected", "host2:9102").await;
    browser.back().await;
    address_is(&browser, "#/ems?state=unhealthy").await;
    browser.shows("#panel", "(unseen)").await;
    // A filter replaces its entry: Back leaves the list.
    browser.follow(".chips", "draining 1").await;
    column_is(&browser, 1, &["host3:9102"]).await;
    browser.back().await;
    browser.shows("#capacity", "cores").await;
    address_is(&browser, "").await;
    // A position on the overview is found again.
    browser.resize(700, 400).await;
    browser.run("scrollTo(0, 500)").await;
    eventually("the page has scrolled", SHOWN_WITHIN, || async { browser.run("return scrollY").await == 500 }).await;
    browser.follow("#actions", "all").await;
    browser.shows("#rows", "registered").await;
    browser.back().await;
    eventually("the position is as before", SHOWN_WITHIN, || async { browser.run("return scrollY").await == 500 })
        .await;
    assert_eq!(browser.complaints().await, [""; 0]);
    waiting.abort();
    rm.stop().await;
}

/// 30 EMs in two racks, the second rack fuller. Tickets of 30 users.
pub async fn furnish_racks(rm: &Instance) {
    for number in 0..30 {
        let em = em(&format!("host{number:02}"));
        let rack = if number < 20 { "r1" } else { "r2" };
        let labels = Labels::parse("labels", [("rack".to_owned(), rack.to_owned())].into()).unwrap();
        rm.client.register(RegisterEm { labels, ..registration(em.clone(), load(100, 100, 100)) }).await.unwrap();
        let cores = number + 1;
        rm.client.request_resource(&request(&em, &format!("user{number:02}"), load(1, cores, 1))).await.granted();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_lists_are_filtered_sorted_and_paged() {
    let Some(browser) = Browser::start().await else { return };
    let (_database, rm) = start_page().await;
    furnish_racks(&rm).await;
    let url = format!("http://{}/", rm.http);
    browser.go(&format!("{url}#/ems")).await;
    browser.shows(".foot", "1–25 of 30").await;
    let shown = column(&browser, 1).await;
    assert_eq!((shown[0].as_str(), shown.len()), ("host29:9102", 25), "the fullest EM is the first");
    browser.follow(".foot", "next page").await;
    browser.shows(".foot", "26–30 of 30").await;
    assert_eq!(column(&browser, 1).await.last().unwrap(), "host00:9102");
    browser.back().await;
    browser.shows(".foot", "1–25 of 30").await;
    browser.follow("thead", "full").await;
    address_is(&browser, "#/ems?sort=-full").await;
    browser.shows("thead", "full ↓").await;
    browser.follow("thead", "full ↓").await;
    browser.shows("#rows td", "host00:9102").await;
    filter(&browser, "label", "rack=r2").await;
    browser.shows(".foot", "1–10 of 10").await;
    filter(&browser, "part", "HOST25").await;
    column_is(&browser, 1, &["host25:9102"]).await;
    column_is(&browser, 5, &["26 of 100"]).await;
    browser.shows(".list .command", "linkis-rm em list --label rack=r2").await;
    filter(&browser, "part", "none").await;
    browser.shows("#rows", "No EM matches.").await;

    browser.go(&format!("{url}#/tickets")).await;
    browser.shows(".foot", "1–25, more follow").await;
    browser.follow(".foot", "next page").await;
    browser.shows(".foot", "26–30").await;
    assert_eq!(column(&browser, 2).await.last().unwrap(), "user29 IDE", "the oldest is the first");
    browser.follow(".foot", "first page").await;
    filter(&browser, "user", "user07").await;
    column_is(&browser, 2, &["user07 IDE"]).await;
    filter(&browser, "user", "").await;
    filter(&browser, "em", "host03:9102").await;
    column_is(&browser, 2, &["user03 IDE"]).await;
    filter(&browser, "engine", "spark").await;
    browser.shows(".foot", "of 1 that this page has read").await;
    filter(&browser, "engine", "hive").await;
    browser.shows("#rows", "No ticket matches.").await;
    filter(&browser, "engine", "").await;
    filter(&browser, "age", "86400").await;
    browser.shows("#rows", "No ticket matches.").await;
    filter(&browser, "em", "no such EM").await;
    address_is(&browser, "#/tickets?em=no+such+EM&age=86400").await;
    browser.shows("#rows", "No ticket matches.").await;

    browser.go(&format!("{url}#/history?order=oldest&user=user05")).await;
    column_is(&browser, 2, &["granted"]).await;
    browser.go(&format!("{url}#/history?show=EMs&size=100")).await;
    browser.shows(".foot", "1–30").await;
    assert_eq!(browser.complaints().await, [""; 0]);
    rm.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_limit_shows_holders_waiters_refusals_and_author() {
    let Some(browser) = Browser::start().await else { return };
    let (_database, rm) = start_page().await;
    rm.client.register(registration(em("host1"), load(100, 100, 100))).await.unwrap();
    let pattern = LabelPattern::new([("creator".to_owned(), Some("IDE".to_owned()))].into());
    rm.client.set_limit(&Rule { pattern, ..each_user(3) }).await.unwrap();
    for user in ["alice", "alice", "bob"] {
        rm.client.request_resource(&request(&em("host1"), user, load(1, 1, 1))).await.granted();
    }
    rm.client.request_resource(&request(&em("host1"), "carol", load(1, 1, 1))).await.refused();
    let patient = ResourceRequest { wait_timeout: 10 * LONG, ..request(&em("host1"), "dora", load(1, 1, 1)) };
    let client = rm.client.clone();
    let waiting = tokio::spawn(async move { drop(client.request_resource(&patient).await) });
    browser.go(&format!("http://{}/#/scope/creator=IDE", rm.http)).await;
    for (section, shown) in [
        (1, "alice"),
        (1, "66%"),
        (2, "dora"),
        (3, "carol"),
        (4, "anonymous"),
        (5, "linkis-rm limit set creator=IDE --max instances=3"),
    ] {
        browser.shows(&format!("#panel section:nth-of-type({section})"), shown).await;
    }
    browser.shows("#panel tbody tr", "instances100%033creator=IDE").await;
    // All of its tickets are locked, and the bar is full.
    let widths =
        "return [...document.querySelectorAll('#panel .bar')[0].children].map((part) => part.style.width).join()";
    assert_eq!(browser.run(widths).await, "0%,100%,0%");
    waiting.abort();
    rm.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_search_suggests_while_typing() {
    let Some(browser) = Browser::start().await else { return };
    let (_database, rm) = start_page().await;
    furnish_racks(&rm).await;
    rm.client.drain(&em("host07"), "a new disk").await.unwrap();
    let url = format!("http://{}/", rm.http);
    for (typed, shown, opened) in [
        ("ost07", "host07", "#/em/host07:9102"),
        ("drain", "draining", "#/ems?state=draining"),
        ("k=r2", "rack=r2", "#/ems?label=rack%3Dr2"),
        ("zoe", "by this name", "#/user/zoe"),
        ("0197a2b4-1111-7222-8333-000000000000", "ticket", "#/ticket/0197a2b4-1111-7222-8333-000000000000"),
    ] {
        browser.go(&url).await;
        browser.shows("#ems .note", "draining").await;
        browser.press("/").await;
        browser.press(typed).await;
        browser.shows("#suggestions", shown).await;
        browser.press(ENTER).await;
        address_is(&browser, opened).await;
    }
    // Arrow keys mark another suggestion; Escape closes them. The page that was opened last takes the focus when it is shown.
    browser.go(&url).await;
    browser.shows("#ems .note", "draining").await;
    browser.press("/host1").await;
    browser.shows("#suggestions [aria-selected=true]", "host10").await;
    browser.press(DOWN).await;
    browser.shows("#suggestions [aria-selected=true]", "host11").await;
    browser.press(ESCAPE).await;
    browser.shows("#suggestions", "(unseen)").await;
    rm.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_keys_reach_lists_rows_and_map() {
    let Some(browser) = Browser::start().await else { return };
    let (_database, rm) = start_page().await;
    furnish_racks(&rm).await;
    browser.go(&format!("http://{}/", rm.http)).await;
    browser.shows("#ems .note", "30 unreported").await;
    // The map has one stop of the tab key.
    assert_eq!(browser.run("return document.querySelectorAll('.tile[tabindex=\"0\"]').length").await, 1);
    browser.run("document.querySelector('.tile[tabindex=\"0\"]').focus()").await;
    browser.press(RIGHT).await;
    browser.shows("#map-tip", "host01:9102: unreported, 2%").await;
    browser.press(DOWN).await;
    let top = |of: &str| format!("return Math.round({of}.getBoundingClientRect().top)");
    let first = browser.run(&top("document.querySelector('.tile')")).await;
    assert_ne!(browser.run(&top("document.activeElement")).await, first, "the focus is in the next row");
    browser.press(ENTER).await;
    browser.shows("#panel h1", "host").await;
    browser.press(ESCAPE).await;
    browser.shows("#panel", "(unseen)").await;

    browser.press("ge").await;
    address_is(&browser, "#/ems").await;
    browser.shows("#rows", "host29").await;
    browser.press("j").await;
    browser.press("j").await;
    browser.press(ENTER).await;
    browser.shows("#panel h1", "host28:9102").await;
    // The panel follows the rows.
    browser.run("document.querySelectorAll('#rows tbody a')[1].focus()").await;
    browser.press(DOWN).await;
    browser.shows("#panel h1", "host27:9102").await;
    browser.press(UP).await;
    browser.shows("#panel h1", "host28:9102").await;
    browser.press("k").await;
    browser.shows("#panel h1", "host29:9102").await;
    browser.press("]").await;
    browser.shows(".foot", "26–30 of 30").await;
    browser.press("[").await;
    browser.shows(".foot", "1–25 of 30").await;
    browser.press("]").await;
    browser.shows(".foot", "26–30 of 30").await;
    browser.press("?").await;
    browser.shows("#help", "letters do nothing").await;
    browser.run("document.getElementById('letters-off').click(); document.querySelector('#help button').click()").await;
    browser.press("gt").await;
    browser.shows(".foot", "26–30 of 30").await;
    // In a narrow window the map is one canvas.
    browser.resize(600, 900).await;
    browser.run("location.hash = '#/'").await;
    browser.shows("#ems .note", "30 unreported").await;
    browser.run("document.getElementById('map').focus()").await;
    browser.shows("#map-tip", "host00:9102").await;
    browser.press(&format!("{RIGHT}{RIGHT}{LEFT}")).await;
    browser.shows("#map-tip", "host01:9102").await;
    browser.press(ENTER).await;
    address_is(&browser, "#/em/host01:9102").await;
    rm.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_map_groups_ems_by_label() {
    let Some(browser) = Browser::start().await else { return };
    let (_database, rm) = start_page().await;
    furnish_racks(&rm).await;
    browser.go(&format!("http://{}/", rm.http)).await;
    browser.shows("#ems .note", "30 unreported").await;
    browser.run("document.getElementById('group').focus()").await;
    browser.shows("#group", "group by: rack").await;
    browser.run("const group = document.getElementById('group'); group.value = 'rack'; group.dispatchEvent(new Event('change'))").await;
    address_is(&browser, "#/?group=rack").await;
    browser.shows("#map .group", "rack r1 20 EMs").await;
    browser.shows("#map .group:nth-child(2)", "rack r2 10 EMs").await;
    let tiles = "return document.querySelectorAll('#map .group:nth-child(2) .tile').length";
    assert_eq!(browser.run(tiles).await, 10);
    browser.follow("#map", "rack r2").await;
    browser.shows(".foot", "1–10 of 10").await;
    browser.back().await;
    browser.shows("#map .group:nth-child(2)", "rack r2 10 EMs").await;
    assert_eq!(browser.complaints().await, [""; 0]);
    rm.stop().await;
}
