//! Idle engines on the page, and for whom they are to end.

use super::{
    choice::{Ecm, Reaction, quick, wait},
    *,
};
use crate::{
    browser::Browser,
    page::start_page,
    page_lists::{address_is, column_is},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_shows_idle_engines_and_for_whom_they_end() {
    let Some(browser) = Browser::start().await else { return };
    let (_database, rm) = start_page().await;
    let ecm = Ecm::register(&rm.client, "host1", 2, Reaction::Ignores).await;
    rm.client.set_reclaim_policy(&quick(ReclaimMode::Observe), "").await.unwrap();
    ecm.idle_engine("bob", "spark").await;
    ecm.engine("carol", "spark", false).await;
    let call = wait(&rm.client, ecm.request("ann", "sql"));
    browser.go(&format!("http://{}/", rm.http)).await;
    browser.shows("#idle .note", "1 idle, of 2 in use").await;
    for (place, shown) in [(2, "bob"), (4, "ann"), (5, "only observed")] {
        browser.shows(&format!("#idle td:nth-child({place})"), shown).await;
    }
    browser.shows("#users tr:has([href*=bob]) td:last-child", "1").await;
    browser.shows("#users tr:has([href*=carol]) td:last-child", "0").await;
    rm.client.set_reclaim_policy(&quick(ReclaimMode::Advise), "").await.unwrap();
    browser.shows("#idle td:nth-child(5)", "recalled").await;
    browser.follow("#idle", "all").await;
    address_is(&browser, "#/tickets?state=idle").await;
    column_is(&browser, 2, &["bob IDE"]).await;
    browser.shows("#rows td:nth-child(5)", "idle").await;
    browser.shows(".list .command", "linkis-rm ticket list --idle 0s").await;
    drop(call);
}
