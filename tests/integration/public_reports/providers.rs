//! Configurations of YARN clusters: rows of Linkis's table, addresses, standbys, Kerberos.

use std::collections::BTreeMap;

use axum::{
    Router,
    extract::{Request, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use linkis_rm::transport::proto;
use tokio::net::TcpListener;
use tonic::Code;
use tonic_types::StatusExt as _;

use super::{Case, Wrong, case};
use crate::{
    external::{FAIR, client_of, provider, put, serve},
    harness::*,
};

/// Name of the field that a refused configuration names.
async fn refused_field(rm: &Instance, provider: proto::Provider) -> Result<proto::Provider, String> {
    put(&client_of(rm).await, provider).await.map_err(|status| {
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        status.get_details_bad_request().unwrap().field_violations[0].field.clone()
    })
}

const ROWS: [Case<&str, Option<&str>>; 5] = [
    case(
        "apache/linkis#1899",
        "a row with line ends inside is not read",
        "{\r\n\"rmWebAddress\": \"http://127.0.0.1:8088\",\r\n\"hadoopVersion\": \"2.7.2\",\r\n\"authorEnable\": false\r\n}",
        None,
    ),
    case(
        "apache/linkis#1899",
        "a row with null values is not read",
        r#"{"rmWebAddress": "http://127.0.0.1:8088", "hadoopVersion": null, "authorEnable": null, "user": null, "pwd": null}"#,
        None,
    ),
    case(
        "apache/linkis#1899",
        "a row with all nine keys is not read",
        r#"{"rmWebAddress": "http://127.0.0.1:8088", "hadoopVersion": "2.7.2", "authorEnable": false, "user": "u", "pwd": "p",
            "kerberosEnable": false, "principalName": "u@EXAMPLE", "keytabPath": "/etc/u.keytab", "krb5Path": "/etc/krb5.conf"}"#,
        None,
    ),
    case(
        "apache/linkis#1899",
        "a version is a number",
        r#"{"rmWebAddress": "http://127.0.0.1:8088", "hadoopVersion": 2.7}"#,
        Some("provider.config.hadoopVersion"),
    ),
    case(
        "apache/linkis#1899",
        "a flag is text",
        r#"{"rmWebAddress": "http://127.0.0.1:8088", "authorEnable": "false"}"#,
        Some("provider.config.authorEnable"),
    ),
];

const ADDRESSES: [Case<&str, Option<&str>>; 6] = [
    case("apache/linkis#198", "the path of a gateway is lost", "http://127.0.0.1:8443/gateway/default/yarn", None),
    case("TOSIT-IO/tdp-getting-started#229", "an address has no scheme", "127.0.0.1:8088", Some(ADDRESS)),
    case("apache/linkis#198", "an IPv6 address is not read", "http://[::1]:8088", None),
    case("apache/linkis#198", "a password stands in the address", "http://u:p@127.0.0.1:8088", Some(ADDRESS)),
    case("apache/linkis#198", "the scheme is in capitals", "HTTP://127.0.0.1:8088", None),
    case(
        "apache/linkis#198",
        "a comma stands between addresses",
        "http://127.0.0.1:1,http://127.0.0.1:2",
        Some(ADDRESS),
    ),
];
const ADDRESS: &str = "provider.config.rmWebAddress";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn provider_rows_of_linkis_are_read_or_refused_by_key() {
    let database = Database::fresh().await;
    let external_hosts = linkis_rm::external::allowed::AllowedHosts::parse("*").unwrap();
    let rm = Instance::start_with(&database, linkis_rm::server::Options { external_hosts, ..options() }).await;
    let mut wrong = Wrong::default();
    for case in &ROWS {
        let result = refused_field(&rm, provider("default", case.input)).await;
        wrong.compare(case, result.as_ref().err().map(String::as_str));
    }
    for case in &ADDRESSES {
        let config = serde_json::json!({"rmWebAddress": case.input}).to_string();
        let result = refused_field(&rm, provider("default", &config)).await;
        wrong.compare(case, result.as_ref().err().map(String::as_str));
        let kept = |provider: &proto::Provider| provider.config.to_lowercase().contains(&case.input.to_lowercase());
        assert!(result.as_ref().ok().is_none_or(kept), "{}: {result:?}", case.source);
    }
    wrong.none();
}

/// A ResourceManager, by its reply.
#[derive(Debug, Clone, Copy)]
enum Manager {
    Active,
    /// Without a listener.
    Dead,
    /// Text with status 200, as releases before 3.
    StandbyText,
    /// A redirect with status 307, as release 3.
    StandbyRedirect,
    StandbyState,
    /// Wants Kerberos: 401 with `WWW-Authenticate: Negotiate`.
    Negotiate,
    /// Wants Kerberos: 403 with a GSSException.
    GssException,
    /// `info` of HDP 2.7.3 without high availability.
    HaDisabled,
    /// `info` of release 2.2, without haState.
    NoHaState,
}

use Manager::{
    Active, Dead, GssException, HaDisabled, Negotiate, NoHaState, StandbyRedirect, StandbyState, StandbyText,
};

async fn reply(State(manager): State<Manager>, request: Request) -> Response {
    let info = |ha: &str| format!(r#"{{"clusterInfo": {{"id": 1, "state": "STARTED"{ha}}}}}"#).into_response();
    match (manager, request.uri().path().rsplit('/').next().unwrap_or_default()) {
        (StandbyText, _) => "This is standby RM. The redirect url is: http://rm2.example/\n".into_response(),
        (StandbyRedirect, _) => {
            (StatusCode::TEMPORARY_REDIRECT, [(header::LOCATION, "http://rm2.example/ws/v1/cluster")]).into_response()
        }
        (StandbyState, "info") => info(r#", "haState": "STANDBY""#),
        (Negotiate, _) => (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Negotiate")]).into_response(),
        (GssException, _) => {
            (StatusCode::FORBIDDEN, "GSSException: Failure unspecified at GSS-API level").into_response()
        }
        (HaDisabled, "info") => info(r#", "haState": "ResourceManager HA is not enabled.""#),
        (NoHaState, "info") => info(""),
        (_, "info") => info(r#", "haState": "ACTIVE""#),
        (_, "scheduler") => FAIR.into_response(),
        (_, "apps") => r#"{"apps": null}"#.into_response(),
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}

async fn address(manager: Manager) -> String {
    match manager {
        Dead => format!("http://{}", TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()),
        manager => serve(Router::new().fallback(reply).with_state(manager)).await.0,
    }
}

/// ResourceManagers with what stands between their addresses, and the text of the error if there is one.
type Managers = (&'static [Manager], &'static str);

const HA_CLIENTS: &str = "hadoop-yarn-api-python-client#98, PR 113; timberlake PR 80";

const MANAGERS: [Case<Managers, Option<(Code, &str)>>; 13] = [
    case(HA_CLIENTS, "a standby's text is read as a reply", (&[StandbyText, Active], ";"), None),
    case(HA_CLIENTS, "a standby's redirect is followed", (&[StandbyRedirect, Active], ";"), None),
    case(HA_CLIENTS, "a standby is taken as active", (&[StandbyState, Active], ";"), None),
    case(HA_CLIENTS, "a dead ResourceManager ends the search", (&[Dead, Active], ";"), None),
    case(HA_CLIENTS, "white space stands around addresses", (&[StandbyText, Active], " ; "), None),
    case(HA_CLIENTS, "a slash stands behind an address", (&[StandbyText, Active], "/;"), None),
    case(HA_CLIENTS, "a line end stands behind an address", (&[StandbyText, Active], ";\r\n"), None),
    case(HA_CLIENTS, "only standbys reply", (&[StandbyText, StandbyState], ";"), Some((Code::Unavailable, ""))),
    case(HA_CLIENTS, "only standbys reply", (&[StandbyRedirect, Dead], ";"), Some((Code::Unavailable, ""))),
    case(
        "apache/linkis#1039, PR 1051",
        "Kerberos is wanted",
        (&[Negotiate], ""),
        Some((Code::FailedPrecondition, "401")),
    ),
    case("apache/linkis#1148", "Kerberos is wanted", (&[GssException], ""), Some((Code::FailedPrecondition, "403"))),
    case("jupyter-server/enterprise_gateway#441", "haState is a sentence", (&[HaDisabled], ""), None),
    case("jupyter-server/enterprise_gateway#441", "haState is absent", (&[NoHaState], ""), None),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resource_managers_with_one_active_are_asked() {
    let (_database, rm) = start().await;
    let client = client_of(&rm).await;
    let mut wrong = Wrong::default();
    for (number, case) in MANAGERS.iter().enumerate() {
        let mut addresses = Vec::new();
        for manager in case.input.0 {
            addresses.push(address(*manager).await);
        }
        let config = serde_json::json!({"rmWebAddress": addresses.join(case.input.1)}).to_string();
        let (name, labels) = (format!("p{number}"), BTreeMap::from([("yarnCluster".into(), number.to_string())]));
        put(&client, proto::Provider { labels, ..provider(&name, &config) }).await.unwrap();
        let selector = Some(proto::ProviderSelector { name, ..Default::default() });
        let call = proto::GetQueueRequest { provider: selector, queue_name: "root.eng.etl".into() };
        let queue = client.clone().get_queue(call).await;
        let status = queue.err();
        let result = status.as_ref().map(|status| {
            let names_all = addresses.iter().all(|address| status.message().contains(address));
            let text = case.right.map(|(_, text)| text).filter(|text| names_all && status.message().contains(text));
            (status.code(), text.unwrap_or(status.message()))
        });
        wrong.compare(case, result);
    }
    wrong.none();
}
