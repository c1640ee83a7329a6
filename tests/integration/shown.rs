//! The page as a browser shows it: it says what the service says, soon, and nothing that it should not.

use std::{net::SocketAddr, time::Instant};

use crate::{
    browser::Browser,
    harness::*,
    identity::{token, tokens},
    page::{HOSTILE, LONG, furnish, get, start_page},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_browser_shows_is_what_the_service_says() {
    let Some(browser) = Browser::start().await else { return };
    let (database, rm) = start_page().await;
    let waiting = furnish(&rm).await;
    let started = Instant::now();
    browser.go(&format!("http://{}/", rm.http)).await;
    browser.shows("#live", "live").await;
    println!("live after {:?}", started.elapsed());

    let overview = get(rm.http, "/api/v1/GetOverview", "").await.json();
    let sum = |field: &str| -> i64 {
        let groups = overview["overview"]["ems"].as_array().unwrap().iter();
        groups.map(|group| group["dimensions"]["cores"][field].as_str().unwrap().parse::<i64>().unwrap()).sum()
    };
    assert_eq!((sum("total"), sum("used"), sum("locked")), (44, 5, 10));
    browser.shows("#tile-cores b", "37%").await;
    // Of what is left, that on the hosts that are chosen is free: 4 and 1 of 25.
    browser.shows("#tile-cores .more", "5 used, 10 locked, 4 protected, 5 free, 20 on hosts that take nothing").await;
    browser.shows("#tile-hosts b", "4").await;
    browser.shows("#tile-hosts .more", "1 draining").await;
    browser.shows("#tile-tickets .more", "2 locked").await;
    browser.shows("#tile-waiting b", "1").await;
    browser.shows("#waiting", HOSTILE).await;
    browser.shows("#waiting", "host1:9102").await;
    browser.shows("#locked", HOSTILE).await;
    browser.shows("#actions", "drained").await;
    assert_eq!(browser.text("#empty").await, "(unseen)");

    // A grant is seen soon.
    let granted = Instant::now();
    rm.client.request_resource(&request(&em(HOSTILE), "carol", load(1, 1, 1))).await.granted();
    browser.shows("#tile-cores .more", "11 locked").await;
    browser.shows("#locked", "carol").await;
    println!("a grant is seen after {:?}", granted.elapsed());

    // A host in full, found by what it is called; and a user whose name would be markup.
    browser.run("document.getElementById('search').value = 'onerror'; document.getElementById('search-form').requestSubmit()").await;
    browser.shows("#panel", &format!("{HOSTILE}:9102")).await;
    browser.run("document.querySelector('#panel .link').click()").await;
    browser.shows("#panel", "10 locked, 1 protected, 0 free of 11").await;
    browser.shows("#panel", "bob").await;
    for (width, name) in [(400, "panel-narrow"), (1400, "panel-wide")] {
        browser.resize(width, 900).await;
        browser.picture(name).await;
        assert_eq!(browser.overflow().await, 0, "{width} pixels");
    }
    browser.run("[...document.querySelectorAll('#locked .link')].find((link) => link.textContent.startsWith('<img')).click()").await;
    browser.shows("#panel h2", &format!("User {HOSTILE}")).await;
    browser.shows("#panel", "9.0 GB, 9 cores, 9 instances").await;
    assert_eq!(browser.run("return document.querySelectorAll('img').length").await, 0);
    browser
        .run("document.getElementById('panel-close').click(); document.getElementById('host-list').open = true")
        .await;
    browser.shows("#host-rows", "draining").await;

    for (width, name) in [(1400, "wide"), (400, "narrow")] {
        browser.resize(width, 900).await;
        for scheme in ["light", "dark"] {
            browser.prefer(scheme).await;
            browser.picture(&format!("{name}-{scheme}")).await;
            assert_eq!(browser.overflow().await, 0, "{width} pixels");
        }
    }
    assert_eq!(browser.complaints().await, [""; 0]);

    // It goes away, and comes again.
    let (http, place) = (rm.http, rm.address.replace("http://", ""));
    waiting.abort();
    rm.stop().await;
    let gone = browser.shows("#live", "no connection").await;
    println!("that it is gone is said after {gone:?}");
    let rm = Instance::start_with_http(database.target(), options(), place.parse::<SocketAddr>().unwrap().into(), http)
        .await;
    let back = browser.shows("#live", "live").await;
    println!("it is live again after {back:?}");
    browser.shows("#tile-waiting b", "0").await;
    rm.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_host_it_says_what_to_type() {
    let Some(browser) = Browser::start().await else { return };
    let (_database, rm) = start_page().await;
    browser.go(&format!("http://{}/", rm.http)).await;
    let address = rm.address.replace("http://", "");
    browser.shows("#empty-command", &format!("{address} linkis.rm.v1.ResourceManagerService/Register")).await;
    assert_eq!(browser.text("#hosts").await, "(unseen)");
    browser.picture("empty").await;
    rm.client.register(registration(em("host1"), load(1, 1, 1))).await.unwrap();
    browser.shows("#tile-hosts b", "1").await;
    assert_eq!(browser.text("#empty").await, "(unseen)");
    assert_eq!(browser.complaints().await, [""; 0]);
    rm.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_token_there_is_a_login_and_nothing_else() {
    let Some(browser) = Browser::start().await else { return };
    let (database, rm) = start_page().await;
    furnish(&rm).await.abort();
    let viewer = token(&database, "olga", &["--role", "viewer"]);
    let known = || async { get(rm.http, "/api/v1/GetOverview", "").await.status == 401 };
    eventually("tokens are asked for", LONG, known).await;
    browser.go(&format!("http://{}/", rm.http)).await;
    browser.shows("#login", "Sign in").await;
    assert_eq!(browser.text("#page").await, "(unseen)");
    browser.picture("login").await;
    let fill = |token: &str| {
        let fill = "document.getElementById('token').value";
        format!("{fill} = '{token}'; document.getElementById('login-form').requestSubmit()")
    };
    assert_eq!(browser.complaints().await, [""; 0]);
    browser.run(&fill("lrm_nothing")).await;
    browser.shows("#login-error", "none that is known").await;
    browser.run(&fill(&viewer)).await;
    browser.shows("#who", "olga (viewer)").await;
    browser.shows("#tile-hosts b", "4").await;
    assert_eq!(browser.run("return document.cookie").await, "", "no script reads the token");
    browser.complaints().await;
    tokens(&database, &["revoke", "--name", "olga"]);
    let revoked = browser.shows("#login-error", "revoked").await;
    println!("the login is back after {revoked:?}");
    assert_eq!(browser.text("#page").await, "(unseen)");
    let left = browser
        .run("return document.getElementById('tiles').textContent + document.getElementById('waiting').textContent")
        .await;
    assert_eq!(left, "", "nothing of what was shown is left");
    assert!(browser.complaints().await.iter().all(|line| line.contains("401")), "of lists that were being asked for");
    rm.stop().await;
}
