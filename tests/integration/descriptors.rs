//! The descriptors of the API, from which clients in other languages are generated.

use std::collections::BTreeSet;

use prost::Message as _;
use prost_types::{FileDescriptorProto, FileDescriptorSet};
use rm_proto::v1 as proto;

/// The files of the API itself.
fn files(descriptors: &[u8]) -> Vec<FileDescriptorProto> {
    let all = FileDescriptorSet::decode(descriptors).unwrap().file;
    all.into_iter().filter(|file| file.package() == "linkis.rm.v1").collect()
}

#[test]
fn proto_files_set_packages_of_other_languages() {
    let files = files(proto::DESCRIPTORS);
    assert_eq!(files.len(), 7);
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

/// Keywords of C++, C#, Java or Go: generators rename fields with such names.
#[test]
fn proto_fields_avoid_language_keywords() {
    let keywords =
        ["protected", "private", "public", "default", "class", "operator", "namespace", "union", "internal", "event"];
    // A keyword of C++ only, and the name in Linkis's JSON.
    let known = ["namespace"];
    for file in files(proto::DESCRIPTORS) {
        for field in file.message_type.iter().flat_map(|message| &message.field) {
            let name = field.name();
            assert!(!keywords.contains(&name) || known.contains(&name), "{name} in {}", file.name());
        }
    }
}
