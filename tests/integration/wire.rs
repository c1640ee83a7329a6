//! What programs in other languages are made from: the descriptors of the API.

use std::collections::BTreeSet;

use linkis_rm::transport::proto;
use prost::Message as _;
use prost_types::{FileDescriptorProto, FileDescriptorSet};

/// The files of the API itself.
fn files(descriptors: &[u8]) -> Vec<FileDescriptorProto> {
    let all = FileDescriptorSet::decode(descriptors).unwrap().file;
    all.into_iter().filter(|file| file.package() == "linkis.rm.v1").collect()
}

#[test]
fn every_file_says_where_other_languages_put_it() {
    let files = files(proto::DESCRIPTORS);
    assert_eq!(files.len(), 5);
    let mut outer = BTreeSet::new();
    for file in &files {
        let options = file.options.clone().unwrap_or_default();
        assert_eq!(options.go_package(), "linkis-rm/linkis/rm/v1;rmv1", "{}", file.name());
        assert_eq!(options.java_package(), "linkis.rm.v1", "{}", file.name());
        assert!(options.java_multiple_files(), "{}", file.name());
        assert_eq!(options.csharp_namespace(), "Linkis.Rm.V1", "{}", file.name());
        outer.insert(options.java_outer_classname().to_owned());
    }
    assert!(outer.len() == files.len() && outer.iter().all(|name| name.ends_with("Proto")), "{outer:?}");
}

/// Words that C++, C#, Java or Go keep for themselves: as names of fields they come out otherwise there.
#[test]
fn no_field_is_named_by_a_keyword() {
    let keywords = ["protected", "private", "public", "default", "class", "operator", "namespace", "union", "internal", "event"];
    // C++ alone keeps this one, and Linkis has it in its JSON.
    let known = ["namespace"];
    for file in files(proto::DESCRIPTORS) {
        for field in file.message_type.iter().flat_map(|message| &message.field) {
            let name = field.name();
            assert!(!keywords.contains(&name) || known.contains(&name), "{name} in {}", file.name());
        }
    }
}

/// An amount whose unit differs from that of its namesakes says so in its name.
#[test]
fn thousandths_of_cores_are_not_called_cores() {
    let files = files(proto::DESCRIPTORS);
    let messages = || files.iter().flat_map(|file| &file.message_type);
    let kubernetes = messages().find(|message| message.name() == "KubernetesResource").unwrap();
    let names: Vec<_> = kubernetes.field.iter().map(|field| (field.number(), field.name())).collect();
    assert_eq!(names, [(1, "memory"), (2, "millicores"), (3, "namespace")]);
}
