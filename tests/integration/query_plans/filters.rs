//! Filters: the cost by an index is independent of the number of rows, and a page that scans rows has a bound.

use rm_proto::v1::{
    self as proto,
    UsageBy::{Creator, Em, EngineType, User},
    usage_service_client::UsageServiceClient,
};
use tonic::transport::Channel;

use super::{costs::Counting, tables::LAST_OF_CROWD, with_history};
use crate::harness::*;

type Usage = UsageServiceClient<Channel>;

/// Number of additional EMs with reports and without a match: several times the number that a page scans.
const EMS: i64 = 50_000;

/// Maximum number of rows that a page scans.
const LOOKED_AT_MAX: i64 = 5000;

/// Maximum number of database pages for one page of the history, with any filter: half of the lines that are read, because
/// neighbours share pages.
const HISTORY_PAGES_TOUCHED_MAX: i64 = 1500;

/// Number of consecutive pages that are read.
const PAGES: usize = 3;

/// Number of full hours before the current one.
fn hours_ago(hours: i64) -> Option<prost_types::Timestamp> {
    let now = i64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_secs()).unwrap();
    Some(prost_types::Timestamp { seconds: now / 3600 * 3600 - hours * 3600, nanos: 0 })
}

/// Filters that an index supports, or the first rows.
pub(super) async fn first_pages(usage: &mut Usage) {
    let page_size = 10;
    let em = Some(proto::EmInstance { application_name: "other".into(), instance: "host7".into() });
    let of_both = proto::ListTicketsRequest { em, user: "user7".into(), page_size, ..Default::default() };
    assert_eq!(usage.list_tickets(of_both).await.unwrap().into_inner().tickets.len(), 10);
    let idle_for = Some(prost_types::Duration::default());
    let idle = proto::ListTicketsRequest { idle_for, page_size, ..Default::default() };
    assert_eq!(usage.list_tickets(idle).await.unwrap().into_inner().tickets.len(), 0);
    let over = proto::ListScopesRequest { over_limit_only: true, page_size, ..Default::default() };
    usage.list_scopes(over).await.unwrap();
    let ems = proto::ListEmsRequest { em_application_name: "other".into(), page_size, ..Default::default() };
    for (filter, found) in [
        (proto::ListEmsRequest { silent: Some(false), draining: Some(false), ..ems.clone() }, 10),
        (proto::ListEmsRequest { em_application_name: "nobody".into(), silent: Some(true), ..ems }, 0),
    ] {
        assert_eq!(usage.list_ems(filter).await.unwrap().into_inner().ems.len(), found);
    }
    let refusals = proto::ListRefusalsRequest { page_size, ..Default::default() };
    for (filter, found) in [
        (proto::ListRefusalsRequest { from_time: hours_ago(-1), ..refusals.clone() }, 0),
        (proto::ListRefusalsRequest { to_time: hours_ago(-1), ..refusals.clone() }, 10),
        (proto::ListRefusalsRequest { to_time: hours_ago(3), ..refusals.clone() }, 0),
        (proto::ListRefusalsRequest { scope_kind: "em".into(), dimension: "cores".into(), ..refusals }, 10),
    ] {
        assert_eq!(usage.list_refusals(filter).await.unwrap().into_inner().refusals.len(), found);
    }
    // One hour, and several.
    for (by, from, to, found) in
        [(User, 3, 2, 10), (Creator, 3, 2, 10), (EngineType, 3, 2, 10), (Em, 3, 2, 10), (User, 6, 2, 10)]
    {
        let (by, from_time, to_time) = (by.into(), hours_ago(from), hours_ago(to));
        let call = proto::GetUsageRequest { by, from_time, to_time, page_size, ..Default::default() };
        assert_eq!(usage.get_usage(call).await.unwrap().into_inner().sums.len(), found, "{by} from {from}");
    }
}

async fn fill(database: &Database) {
    let ems = format!(
        r#"INSERT INTO linkis_em_resource_meta_data (em_application_name, em_instance, resource_type, total_resource,
            protected_resource, used_resource, locked_resource, left_resource, over_committed, labels, epoch, register_time,
            version, counted_to)
        SELECT 'many', 'host' || n, resource_type, total_resource, protected_resource, used_resource, locked_resource,
            left_resource, over_committed, labels, epoch, register_time, 1, counted_to
        FROM linkis_em_resource_meta_data, generate_series(1, {EMS}) n WHERE em_instance LIKE 'template%';
        INSERT INTO linkis_em_report (em_application_name, em_instance, epoch, sequence, health, report_time)
        SELECT em_application_name, em_instance, epoch, 1, 'healthy', now() + interval '1 hour'
        FROM linkis_em_resource_meta_data WHERE em_application_name = 'many';
        ANALYZE linkis_em_resource_meta_data, linkis_em_report"#
    );
    execute(&mut database.connect().await, ems).await;
}

/// Filters without any match.
enum Vain {
    Ems(proto::ListEmsRequest),
    Refusals(proto::ListRefusalsRequest),
    Scopes(proto::ListScopesRequest),
}

impl Vain {
    /// Reads a page. Returns the number of its entries, and the token of the next page.
    async fn page(&self, usage: &mut Usage, page_token: String) -> (usize, String) {
        match self {
            Self::Ems(call) => {
                let call = proto::ListEmsRequest { page_token, ..call.clone() };
                let page = usage.list_ems(call).await.unwrap().into_inner();
                (page.ems.len(), page.next_page_token)
            }
            Self::Refusals(call) => {
                let call = proto::ListRefusalsRequest { page_token, ..call.clone() };
                let page = usage.list_refusals(call).await.unwrap().into_inner();
                (page.refusals.len(), page.next_page_token)
            }
            Self::Scopes(call) => {
                let call = proto::ListScopesRequest { page_token, ..call.clone() };
                let page = usage.list_scopes(call).await.unwrap().into_inner();
                (page.scopes.len(), page.next_page_token)
            }
        }
    }

    fn statement(&self) -> &'static str {
        match self {
            Self::Ems(_) => "em_resource::list",
            Self::Refusals(_) => "refusal::list",
            Self::Scopes(_) => "label_resource::list",
        }
    }
}

/// Each page touches a bounded number of database pages for each row that it reads, and the next page continues.
pub(super) async fn a_page_that_finds_nothing_touches_no_more_than_it_may(postgres: &Counting, database: &Database) {
    fill(database).await;
    let rm = with_history(database).await;
    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let page_size = 10;
    let label = |key: &str| [(key.to_owned(), "nobody".to_owned())].into();
    let ems = proto::ListEmsRequest { page_size, ..Default::default() };
    let refusals = proto::ListRefusalsRequest { page_size, ..Default::default() };
    let scopes = proto::ListScopesRequest { labels: label("tenant"), page_size, ..Default::default() };
    // Reads an EM, its drain, and its report if a filter needs it, by key.
    for (what, looks, pages_per_row) in [
        ("EMs by label", Vain::Ems(proto::ListEmsRequest { labels: label("zone"), ..ems.clone() }), 2.0),
        (
            "EMs by health",
            Vain::Ems(proto::ListEmsRequest { health: proto::Health::Unhealthy.into(), ..ems.clone() }),
            5.0,
        ),
        ("EMs by silence", Vain::Ems(proto::ListEmsRequest { silent: Some(true), ..ems.clone() }), 6.0),
        ("EMs by drain", Vain::Ems(proto::ListEmsRequest { draining: Some(true), ..ems.clone() }), 2.0),
        ("EMs by fullness", Vain::Ems(proto::ListEmsRequest { min_fullness_percent: 100, ..ems }), 2.0),
        (
            "refusals by kind",
            Vain::Refusals(proto::ListRefusalsRequest { scope_kind: "creator".into(), ..refusals.clone() }),
            2.0,
        ),
        (
            "refusals by dimension",
            Vain::Refusals(proto::ListRefusalsRequest { dimension: "nothing".into(), ..refusals.clone() }),
            2.0,
        ),
        ("refusals by scope", Vain::Refusals(proto::ListRefusalsRequest { scope: "nobody".into(), ..refusals }), 2.0),
        ("scopes by label", Vain::Scopes(scopes), 2.0),
    ] {
        let (mut most, mut page_token) = (0, String::new());
        for page in 0..PAGES {
            drop(postgres.costs(database).await);
            let found = looks.page(&mut usage, page_token).await;
            let costs = postgres.costs(database).await;
            let touched = costs.iter().filter(|(statement, _)| statement.starts_with(looks.statement()));
            most = i64::max(most, touched.map(|(_, cost)| cost.pages).sum());
            assert!(found.0 == 0 && !found.1.is_empty(), "{what}, page {page}: {found:?}");
            page_token = found.1;
        }
        assert!(most as f64 <= pages_per_row * LOOKED_AT_MAX as f64, "{what}: {most}");
    }
    rm.stop().await;
}

/// Reads a page of the used tickets of the crowd.
pub(super) async fn used_of_crowd(
    usage: &mut Usage,
    em: Option<proto::EmInstance>,
    page_token: String,
) -> proto::ListTicketsResponse {
    let (user, state) = ("crowd".into(), "used".into());
    let call = proto::ListTicketsRequest { em, user, state, page_size: 10, page_token, ..Default::default() };
    usage.list_tickets(call).await.unwrap().into_inner()
}

/// Rows that a page read without a match are not read by the next page.
pub(super) async fn a_page_looks_through_no_more_than_it_has_to(database: &Database) {
    let rm = with_history(database).await;
    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let crowded = proto::EmInstance { application_name: "other".into(), instance: "crowded".into() };
    for em in [None, Some(crowded)] {
        let (mut found, mut pages, mut page_token) = (vec![], 0, String::new());
        loop {
            let page = used_of_crowd(&mut usage, em.clone(), page_token).await;
            (found, pages) = ([found, page.tickets].concat(), pages + 1);
            page_token = page.next_page_token;
            if page_token.is_empty() {
                break;
            }
        }
        assert_eq!((found.len(), pages), (1, 6));
        assert_eq!(found[0].ticket_id, LAST_OF_CROWD);
    }
    rm.stop().await;
}

/// A page of rare lines in the current partition touches few database pages, and pages continue until the end.
pub(super) async fn a_page_of_the_present_touches_few_pages(postgres: &Counting, database: &Database, rows: i64) {
    // As busy instances write lines: neighbours are from different batches.
    let present = format!(
        r#"INSERT INTO linkis_resource_action_record (action, ticket_id, "user", creator, engine_type, labels, em_application_name,
            em_instance, resource_type, resource, actor, action_time)
        SELECT 'granted', gen_random_uuid(), 'user' || n % 100, 'IDE', '', '{{}}', 'other', 'host' || n % 100, 'LoadInstance',
            '{{"memory":1,"cores":1,"instances":1,"instance":1}}', 'manager', now()
        FROM generate_series(1, {rows}) n"#
    );
    let mut connection = database.connect().await;
    execute(&mut connection, present).await;
    let rm = with_history(database).await;
    let mut usage = UsageServiceClient::connect(rm.address.clone()).await.unwrap();
    let em = Some(proto::EmInstance { application_name: "other".into(), instance: "nowhere".into() });
    let all = proto::ListActionsRequest::default();
    for (what, filter) in [
        ("actor", proto::ListActionsRequest { actor: "nobody".into(), ..all.clone() }),
        ("user", proto::ListActionsRequest { user: "nobody".into(), ..all.clone() }),
        ("EM", proto::ListActionsRequest { em, ..all.clone() }),
        ("action", proto::ListActionsRequest { actions: vec!["repaired".into()], ..all.clone() }),
        (
            "actor and action",
            proto::ListActionsRequest { actor: "manager".into(), actions: vec!["repaired".into()], ..all.clone() },
        ),
    ] {
        for newest_first in [false, true] {
            let (mut most, mut pages, mut page_token) = (0, 0, String::new());
            while pages < 8 {
                drop(postgres.costs(database).await);
                let call = proto::ListActionsRequest { newest_first, page_token, ..filter.clone() };
                let page = usage.list_actions(call).await.unwrap().into_inner();
                assert!(page.actions.is_empty(), "{page:?}");
                let costs = postgres.costs(database).await;
                let of_call =
                    |statement: &str| ["action_record::", "history_part::"].iter().any(|of| statement.starts_with(of));
                let touched =
                    costs.iter().filter(|(statement, _)| of_call(statement)).map(|(_, cost)| cost.pages).sum();
                (most, pages, page_token) = (i64::max(most, touched), pages + 1, page.next_page_token);
                if page_token.is_empty() {
                    break;
                }
            }
            assert!(most <= HISTORY_PAGES_TOUCHED_MAX, "{what}: {most}");
        }
    }
    rm.stop().await;
}
