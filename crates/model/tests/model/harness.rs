//! Values that several model tests use.

use rm_model::{
    em::EmInstance,
    name::{Labels, Name},
    operation::RegisterEm,
    resource::Resource,
    ticket::EngineInstance,
};

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
