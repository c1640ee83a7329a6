//! Users on the page by what they hold: the card, the list, the search, and a viewer that sees one user.

use crate::{
    browser::{Browser, SHOWN_WITHIN},
    harness::*,
    identity::token,
    page::{get, start_page},
    page_lists::{ENTER, UP, address_is, column, column_is, filter, furnish_racks},
};

async fn sign_in(browser: &Browser, token: &str) {
    let fill = "document.getElementById('token').value";
    browser.run(&format!("{fill} = '{token}'; document.getElementById('login-form').requestSubmit()")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_users_are_listed_by_what_they_hold() {
    let Some(browser) = Browser::start().await else { return };
    let (database, rm) = start_page().await;
    furnish_racks(&rm).await;
    let grant = rm.client.request_resource(&request(&em("host03"), "user03", load(60, 1, 1))).await.granted();
    rm.client.resource_inited(&inited(&grant, "user03", None)).await.unwrap();
    let url = format!("http://{}/", rm.http);
    browser.go(&url).await;
    // By the fullest dimension, which is the cores.
    browser.shows("#users tbody tr", "user29301").await;
    browser.shows("#users .note", "by cores, summed").await;
    browser.shows("#users tr:nth-child(8)", "user22").await;
    let widths = "return [...document.querySelectorAll('#users .bar')].map((bar) => [...bar.children].map((part) => part.style.width).join()).slice(0, 2)";
    assert_eq!(browser.run(widths).await, serde_json::json!(["0%,100%", "0%,96.6667%"]));
    browser.follow("#users", "all").await;
    address_is(&browser, "#/users?sort=-cores").await;
    browser.shows(".foot", "1–25, more follow. summed").await;
    let shown = column(&browser, 1).await;
    assert_eq!((shown[0].as_str(), shown.len()), ("user29", 25));
    browser.shows("#rows [aria-sort=descending]", "cores ↓").await;
    browser.shows(".list .command", "linkis-rm user list --sort cores").await;
    browser.follow(".foot", "next page").await;
    column_is(&browser, 1, &["user03", "user04", "user02", "user01", "user00"]).await;
    column_is(&browser, 2, &["5", "5", "3", "2", "1"]).await;
    browser.shows(".foot", "26–30").await;
    browser.back().await;
    browser.shows("#rows td", "user29").await;
    // Another dimension begins at the first page, by a chip or by the header of its column.
    browser.follow(".chips", "memory").await;
    browser.shows("#rows td", "user03").await;
    assert_eq!(column(&browser, 2).await[..2], ["61 GB", "1 GB"]);
    assert_eq!(column(&browser, 3).await[..2], ["1 GB", "1 GB"], "locked");
    browser.follow("thead", "instances").await;
    address_is(&browser, "#/users?sort=-instances").await;
    eventually("two instances are the most", SHOWN_WITHIN, || async { column(&browser, 2).await[..2] == ["2", "1"] })
        .await;
    filter(&browser, "part", "SER2").await;
    browser.shows(".foot", "1–10. of 30 that this page has read, summed").await;
    browser.follow("#rows", "user21").await;
    address_is(&browser, "#/user/user21?from=users%3Fsort%3D-instances%26part%3DSER2").await;
    browser.shows("#panel h1", "User user21").await;

    for (typed, opened) in [("ser07", "#/user/user07"), (&format!("ser1{UP}{UP}"), "#/users?part=ser1")] {
        browser.go(&url).await;
        browser.shows("#users", "user29").await;
        let (text, arrows) = typed.split_at(typed.find(UP).unwrap_or(typed.len()));
        browser.press(&format!("/{text}")).await;
        browser.shows("#suggestions", text).await;
        browser.press(&format!("{arrows}{ENTER}")).await;
        address_is(&browser, opened).await;
    }
    browser.press("gu").await;
    address_is(&browser, "#/users").await;

    // A viewer of a single user signs in after a viewer of all users. Neither the lists nor the search have others.
    let all = token(&database, "olga", &["--role", "viewer"]);
    let own = token(&database, "otto", &["--role", "viewer", "--user", "user05"]);
    let known = || async {
        get(rm.http, "/api/v1/ListUsers", &format!("Authorization: Bearer {own}\r\n")).await.status == 200
            && get(rm.http, "/api/v1/ListUsers", "").await.status == 401
    };
    eventually("the tokens are known", LONG, known).await;
    browser.go(&url).await;
    browser.shows("#login", "Sign in").await;
    for (token, user, name, found) in [(&all, "user29", "olga", "user16"), (&own, "user05", "otto", "by this name")] {
        sign_in(&browser, token).await;
        browser.shows("#who", name).await;
        browser.shows("#users td", user).await;
        browser.press("/ser16").await;
        browser.shows("#suggestions", found).await;
        assert_eq!(browser.text("#suggestions").await.contains("user16"), name == "olga");
        browser.run("document.getElementById('search').value = ''; document.getElementById('logout').click()").await;
        browser.shows("#login", "Sign in").await;
    }
    sign_in(&browser, &own).await;
    browser.shows("#users tbody", "user05").await;
    assert_eq!(browser.run("return document.querySelectorAll('#users tbody tr').length").await, 1);
    browser.press("gu").await;
    column_is(&browser, 1, &["user05"]).await;
    browser.complaints().await;
    rm.stop().await;
}
