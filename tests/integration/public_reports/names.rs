//! Names of EMs, users and creators that collide or break elsewhere.

use std::collections::BTreeMap;

use linkis_rm::{
    client::ResultResource,
    domain::{
        limit::{LabelPattern, Rule},
        resource::Dimension,
    },
    transport::proto::{self, resource_manager_service_client::ResourceManagerServiceClient},
};
use tonic::Code;

use super::{Case, Wrong, case};
use crate::harness::*;

const APPLICATION: &str = "linkis-cg-engineconnmanager";

const INSTANCES: [Case<&str, Option<Code>>; 14] = [
    case("apache/linkis table dump of 2022", "a qualified host name", "gz.xg.host.example:35932", None),
    case("RFC 6874", "an IPv6 address with a zone", "[fe80::1%eth0]:9102", None),
    case("RFC 6874", "an IPv6 address with an encoded zone", "[fe80::1%25eth0]:9102", None),
    case("Unicode", "names in Chinese", "计算节点:9102", None),
    case("Unicode", "letter case is folded", "A:1", None),
    case("Unicode", "letter case is folded", "a:1", None),
    case("Unicode normalization", "composed and decomposed letters are one", "caf\u{e9}:1", None),
    case("Unicode normalization", "composed and decomposed letters are one", "cafe\u{301}:1", None),
    case("Unicode white space", "a space and a no-break space are one", "host 1:1", None),
    case("Unicode white space", "a space and a no-break space are one", "host\u{a0}1:1", None),
    case("Unicode", "the bound counts bytes", EMOJI_255, None),
    case("apache/linkis table dump of 2022", "a plain host name", "host1:9102", None),
    case("Unicode", "the bound is not enforced", EMOJI_256, Some(Code::InvalidArgument)),
    case("PostgreSQL text", "NUL reaches the database", "host\0:1", Some(Code::InvalidArgument)),
];

/// 256 characters of four bytes each.
const EMOJI_256: &str = concat!(
    "😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀",
    "😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀",
    "😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀",
    "😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀",
);
const EMOJI_255: &str = EMOJI_256.split_at(255 * 4).0;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn em_names_with_odd_letters_stay_distinct() {
    let (database, rm) = start().await;
    let mut manager = ResourceManagerServiceClient::connect(rm.address.clone()).await.unwrap();
    let mut wrong = Wrong::default();
    let resource =
        |cores| Some(proto::Resource { kind: Some(proto::resource::Kind::Cpu(proto::CpuResource { cores })) });
    for case in &INSTANCES {
        let em = Some(proto::EmInstance { application_name: APPLICATION.into(), instance: case.input.into() });
        let register = proto::RegisterRequest { em: em.clone(), total: resource(4), ..Default::default() };
        let registered = manager.register(register).await;
        wrong.compare(case, registered.as_ref().err().map(|status| status.code()));
        if registered.is_ok() {
            let (user, creator) = ("alice".into(), "IDE".into());
            let request =
                proto::RequestResourceRequest { em, user, creator, resource: resource(1), ..Default::default() };
            manager.request_resource(request).await.unwrap();
        }
    }
    let ems = rm.client.ems().await.unwrap();
    let accepted = INSTANCES.iter().filter(|case| case.right.is_none()).count();
    assert_eq!(ems.len(), accepted);
    assert!(ems.iter().all(|em| em.locked.get(&Dimension::Cores) == 1), "{ems:?}");
    assert_invariants(&database, &rm.client).await;
    wrong.none();
}

/// User, creator, and the maximum of instances of the two together.
type Limited = (&'static str, &'static str, i64);

/// Pairs with limits, and the number of grants of three requests for each pair.
const PAIRS: [Case<[Limited; 2], [usize; 2]>; 2] = [
    case(
        "apache/linkis combined labels",
        "joined label values are ambiguous",
        [("a,creator=b", "c", 1), ("a", "b,creator=c", 3)],
        [1, 3],
    ),
    case(
        "apache/linkis combined labels (hadoop-IDE,spark-2.4.3)",
        "joined label values are ambiguous",
        [("svc-etl", "IDE", 2), ("svc", "etl-IDE", 3)],
        [2, 3],
    ),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_on_joined_labels_count_apart() {
    let (database, rm) = start_with_host1().await;
    let mut wrong = Wrong::default();
    for case in &PAIRS {
        for (user, creator, instances) in case.input {
            let labels = BTreeMap::from([
                ("user".to_owned(), Some(user.to_owned())),
                ("creator".to_owned(), Some(creator.to_owned())),
            ]);
            let max = [(Dimension::Instances, instances)].into();
            let rule = Rule { pattern: LabelPattern::new(labels), mode: Default::default(), max };
            rm.client.set_limit(&rule).await.unwrap();
        }
        let mut granted = [0, 0];
        for (granted, (user, creator, _)) in granted.iter_mut().zip(case.input) {
            for _ in 0..3 {
                let mut call = request(&em("host1"), user, load(1, 1, 1));
                call.creator = name(creator);
                let reply = rm.client.request_resource(&call).await.unwrap();
                *granted += usize::from(matches!(reply, ResultResource::Available(_)));
            }
        }
        wrong.compare(case, granted);
    }
    assert_invariants(&database, &rm.client).await;
    wrong.none();
}
