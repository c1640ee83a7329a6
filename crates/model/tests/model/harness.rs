//! Values that several model tests use.

use std::time::Duration;

use rm_model::{
    em::EmInstance,
    name::{Labels, Name},
    operation::{RegisterEm, RequestSpec},
    principal::Principal,
    resource::Resource,
    selector::EmSelector,
    ticket::EngineInstance,
};
use uuid::Uuid;

pub(crate) fn name(text: &str) -> Name {
    Name::parse("name", text).unwrap()
}

pub(crate) fn em(host: &str) -> EmInstance {
    EmInstance::parse("em", "linkis-cg-engineconnmanager", &format!("{host}:9102")).unwrap()
}

pub(crate) fn engine(host: &str) -> EngineInstance {
    EngineInstance::parse("engine", "linkis-cg-engineconn", &format!("{host}:34567")).unwrap()
}

/// The registration of an EM without protected resources and labels.
pub(crate) fn registration(em: EmInstance, total: Resource) -> RegisterEm {
    RegisterEm { protected: total.zero_like(), em, total, labels: Labels::default(), reserved: Labels::default() }
}

/// A request that does not wait.
pub(crate) fn spec(ticket_id: Uuid, user: &str, resource: Resource) -> RequestSpec {
    RequestSpec {
        principal: Principal::Anonymous,
        ticket_id,
        user: name(user),
        creator: name("IDE"),
        engine_type: String::new(),
        resource,
        labels: Labels::default(),
        selector: EmSelector::default(),
        caps: vec![],
        lock_ttl: Duration::from_secs(1_000_000),
        request_id: None,
        return_counters: false,
        priority: 0,
        may_wait: false,
    }
}
