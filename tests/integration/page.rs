//! The page over HTTP: content, access and bounds. `page_content` tests it in a browser.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Read as _,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use flate2::read::GzDecoder;
use rm_client::ResourceRequest;
use rm_model::{
    limit::{LabelPattern, Rule},
    operation::RegisterEm,
    report::{EmReport, Health, Load},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinSet,
};

use crate::{
    browser::{Browser, SHOWN_WITHIN, within},
    certificates::{FAR, Folder, authority, certify, config},
    harness::*,
    identity::token,
};

/// How long the first picture of 10,000 EMs may take.
const PICTURE_WITHIN: Duration = Duration::from_secs(10);

/// A name that would do something if it were markup.
pub const HOSTILE: &str = "<img src=x onerror=alert(1)>";

/// A reply: status, headers and body.
pub struct Answer {
    pub status: u16,
    headers: BTreeMap<String, String>,
    body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("{}", self.body))
    }
}

/// Sends this, and reads until the connection ends.
async fn ask(address: SocketAddr, request: &str) -> Answer {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // The server can end a connection by a reset.
    let _ = stream.write_all(request.as_bytes()).await;
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes).await;
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok()).unwrap_or_default();
    let header = |line: &str| line.split_once(": ").map(|(name, value)| (name.to_lowercase(), value.to_owned()));
    Answer { status, headers: lines.filter_map(header).collect(), body: body.to_owned() }
}

pub async fn get(address: SocketAddr, path: &str, headers: &str) -> Answer {
    ask(address, &format!("GET {path} HTTP/1.1\r\nHost: test\r\n{headers}\r\n")).await
}

fn bearer(token: &str) -> String {
    format!("Authorization: Bearer {token}\r\n")
}

async fn sign_in(address: SocketAddr, token: &str, headers: &str) -> Answer {
    let body = format!("token={token}");
    let length = body.len();
    ask(address, &format!("POST /login HTTP/1.1\r\nHost: test\r\n{headers}Content-Length: {length}\r\n\r\n{body}"))
        .await
}

/// Writes this many EMs without use, up to 10,000: `openb-node-0000:9102`, and so on.
pub async fn insert_ems(database: &Database, count: usize) {
    let ems = format!(
        "INSERT INTO linkis_em_resource_meta_data (em_application_name, em_instance, resource_type, total_resource,
            protected_resource, used_resource, locked_resource, left_resource, over_committed, labels, epoch, register_time,
            version, counted_to)
        SELECT 'linkis-cg-engineconnmanager', 'openb-node-' || lpad(n::text, 4, '0') || ':9102', 'LoadInstance', amount, nothing,
            nothing, nothing, amount, false, '{{}}', 1, now(), 1, 0
        FROM generate_series(1, {count}) s, LATERAL (SELECT s - 1 AS n) n,
            (SELECT '{{\"memory\":100,\"cores\":100,\"instances\":100}}'::jsonb AS amount,
            '{{\"memory\":0,\"cores\":0,\"instances\":0}}'::jsonb AS nothing) a"
    );
    database.execute(ems).await;
    database.execute("VACUUM ANALYZE").await;
}

/// Starts an instance with its page. An EM without further reports stays as it is.
pub async fn start_page() -> (Database, Instance) {
    let database = Database::fresh().await;
    let patient = settings().with("--em-silent-after", "1h").with("--em-lost-after", "2h");
    let rm = Instance::start_with(&database, patient).await;
    let is_there = || async { get(rm.http, "/api/v1/session", "").await.status == 200 };
    eventually("there is a page", LONG, is_there).await;
    (database, rm)
}

/// Event stream of the page, as bytes.
struct Stream {
    stream: TcpStream,
    text: String,
    bytes: usize,
}

impl Stream {
    async fn open(address: SocketAddr, headers: &str) -> Self {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET /api/v1/events HTTP/1.1\r\nHost: test\r\n{headers}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        Self { stream, text: String::new(), bytes: 0 }
    }

    /// Returns the name and the data of the next event; `None` at the end.
    async fn next(&mut self) -> Option<(String, Value)> {
        loop {
            if let Some((kind, data)) = self.take() {
                return Some((kind, serde_json::from_str(&data).unwrap()));
            }
            let mut buffer = vec![0; 1 << 16];
            let read = tokio::time::timeout(LONG, self.stream.read(&mut buffer)).await.unwrap().unwrap_or(0);
            if read == 0 {
                return None;
            }
            self.bytes += read;
            self.text.push_str(std::str::from_utf8(&buffer[..read]).unwrap());
        }
    }

    fn take(&mut self) -> Option<(String, String)> {
        let start = self.text.find("event: ")?;
        let data = start + self.text[start..].find("\ndata: ")?;
        let end = data + 1 + self.text[data + 1..].find('\n')?;
        // A chunk may end anywhere; the sizes of the chunks are on separate lines between them.
        let event = (self.text[start + 7..data].to_owned(), self.text[data + 7..end].to_owned());
        self.text.drain(..end);
        Some(event)
    }
}

/// Four EMs, one drained, one unhealthy and busy. Tickets, one of them of a hostile user. A limit that bob has reached, a refusal
/// by the limit and one by an EM; a waiting request. Returns the waiting call.
pub async fn furnish(rm: &Instance) -> tokio::task::JoinHandle<()> {
    let ems = ["host1", "host2", "host3", HOSTILE].map(em);
    let mut epochs = Vec::new();
    for host in &ems {
        let register = RegisterEm { protected: load(1, 1, 0), ..registration(host.clone(), load(11, 11, 10)) };
        epochs.push(rm.client.register(register).await.unwrap().epoch);
    }
    let report = EmReport {
        em: ems[1].clone(),
        epoch: epochs[1],
        sequence: 1,
        health: Health::Unhealthy,
        load: Some(Load::parse("load", 6 * GB, 8 * GB, 425).unwrap()),
        tickets: vec![],
        observed: None,
        idle: vec![],
    };
    rm.client.heartbeat(&report).await.unwrap();
    rm.client.drain(&ems[2], HOSTILE).await.unwrap();
    let used = rm.client.request_resource(&request(&ems[0], HOSTILE, load(2, 5, 1))).await.granted();
    rm.client.resource_inited(&inited(&used, HOSTILE, None)).await.unwrap();
    rm.client.request_resource(&request(&ems[0], HOSTILE, load(1, 1, 1))).await.granted();
    let pattern = LabelPattern::new([("user".to_owned(), Some("bob".to_owned()))].into());
    rm.client.set_limit(&Rule { pattern, ..each_user(1) }).await.unwrap();
    rm.client.request_resource(&request(&ems[3], "bob", load(1, 9, 1))).await.granted();
    rm.client.request_resource(&request(&ems[0], "bob", load(1, 1, 1))).await.refused();
    rm.client.request_resource(&request(&ems[0], "carol", load(1, 100, 1))).await.refused();
    let got =
        || async { get(rm.http, "/api/v1/ListRefusals", "").await.json()["refusals"].as_array().unwrap().len() == 2 };
    eventually("both refusals are listed", LONG, got).await;
    let patient = ResourceRequest { wait_timeout: 10 * LONG, ..request(&ems[0], HOSTILE, load(9, 9, 9)) };
    let client = rm.client.clone();
    let waiting = tokio::spawn(async move { drop(client.request_resource(&patient).await) });
    let seen = || async { rm.client.waiting().await.unwrap().len() == 1 };
    eventually("the request waits", LONG, seen).await;
    waiting
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_access_equals_grpc_access() {
    let (database, rm) = start_page().await;
    furnish(&rm).await.abort();
    let viewer = token(&database, "olga", &["--role", "viewer"]);
    let bound = token(&database, "otto", &["--role", "viewer", "--user", "bob"]);
    let ecm = token(&database, "host1", &["--role", "ecm", "--em", "host1"]);
    // The last token: until the instance has read it, calls need no token, or it is unknown.
    let known = || async { get(rm.http, "/api/v1/GetOverview", &bearer(&ecm)).await.status == 403 };
    eventually("the tokens are known", LONG, known).await;

    let status = async |path: &str, headers: &str| get(rm.http, path, headers).await.status;
    for path in ["/api/v1/GetOverview", "/api/v1/ListTickets", "/api/v1/events"] {
        assert_eq!(status(path, "").await, 401, "{path}");
        assert_eq!(status(path, &bearer("lrm_nothing")).await, 401, "{path}");
        assert_eq!(status(path, &bearer(&ecm)).await, 403, "{path}");
    }
    let users = async |token: &str| -> Vec<String> {
        let got = get(rm.http, "/api/v1/ListTickets", &bearer(token)).await.json();
        got["tickets"].as_array().unwrap().iter().map(|ticket| ticket["user"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(users(&viewer).await, [HOSTILE, HOSTILE, "bob"]);
    assert_eq!(users(&bound).await, ["bob"]);
    // The stream for a user scope has EMs alone.
    for (token, got) in [(&viewer, true), (&bound, false)] {
        let (kind, picture) = Stream::open(rm.http, &bearer(token)).await.next().await.unwrap();
        assert_eq!(kind, "picture");
        let fields = ["tickets", "line", "throughput", "scopes"].map(|field| picture["overview"].get(field).is_some());
        assert_eq!(fields, [got; 4], "{picture}");
        // State number, and the used percentage of the fullest dimension.
        let ems = [(HOSTILE, 2, 90), ("host1", 2, 60), ("host2", 4, 0), ("host3", 5, 0)];
        let ems = ems.map(|(host, state, held)| json!([format!("{host}:9102"), state * 128 + held]));
        assert_eq!(picture["came"], json!([[0, "linkis-cg-engineconnmanager", ems]]));
    }

    // The page has no call that changes anything.
    let admin = token(&database, "ada", &["--role", "admin"]);
    let known = || async { get(rm.http, "/api/v1/ListTickets", &bearer(&admin)).await.status == 200 };
    eventually("the token is known", LONG, known).await;
    for call in ["Register", "ForceRelease", "Repair", "Watch", "nothing"] {
        assert_eq!(status(&format!("/api/v1/{call}"), &bearer(&admin)).await, 404, "{call}");
    }
    let post = format!("POST /api/v1/ListTickets HTTP/1.1\r\nHost: test\r\n{}\r\n", bearer(&admin));
    assert_eq!(ask(rm.http, &post).await.status, 405);
    assert_eq!(status("/api/v1/ListTickets?nothing=1", &bearer(&admin)).await, 400);
    let path = "/api/v1/ListTickets?em.application_name=linkis-cg-engineconnmanager&em.instance=host1:9102&page_size=1";
    let got = get(rm.http, path, &bearer(&admin)).await.json();
    assert_eq!(got["tickets"].as_array().unwrap().len(), 1);
    assert_eq!(got["tickets"][0]["em"]["instance"], "host1:9102");
    assert_eq!(status("/api/v1/GetTicket?ticket_id=0197a2b4-1111-7222-8333-000000000000", &bearer(&admin)).await, 404);
    rm.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_cookie_authenticates_same_origin_only() {
    let (database, rm) = start_page().await;
    let viewer = token(&database, "olga", &["--role", "viewer"]);
    let ecm = token(&database, "host1", &["--role", "ecm", "--em", "host1"]);
    // The last token: until the instance has read it, every call is permitted, or the token is unknown.
    let known = || async { get(rm.http, "/api/v1/GetOverview", &bearer(&ecm)).await.status == 403 };
    eventually("the tokens are known", LONG, known).await;
    let signed = sign_in(rm.http, &viewer, "Sec-Fetch-Site: same-origin\r\n").await;
    assert_eq!(signed.status, 204, "{}", signed.body);
    let cookie = &signed.headers["set-cookie"];
    assert_eq!(*cookie, format!("linkis_rm_token={viewer}; Path=/; HttpOnly; SameSite=Strict"));
    let shown = format!("Cookie: other=1; {}\r\n", cookie.split(';').next().unwrap());
    assert_eq!(get(rm.http, "/api/v1/ListTickets", &shown).await.status, 200);
    assert_eq!(get(rm.http, "/api/v1/session", &shown).await.json()["signed_in"], true);
    assert_eq!(get(rm.http, "/api/v1/session", "").await.json()["signed_in"], false);

    assert_eq!(sign_in(rm.http, &viewer, "Sec-Fetch-Site: cross-site\r\n").await.status, 403);
    // Without encryption, browsers of other sites send the origin alone.
    assert_eq!(sign_in(rm.http, &viewer, "Origin: http://test\r\n").await.status, 204);
    for other in ["http://test:8080", "https://evil.example", "null"] {
        let refused = sign_in(rm.http, &viewer, &format!("Origin: {other}\r\n")).await;
        assert_eq!((refused.status, refused.headers.get("set-cookie")), (403, None), "{other}");
    }
    assert_eq!(sign_in(rm.http, &ecm, "").await.status, 403, "a token without the permission");
    for wrong in ["", "lrm_nothing", "a%0d%0ab", "a%3Bb", &"a".repeat(4001)] {
        let refused = sign_in(rm.http, wrong, "").await;
        assert_eq!((refused.status, refused.headers.get("set-cookie")), (401, None), "{wrong}");
    }
    assert_eq!(sign_in(rm.http, &"a".repeat(20_000), "").await.status, 413);
    let out = ask(rm.http, "POST /logout HTTP/1.1\r\nHost: test\r\nContent-Length: 0\r\n\r\n").await;
    assert!(
        out.headers["set-cookie"].starts_with("linkis_rm_token=; ") && out.headers["set-cookie"].contains("Max-Age=0")
    );
    rm.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_replies_forbid_foreign_content() {
    let (_database, rm) = start_page().await;
    let page = get(rm.http, "/", "").await;
    assert_eq!((page.status, page.headers["content-type"].as_str()), (200, "text/html; charset=utf-8"));
    let named = page.body.split('"').filter(|text| text.starts_with("/page/")).map(str::to_owned).collect::<Vec<_>>();
    assert!(named.len() >= 3, "{named:?}");
    let mut files = named;
    // The modules that a file imports follow in the list.
    let mut read = 0;
    while let Some(path) = files.get(read).cloned() {
        let imports = get(rm.http, &path, "").await.body;
        let named = imports.split('"').filter(|text| text.starts_with("/page/")).map(str::to_owned);
        let new: BTreeSet<_> = named.filter(|name| !files.contains(name)).collect();
        files.extend(new);
        read += 1;
    }
    assert!(files.len() > 10, "{files:?}");
    for path in
        files.iter().map(String::as_str).chain(["/", "/api/v1/GetServerInfo", "/api/v1/nothing", "/page/nothing"])
    {
        let answer = get(rm.http, path, "").await;
        assert_eq!(answer.status, if path.ends_with("nothing") { 404 } else { 200 }, "{path}");
        let policy = &answer.headers["content-security-policy"];
        assert!(policy.starts_with("default-src 'none'; script-src 'self';") && !policy.contains("unsafe"), "{policy}");
        assert_eq!(answer.headers["x-content-type-options"], "nosniff");
        for markup in
            ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "onclick=", "style=\""]
        {
            assert!(!answer.body.contains(markup), "{path}: {markup}");
        }
    }
    rm.stop().await;
}

/// Sends a request and returns the headers and the body of the reply as bytes.
async fn ask_bytes(address: SocketAddr, path: &str, headers: &str) -> (String, Vec<u8>) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: test\r\n{headers}\r\n").as_bytes()).await.unwrap();
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await.unwrap();
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
    (String::from_utf8(bytes[..end].to_vec()).unwrap(), bytes[end + 4..].to_vec())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_replies_are_compressed_on_request() {
    let (_database, rm) = start_page().await;
    let waiting = furnish(&rm).await;
    for path in ["/page/format.js", "/page/page.css", "/api/v1/ListEms", "/metrics"] {
        for accepted in ["gzip", "br;q=1.0, gzip;q=0.8", "*"] {
            let (head, body) = ask_bytes(rm.http, path, &format!("Accept-Encoding: {accepted}\r\n")).await;
            assert!(
                head.contains("content-encoding: gzip") && head.contains("vary: accept-encoding"),
                "{path}: {head}"
            );
            let mut text = String::new();
            GzDecoder::new(&body[..]).read_to_string(&mut text).unwrap();
            assert!(body.len() * 2 < text.len(), "{path}: {} of {} bytes", body.len(), text.len());
            if path.starts_with("/page") {
                assert_eq!(text, get(rm.http, path, "").await.body);
            }
        }
        for accepted in ["", "Accept-Encoding: br\r\n", "Accept-Encoding: gzip;q=0, identity\r\n"] {
            let (head, _) = ask_bytes(rm.http, path, accepted).await;
            assert!(!head.contains("content-encoding"), "{path}: {head}");
        }
    }
    // A short reply, and the event stream, whose events must not wait for one another.
    let (head, _) = ask_bytes(rm.http, "/livez", "Accept-Encoding: gzip\r\n").await;
    assert!(!head.contains("content-encoding"), "{head}");
    assert_eq!(Stream::open(rm.http, "Accept-Encoding: gzip\r\n").await.next().await.unwrap().0, "picture");
    waiting.abort();
    rm.stop().await;
}

/// Concurrent viewers share the computation of a list.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_lists_are_shared_by_concurrent_viewers() {
    const MANY: usize = 30;
    let (_database, rm) = start_page().await;
    rm.client.register(registration(em("host1"), load(10, 10, 10))).await.unwrap();
    let list = "/api/v1/ListActions?newest_first=true&page_size=8";
    let asking: JoinSet<Answer> = (0..MANY).map(|_| get(rm.http, list, "Cache-Control: max-age=1\r\n")).collect();
    for answer in asking.join_all().await {
        assert_eq!(answer.status, 200);
        assert_eq!(answer.json()["actions"][0]["action"], "registered");
    }
    let metrics = get(rm.http, "/metrics", "").await;
    let counts = metrics
        .body
        .lines()
        .filter(|line| line.starts_with("grpc_server_handled_total") && line.contains("ListActions"));
    let handled: f64 = counts.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum();
    assert!(handled >= 1.0 && handled < MANY as f64 / 2.0, "{handled}");
    // A different query has its own, current result.
    assert_eq!(get(rm.http, "/api/v1/ListActions?page_size=7", "").await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_streams_are_bounded_and_end_at_shutdown() {
    let (_database, rm) = start_page().await;
    rm.client.register(registration(em("host1"), load(10, 10, 10))).await.unwrap();
    let mut streams = Vec::new();
    // More streams than permits; a single viewer does not get all permits.
    for _ in 0..70 {
        let mut stream = Stream::open(rm.http, "").await;
        if stream.next().await.is_some_and(|(kind, _)| kind == "picture") {
            streams.push(stream);
        }
    }
    assert_eq!(streams.len(), 60, "the other streams were rejected");
    assert_eq!(get(rm.http, "/api/v1/events", "").await.status, 429);
    assert_eq!(get(rm.http, "/livez", "").await.status, 200);
    assert_eq!(get(rm.http, "/api/v1/ListEms", "").await.status, 200);
    // A body or a head without an end, and a head that is too large, end their connections.
    let head = format!("GET / HTTP/1.1\r\nHost: test\r\nX-Large: {}\r\n\r\n", "a".repeat(400_000));
    let broken = async {
        tokio::join!(
            ask(rm.http, "POST /login HTTP/1.1\r\nHost: test\r\nContent-Length: 1000\r\n\r\ntoken=a"),
            ask(rm.http, &head),
            ask(rm.http, "GET / HTTP/1.1\r\nHost: "),
        )
    };
    let (body, large, none) = tokio::time::timeout(LONG, broken).await.expect("the connections end");
    assert_eq!((body.status, none.status), (0, 0));
    assert!([431, 0].contains(&large.status), "{}", large.status);
    // Streams last longer than other connections, which have ended, and end with the instance.
    let first = &mut streams[0];
    assert!(first.next().await.is_some());
    assert_eq!(format!("{:?}", rm.stop().await), "Drained");
    while let Some((kind, said)) = first.next().await {
        assert!(kind == "picture" || said == "the instance stops", "{kind} {said}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_with_10000_ems_sends_bounded_changes() {
    let (database, rm) = start_page().await;
    insert_ems(&database, 10_000).await;
    let mut first_bytes = 0;
    within("the first snapshot of 10,000 EMs is sent", PICTURE_WITHIN, async || {
        let begun = Instant::now();
        let mut stream = Stream::open(rm.http, "").await;
        let (_, picture) = stream.next().await.unwrap();
        first_bytes = stream.bytes;
        assert_eq!(picture["came"][0][2].as_array().unwrap().len(), 10_000);
        begun.elapsed()
    })
    .await;
    if let Some(browser) = Browser::start().await {
        let drawn = || async {
            browser
                .run("return document.getElementById('map')?.ariaLabel")
                .await
                .as_str()
                .is_some_and(|label| label.starts_with("10,000"))
        };
        within("a browser draws 10,000 EMs", PICTURE_WITHIN, async || {
            browser.go("about:blank").await;
            let begun = Instant::now();
            browser.go(&format!("http://{}/", rm.http)).await;
            eventually("all are drawn", SHOWN_WITHIN, drawn).await;
            begun.elapsed()
        })
        .await;
        browser.looks_well("many").await;
    }
    // All EMs change: a bounded number is sent each second, until all are.
    let mut stream = Stream::open(rm.http, "").await;
    stream.next().await.unwrap();
    let mut sizes = Vec::new();
    for held in 1..=2 {
        let change = format!(
            "UPDATE linkis_em_resource_meta_data SET used_resource = '{{\"memory\":{held}0,\"cores\":0,\"instances\":0}}'"
        );
        database.execute(change).await;
        let mut changes = 0;
        while changes < 10_000 {
            let before = stream.bytes;
            let (_, news) = stream.next().await.unwrap();
            let codes: Vec<_> = news["codes"].as_array().into_iter().flatten().collect();
            assert!(codes.chunks(2).all(|change| *change[1] == 2 * 128 + 10 * held), "{news}");
            changes += codes.len() / 2;
            sizes.push(stream.bytes - before);
        }
        assert_eq!(changes, 10_000);
    }
    assert!(sizes.len() >= 4 && sizes.iter().all(|bytes| *bytes < 100_000), "{sizes:?}");
    rm.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_opens_with_points_of_last_minutes() {
    let (_database, rm) = start_page().await;
    rm.client.register(registration(em("host1"), load(10, 10, 10))).await.unwrap();
    let noted = || async {
        let (_, picture) = Stream::open(rm.http, "").await.next().await.unwrap();
        picture["points"].as_array().is_some_and(|points| points.iter().any(|point| point["grants"].is_number()))
    };
    eventually("a point is noted", LONG, noted).await;
    rm.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_cookie_under_tls_is_secure() {
    let (database, folder) = (Database::fresh().await, Folder::new("page"));
    let ca = authority("ca");
    folder.write_all(&certify(&ca, &["rm.example"], &[], FAR), &ca);
    let (cert, key) = (folder.0.join("cert"), folder.0.join("key"));
    let encrypted = settings().with("--tls-cert", cert.display()).with("--tls-key", key.display());
    let rm = Instance::start_with(&database, encrypted).await;
    let mut config = (*config(&ca, None)).clone();
    config.alpn_protocols.clear();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let sign_in = async || {
        let stream = TcpStream::connect(rm.http).await.unwrap();
        let mut stream = connector.connect("rm.example".try_into().unwrap(), stream).await.unwrap();
        let request = "POST /login HTTP/1.1\r\nHost: rm.example\r\nContent-Length: 14\r\n\r\ntoken=anything";
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        // It may end without a word of TLS.
        let _ = stream.read_to_end(&mut answer).await;
        String::from_utf8(answer).unwrap()
    };
    eventually("there is a page", LONG, || async { !sign_in().await.starts_with("HTTP/1.1 503") }).await;
    let answer = sign_in().await;
    let cookie = "set-cookie: __Host-linkis_rm_token=anything; Path=/; HttpOnly; SameSite=Strict; Secure\r\n";
    assert!(answer.contains(cookie), "{answer}");
    rm.stop().await;
}
