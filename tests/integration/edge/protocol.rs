//! The gRPC specification: each rule for servers is a row, which a test here covers or which names the library that keeps the rule.
//!
//! The documents are those of gRPC: its protocol over HTTP/2 (P), compression (C), health checking (H) and reflection (R).

use tonic_reflection::pb::{v1, v1alpha};

use super::*;

/// Reply to a call: its HTTP status, and the fields of its headers and trailers.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub trailers: HeaderMap,
    pub body: Vec<u8>,
    /// Whether the headers were the last frame.
    is_trailers_only: bool,
}

impl Answer {
    /// Makes a call with that body.
    pub async fn of(raw: &Raw, method: &str, headers: &[(&str, &str)], body: Vec<u8>) -> Self {
        let (answer, mut stream) = raw.call_with(method, headers).await;
        // A call that is refused early does not take its body.
        let _ = stream.send_data(body.into(), true);
        Self::read(answer).await
    }

    pub async fn read(answer: ResponseFuture) -> Self {
        let (head, mut stream) = answer.await.unwrap().into_parts();
        let is_trailers_only = stream.is_end_stream();
        let mut body = vec![];
        while let Some(Ok(data)) = stream.data().await {
            stream.flow_control().release_capacity(data.len()).unwrap();
            body.extend_from_slice(&data);
        }
        let trailers = stream.trailers().await.ok().flatten().unwrap_or_default();
        Self { status: head.status.as_u16(), headers: head.headers, trailers, body, is_trailers_only }
    }

    fn field(&self, name: &str) -> Option<&str> {
        self.trailers.get(name).or_else(|| self.headers.get(name)).and_then(|value| value.to_str().ok())
    }

    pub fn code(&self) -> Option<Code> {
        self.field("grpc-status").map(|code| Code::from_bytes(code.as_bytes()))
    }

    /// Text of the status; only its spaces are decoded.
    pub fn text(&self) -> String {
        self.field("grpc-message").unwrap_or_default().replace("%20", " ")
    }
}

const LIST: &str = "linkis.rm.v1.UsageService/ListEms";
const CHECK: &str = "grpc.health.v1.Health/Check";

fn empty() -> Vec<u8> {
    message_prefix(0)
}

/// A request with a method, a content type, and an empty message.
async fn send_request(raw: &Raw, method: http::Method, content_type: Option<&str>) -> Answer {
    let request = Request::builder().method(method).uri(format!("{}/{LIST}", raw.address)).header("te", "trailers");
    let request = content_type.into_iter().fold(request, |request, of| request.header("content-type", of));
    let mut ready = raw.requests.clone().ready().await.unwrap();
    let (answer, mut stream) = ready.send_request(request.body(()).unwrap(), false).unwrap();
    let _ = stream.send_data(empty().into(), true);
    Answer::read(answer).await
}

/// Rules for servers that the library keeps, and that no test call can break.
const OF_THE_LIBRARY: [&str; 8] = [
    "P6 values of binary fields are read padded and unpadded, and split at commas: the service reads no binary field",
    "P12 a status text that is badly encoded is not thrown away: servers only write it",
    "P15 GOAWAY before a connection ends: tested with stops, ages and floods of frames",
    "P16 PING is acknowledged: tested with floods of frames",
    "P17 TLS 1.2 or later: tested with certificates",
    "C4 a compression context is not kept from one message to the next: unary calls have one message",
    "C6 what is not to be compressed is not: the service disables compression of no single message",
    "R5 a file comes without the files that it imports: a client asks for what is missing",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn protocol_over_http2_rules_hold() {
    let (_database, rm) = start().await;
    let raw = Raw::connect(&rm.address).await;
    // P1: the method is POST.
    for method in [http::Method::GET, http::Method::PUT] {
        let answer = send_request(&raw, method, Some("application/grpc")).await;
        assert_eq!((answer.status, answer.code()), (405, None), "P1 {answer:?}");
        assert_eq!(answer.headers["allow"], "POST", "P1");
    }
    // P2: a content type that does not begin with application/grpc is HTTP status 415.
    for content_type in [None, Some("text/plain"), Some("application/json"), Some("application/grpc-web")] {
        let answer = send_request(&raw, http::Method::POST, content_type).await;
        assert_eq!((answer.status, answer.code()), (415, None), "P2 {content_type:?} {answer:?}");
    }
    for content_type in ["application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8"] {
        let answer = send_request(&raw, http::Method::POST, Some(content_type)).await;
        assert_eq!((answer.status, answer.code()), (200, Some(Code::Ok)), "P2 {content_type} {answer:?}");
    }
    // P3: the path is case-sensitive.
    let answer = Answer::of(&raw, "linkis.rm.v1.usageservice/ListEms", &[], empty()).await;
    assert_eq!(answer.code(), Some(Code::Unimplemented), "P3 {answer:?}");
    // P4: unknown fields, and values that HTTP allows and gRPC does not, are no error.
    let odd = [("x-custom", "a\tb"), ("grpc-future", "1"), ("x-empty", ""), ("user-agent", "none"), ("x-bin", "!")];
    assert_eq!(Answer::of(&raw, LIST, &odd, empty()).await.code(), Some(Code::Ok), "P4");
    // P5: a call without a timeout is not limited by one, and eight digits of each unit are a timeout.
    for timeout in ["99999999H", "99999999M", "99999999S", "99999999m"] {
        assert_eq!(Answer::of(&raw, LIST, &[("grpc-timeout", timeout)], empty()).await.code(), Some(Code::Ok), "P5");
    }
    // P7: frames of data may cut a message anywhere, and end with an empty one.
    let (answer, mut stream) = raw.call_with(LIST, &[]).await;
    for byte in empty() {
        stream.send_data(Bytes::from(vec![byte]), false).unwrap();
    }
    stream.send_data(Bytes::new(), true).unwrap();
    assert_eq!(Answer::read(answer).await.code(), Some(Code::Ok), "P7");
    // P8: an answer has headers of status 200 and a content type, messages, and trailers with a status, also if it is OK.
    let answer = Answer::of(&raw, LIST, &[], empty()).await;
    assert_eq!((answer.status, answer.trailers.get("grpc-status").unwrap().as_bytes()), (200, b"0".as_slice()), "P8");
    assert!(answer.headers["content-type"].to_str().unwrap().starts_with("application/grpc"), "P8 {answer:?}");
    assert_eq!(answer.body[..5], message_prefix(answer.body.len() - 5), "P8");
    // P9: an error without a message may be one frame, of status 200 and with a content type.
    let answer = Answer::of(&raw, "linkis.rm.v1.UsageService/Nothing", &[], empty()).await;
    assert!(answer.is_trailers_only && answer.status == 200, "P9 {answer:?}");
    assert!(answer.headers["content-type"].to_str().unwrap().starts_with("application/grpc"), "P9 {answer:?}");
    // P10: a status is a number without leading zeros. P11: its text is encoded by percent signs.
    let name = prost::Message::encode_to_vec(&rm_proto::v1::GetEmRequest {
        em: Some(rm_proto::v1::EmInstance { application_name: "用户%".to_owned(), instance: "h:1".to_owned() }),
    });
    let body = [message_prefix(name.len()), name].concat();
    let answer = Answer::of(&raw, "linkis.rm.v1.UsageService/GetEm", &[], body).await;
    assert_eq!(answer.field("grpc-status"), Some("5"), "P10");
    assert!(answer.text().contains("%E7%94%A8%E6%88%B7%25"), "P11 {answer:?}");
    // P13: an answer before the end of the request is followed by RST_STREAM with NO_ERROR.
    let (answer, mut stream) = raw.call_with("linkis.rm.v1.UsageService/Nothing", &[]).await;
    Answer::read(answer).await;
    let reset = poll_fn(|cx| stream.poll_reset(cx)).await.unwrap();
    assert_eq!(reset, h2::Reason::NO_ERROR, "P13");
    // P14: headers above the limit fail their call alone.
    let long = "x".repeat(9000);
    let (answer, _stream) = raw.call_with(LIST, &[("x-long", &long)]).await;
    let refused = answer.await.map_or(431, |answer| answer.status().as_u16());
    assert_eq!(refused, 431, "P14");
    assert_eq!(Answer::of(&raw, LIST, &[], empty()).await.code(), Some(Code::Ok), "P14");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compression_rules_hold() {
    let (_database, rm) = start().await;
    let raw = Raw::connect(&rm.address).await;
    // C1: an unsupported encoding is UNIMPLEMENTED, and the reply lists the supported ones without it.
    for encoding in ["deflate", "snappy", "zstd", "br", "GZIP"] {
        let answer = Answer::of(&raw, LIST, &[("grpc-encoding", encoding)], empty()).await;
        assert_eq!(answer.code(), Some(Code::Unimplemented), "C1 {encoding} {answer:?}");
        assert!(answer.text().contains(encoding), "C1 {answer:?}");
        let supported = answer.field("grpc-accept-encoding").unwrap();
        assert!(supported.contains("gzip") && !supported.split(',').any(|of| of.trim() == encoding), "C1 {supported}");
    }
    // C2: a flag without an encoding is INTERNAL, and the text names the flag.
    for headers in [&[][..], &[("grpc-encoding", "identity")]] {
        let answer = Answer::of(&raw, LIST, headers, vec![1, 0, 0, 0, 0]).await;
        assert_eq!(answer.code(), Some(Code::Internal), "C2 {answer:?}");
        assert!(answer.text().contains("flag"), "C2 {answer:?}");
    }
    // C3: a reply is compressed only by an encoding that the client accepts. A message without the flag is uncompressed, also with an encoding.
    for (headers, is_gzip) in [
        (&[("grpc-encoding", "gzip")][..], false),
        (&[("grpc-encoding", "gzip"), ("grpc-accept-encoding", "deflate")], false),
        (&[("grpc-encoding", "gzip"), ("grpc-accept-encoding", "deflate,gzip")], true),
        (&[("grpc-accept-encoding", "gzip")], false),
    ] {
        let answer = Answer::of(&raw, LIST, headers, empty()).await;
        assert_eq!(answer.code(), Some(Code::Ok), "C3 {answer:?}");
        assert_eq!(answer.headers.get("grpc-encoding").is_some_and(|of| of == "gzip"), is_gzip, "C3 {headers:?}");
    }
    // C5: without a level, nothing is compressed.
    assert_eq!(Answer::of(&raw, LIST, &[], empty()).await.body[0], 0, "C5");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_checking_rules_hold() {
    let (_database, rm) = start().await;
    let raw = Raw::connect(&rm.address).await;
    let check = async |service: &str| {
        let check = prost::Message::encode_to_vec(&HealthCheckRequest { service: service.to_owned() });
        Answer::of(&raw, CHECK, &[], [message_prefix(check.len()), check].concat()).await
    };
    let serving = [&message_prefix(2)[..], &[8, 1]].concat();
    // H1: the empty name means the whole server. H2: each service has a status by its name.
    let services = ["", "liveness"].into_iter().map(str::to_owned);
    let of_api = ["ResourceManager", "Limit", "Usage", "ExternalResource", "Admin"];
    for service in services.chain(of_api.into_iter().map(|name| format!("linkis.rm.v1.{name}Service"))) {
        eventually(&format!("H2 {service}"), Duration::from_secs(30), async || check(&service).await.body == serving)
            .await;
    }
    // H3: an unknown name is NOT_FOUND; names are not patterns.
    for service in ["unknown", "linkis.rm.v1.*", "linkis.rm.v1.UsageService/ListEms"] {
        assert_eq!(check(service).await.code(), Some(Code::NotFound), "H3 {service}");
    }
    // H4: Watch replies immediately, with SERVICE_UNKNOWN for an unknown name, and the stream continues.
    let mut health = HealthClient::new(channel_to(&rm.address).await);
    for (service, status) in [("", ServingStatus::Serving), ("unknown", ServingStatus::ServiceUnknown)] {
        let mut watch = health.watch(HealthCheckRequest { service: service.to_owned() }).await.unwrap().into_inner();
        assert_eq!(watch.message().await.unwrap().unwrap().status(), status, "H4 {service:?}");
        let next = tokio::time::timeout(Duration::from_millis(100), watch.message()).await;
        assert!(next.is_err(), "H4 the stream continues: {next:?}");
    }
}

/// Sends all queries on one stream of a version of reflection, and returns a line for each reply.
macro_rules! reflect {
    ($version:ident, $address:expr, $questions:expr) => {{
        use $version::{
            ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
            server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
        };
        let question = |(kind, name): (&str, &str)| match kind {
            "file" => Some(MessageRequest::FileByFilename(name.to_owned())),
            "symbol" => Some(MessageRequest::FileContainingSymbol(name.to_owned())),
            "extension" => Some(MessageRequest::FileContainingExtension($version::ExtensionRequest {
                containing_type: name.to_owned(),
                extension_number: 7,
            })),
            "extensions" => Some(MessageRequest::AllExtensionNumbersOfType(name.to_owned())),
            "list" => Some(MessageRequest::ListServices(name.to_owned())),
            _ => None,
        };
        let questions: Vec<_> = $questions
            .iter()
            .map(|of| ServerReflectionRequest { host: "here".to_owned(), message_request: question(*of) })
            .collect();
        let mut client = ServerReflectionClient::new(channel_to($address).await);
        let answers = client.server_reflection_info(tokio_stream::iter(questions.clone())).await.unwrap();
        let mut answers = answers.into_inner();
        let mut lines = vec![];
        for question in questions {
            let Some(answer) = answers.message().await.unwrap() else { break };
            assert_eq!(answer.original_request, Some(question), "R4 the answer names its question");
            lines.push(match answer.message_response.unwrap() {
                MessageResponse::FileDescriptorResponse(files) => format!("{} file", files.file_descriptor_proto.len()),
                MessageResponse::AllExtensionNumbersResponse(of) => {
                    format!("{} {:?}", of.base_type_name, of.extension_number)
                }
                MessageResponse::ListServicesResponse(services) => {
                    let names = services.service.into_iter().map(|service| service.name);
                    // Each version of reflection has its own name.
                    let mut names: Vec<_> = names.map(|name| name.replace("v1alpha", "v1")).collect();
                    names.sort();
                    names.join(" ")
                }
                MessageResponse::ErrorResponse(error) => {
                    assert!(!error.error_message.is_empty());
                    format!("error {}", error.error_code)
                }
            });
        }
        assert!(answers.message().await.unwrap().is_none(), "R4 the stream ends with its questions");
        lines
    }};
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reflection_rules_hold() {
    let (_database, rm) = start().await;
    // R1: files by name and by symbol. R2: an unknown name is an error of code 5 in the stream. R3: extensions of a type. R4: each reply names
    // its query, and the stream ends with the queries.
    let asked = [
        ("symbol", "x.Y"),
        ("symbol", "linkis.rm.v1.UsageService"),
        ("symbol", "linkis.rm.v1.UsageService.ListEms"),
        ("symbol", "linkis.rm.v1.EmInstance"),
        ("symbol", "linkis.rm.v1.EmInstance.instance"),
        ("symbol", ""),
        ("file", "nothing.proto"),
        ("file", "linkis/rm/v1/usage.proto"),
        ("extension", "linkis.rm.v1.EmInstance"),
        ("extensions", "linkis.rm.v1.EmInstance"),
        ("extensions", "x.Y"),
        ("nothing", ""),
        ("list", ""),
    ];
    let expected = [
        "error 5",
        "1 file",
        "1 file",
        "1 file",
        "1 file",
        "error 5",
        "error 5",
        "1 file",
        "error 5",
        "linkis.rm.v1.EmInstance []",
        "error 5",
        "error 3",
        "grpc.health.v1.Health grpc.reflection.v1.ServerReflection linkis.rm.v1.AdminService \
            linkis.rm.v1.ExternalResourceService linkis.rm.v1.LimitService linkis.rm.v1.ResourceManagerService \
            linkis.rm.v1.UsageService",
    ];
    assert_eq!(reflect!(v1, &rm.address, asked), expected);
    assert_eq!(reflect!(v1alpha, &rm.address, asked), expected);
}

/// Each rule has one number, and a document has no gaps.
#[test]
fn every_rule_is_tested_or_named() {
    let source = include_str!("protocol.rs");
    for (document, rules) in [('P', 17), ('C', 6), ('H', 4), ('R', 5)] {
        for rule in 1..=rules {
            let named = OF_THE_LIBRARY.iter().filter(|of| of.starts_with(&format!("{document}{rule} "))).count();
            let tested = source.contains(&format!(" {document}{rule}: "));
            assert_eq!(named + usize::from(tested), 1, "{document}{rule}");
        }
    }
}
