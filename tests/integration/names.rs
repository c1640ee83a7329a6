//! Names: a new name has no invisible character and no white space at an end; an existing one with these stays usable.

use std::collections::BTreeMap;

use rm_client::ClientError;
use rm_model::{
    limit::{LabelPattern, Rule},
    name::Labels,
    policy::Policy,
    resource::{Dimension, Resource, ResourceParts, YarnAmounts},
    selector::Preference,
    ticket::EngineInstance,
};
use rm_proto::v1::{self as proto, external_resource_service_client::ExternalResourceServiceClient};
use tonic::Code;
use tonic_types::StatusExt as _;

use crate::harness::*;

/// Illegal in a new name: white space at an end or alone, a line separator, and a format character.
const ILLEGAL: [&str; 7] = [" ", "a ", "\u{a0}a", "a\u{2028}b", "a\u{200b}b", "\u{202e}a", "a\u{200d}"];

/// Legal in a new name.
const LEGAL: [&str; 4] = ["a b", "می\u{200c}خواهم", "👩\u{200d}👧", "a\u{a0}b"];

fn labels(key: &str, value: &str) -> Labels {
    Labels::parse("labels", BTreeMap::from([(key.to_owned(), value.to_owned())])).unwrap()
}

/// The field that an error names.
#[track_caller]
fn field<T: std::fmt::Debug>(answer: Result<T, ClientError>) -> String {
    let ClientError::Status(status) = answer.unwrap_err() else { panic!("no status") };
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    status.get_details_bad_request().unwrap().field_violations[0].field.clone()
}

fn of_creator(creator: &str) -> Rule {
    let labels = BTreeMap::from([("creator".to_owned(), Some(creator.to_owned()))]);
    Rule {
        pattern: LabelPattern::new(labels),
        mode: Default::default(),
        max: [(Dimension::Instances, 5)].into(),
        guarantee: Default::default(),
    }
}

fn in_queue(queue: &str) -> Resource {
    let queue = YarnAmounts { queue_cores: 1, queue_name: queue.into(), ..YarnAmounts::default() };
    Resource::from_parts(ResourceParts::Yarn(queue)).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn name_with_invisible_character_is_refused_when_new() {
    let (database, rm) = start_with_host1().await;
    let (client, em1) = (&rm.client, em("host1"));
    let grant = client.request_resource(&request(&em1, "hadoop", load(1, 1, 1))).await.granted();
    for bad in ILLEGAL {
        let registered = |change: &dyn Fn(&mut rm_model::operation::RegisterEm)| {
            let mut registration = registration(em("host2"), load(1, 1, 1));
            change(&mut registration);
            client.register(registration)
        };
        assert_eq!(field(registered(&|r| r.em.instance = name(bad)).await), "em.instance", "{bad:?}");
        assert_eq!(field(registered(&|r| r.em.application_name = name(bad)).await), "em.application_name", "{bad:?}");
        assert_eq!(field(registered(&|r| r.labels = labels("zone", bad)).await), r#"labels["zone"]"#, "{bad:?}");
        assert_eq!(field(registered(&|r| r.labels = labels(bad, "a")).await), "labels (a key)", "{bad:?}");
        assert_eq!(field(registered(&|r| r.reserved = labels(bad, "a")).await), "reserved_labels (a key)", "{bad:?}");
        let special = Resource::special(BTreeMap::from([(bad.to_owned(), 1)])).unwrap();
        let registered = client.register(registration(em("host2"), special)).await;
        assert_eq!(field(registered), "total", "{bad:?}");

        let asked = |change: &dyn Fn(&mut rm_client::ResourceRequest)| {
            let mut request = request(&em1, "hadoop", load(1, 1, 1));
            change(&mut request);
            async move { client.request_resource(&request).await }
        };
        assert_eq!(field(asked(&|r| r.user = name(bad)).await), "user", "{bad:?}");
        assert_eq!(field(asked(&|r| r.creator = name(bad)).await), "creator", "{bad:?}");
        assert_eq!(field(asked(&|r| r.engine_type = bad.to_owned()).await), "engine_type", "{bad:?}");
        assert_eq!(field(asked(&|r| r.labels = labels("zone", bad)).await), r#"labels["zone"]"#, "{bad:?}");
        let required = |r: &mut rm_client::ResourceRequest| r.selector.required = labels("zone", bad);
        assert_eq!(field(asked(&required).await), r#"required_labels["zone"]"#, "{bad:?}");
        let preferred = |r: &mut rm_client::ResourceRequest| {
            r.selector.preferred = vec![Preference { key: "zone".into(), value: bad.into(), weight: 1 }];
        };
        assert_eq!(field(asked(&preferred).await), "preferred_labels[0].value", "{bad:?}");
        assert_eq!(field(asked(&|r| r.resource = in_queue(bad)).await), "resource", "{bad:?}");
        let queues = |r: &mut rm_client::ResourceRequest| {
            (r.resource, r.queue_names) = (in_queue("a"), vec![bad.to_owned()]);
        };
        assert_eq!(field(asked(&queues).await), "queue_names[0]", "{bad:?}");

        let adopted = adoption("host1", bad, load(1, 1, 1));
        assert_eq!(field(client.adopt_ticket(&adopted).await), "user", "{bad:?}");
        let engine = EngineInstance { application_name: name("linkis-cg-engineconn"), instance: name(bad) };
        let report = grant.inited(name("hadoop"), engine);
        assert_eq!(field(client.resource_inited(&report).await), "engine.instance", "{bad:?}");
        assert_eq!(field(client.set_limit(&of_creator(bad)).await), r#"limit.labels["creator"]"#, "{bad:?}");
        let special = [(Dimension::parse_key(&format!("special.{bad}")).unwrap(), 1)].into();
        assert_eq!(field(client.set_limit(&Rule { max: special, ..of_creator("a") }).await), "limit.max", "{bad:?}");
        let policy = client.set_policy(&name(bad), &Policy::default()).await;
        assert_eq!(field(policy), "policy.em_application_name", "{bad:?}");
        let mut providers = ExternalResourceServiceClient::connect(rm.address.clone()).await.unwrap();
        let provider = proto::Provider { resource_type: "Yarn".into(), name: bad.into(), ..Default::default() };
        let put = proto::PutProviderRequest { provider: Some(provider), ..Default::default() };
        let put = providers.put_provider(put).await.map_err(|status| ClientError::Status(Box::new(status)));
        assert_eq!(field(put), "provider.name", "{bad:?}");
    }
    for good in LEGAL {
        let asked = client.request_resource(&request(&em1, good, load(1, 1, 1))).await.granted();
        client.resource_released(&release(&asked, good)).await.unwrap();
        client.set_limit(&of_creator(good)).await.unwrap();
    }
    assert_eq!(client.ems().await.unwrap().len(), 1, "no EM has an illegal name");
    assert_eq!(assert_invariants(&database, client).await, 1);
}

/// Renames a user, an EM and a limit as an earlier release accepted them.
const EARLIER: &str = r#"
    UPDATE linkis_em_resource_meta_data SET em_instance = 'host1 ';
    UPDATE linkis_user_resource_meta_data SET "user" = E'had\u200Boop', em_instance = 'host1 ';
    UPDATE linkis_resource_action_record SET em_instance = 'host1 ' WHERE em_instance IS NOT NULL;
    UPDATE linkis_resource_action_record SET "user" = E'had\u200Boop' WHERE "user" IS NOT NULL;
    UPDATE linkis_resource_limit SET name = 'creator=bob ', pattern = '{"creator": "bob "}',
        pattern_hash = sha256('{"creator":"bob "}')"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn existing_name_with_invisible_character_stays_usable() {
    let (database, rm) = start_with_host1().await;
    let mut grants = Vec::new();
    for _ in 0..3 {
        let asked = request(&em("host1"), "hadoop", load(1, 1, 1));
        grants.push(rm.client.request_resource(&asked).await.granted());
    }
    rm.client.set_limit(&of_creator("bob")).await.unwrap();
    rm.stop().await;
    database.execute(EARLIER).await;
    let rm = Instance::start(&database).await;
    let (client, user) = (&rm.client, "had\u{200b}oop");
    let host = client.ems().await.unwrap().remove(0).instance;
    assert_eq!(host.instance.as_str(), "host1 ");
    assert_eq!(client.em(&host).await.unwrap().instance, host);
    assert_eq!(client.tickets(Some(&host)).await.unwrap().len(), 3);
    let of_user = proto::ListActionsRequest { user: user.into(), ..Default::default() };
    assert_eq!(client.actions(&of_user).await.unwrap().actions.len(), 3);
    for grant in &mut grants {
        grant.em = host.clone();
    }
    client.resource_inited(&inited(&grants[0], user, None)).await.unwrap();
    client.resource_reported(&grants[0].reported(name(user), load(1, 1, 1))).await.unwrap();
    client.resource_released(&release(&grants[0], user)).await.unwrap();
    client.force_release(grants[1].ticket_id, "it has ended").await.unwrap();
    client.drain(&host, "it goes").await.unwrap();
    assert_eq!(client.unregister(&host).await.unwrap(), 1);
    let limits = client.limits().await.unwrap();
    assert_eq!(limits.len(), 1);
    client.delete_limit(&limits[0].pattern).await.unwrap();
    assert_eq!(client.limits().await.unwrap(), []);
    assert_eq!(assert_invariants(&database, client).await, 0);
}
