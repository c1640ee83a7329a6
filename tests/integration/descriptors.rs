//! The descriptors of the API, from which clients in other languages are generated.

use std::collections::BTreeSet;

use prost::Message as _;
use prost_types::{
    DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet,
    field_descriptor_proto::{Label, Type},
};
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

/// Promises of the released descriptors to generated clients, one line each: the wire format and the names in sources.
fn promises(descriptors: &[u8]) -> BTreeSet<String> {
    let mut promises = BTreeSet::new();
    for file in files(descriptors) {
        let options = file.options.clone().unwrap_or_default();
        promises.insert(format!(
            "file {}: go {} java {} {} {} csharp {}",
            file.name(),
            options.go_package(),
            options.java_package(),
            options.java_multiple_files(),
            options.java_outer_classname(),
            options.csharp_namespace()
        ));
        file.message_type.iter().for_each(|message| of_message("", message, &mut promises));
        file.enum_type.iter().for_each(|of| of_enum("", of, &mut promises));
        for service in &file.service {
            for method in &service.method {
                promises.insert(format!(
                    "method {}.{}: {}{} to {}{}",
                    service.name(),
                    method.name(),
                    if method.client_streaming() { "stream of " } else { "" },
                    method.input_type(),
                    if method.server_streaming() { "stream of " } else { "" },
                    method.output_type()
                ));
            }
        }
    }
    promises
}

fn of_message(within: &str, message: &DescriptorProto, promises: &mut BTreeSet<String>) {
    let name = format!("{within}{}", message.name());
    promises.insert(format!("message {name}"));
    for field in &message.field {
        let oneof = field.oneof_index.and_then(|index| message.oneof_decl.get(usize::try_from(index).ok()?));
        promises.insert(format!(
            "field {name}.{} = {}: {:?} {:?} {} json {} in {:?}",
            field.name(),
            field.number(),
            field.label(),
            field.r#type(),
            field.type_name(),
            field.json_name(),
            oneof.map(|oneof| oneof.name())
        ));
    }
    let within = format!("{name}.");
    message.nested_type.iter().for_each(|nested| of_message(&within, nested, promises));
    message.enum_type.iter().for_each(|nested| of_enum(&within, nested, promises));
}

fn of_enum(within: &str, of: &EnumDescriptorProto, promises: &mut BTreeSet<String>) {
    for value in &of.value {
        promises.insert(format!("enum {within}{} {} = {}", of.name(), value.name(), value.number()));
    }
}

/// The descriptors of the last release, without comments.
const RELEASED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../proto/released.binpb");

/// Additions are allowed; nothing that a client may rely on is removed or changed. The variable `RELEASE_WIRE` stores the current
/// descriptors as released.
#[test]
fn descriptors_keep_released_promises() {
    if std::env::var_os("RELEASE_WIRE").is_some() {
        let mut now = FileDescriptorSet::decode(proto::DESCRIPTORS).unwrap();
        now.file.iter_mut().for_each(|file| file.source_code_info = None);
        std::fs::write(RELEASED, now.encode_to_vec()).unwrap();
    }
    let released = std::fs::read(RELEASED).unwrap();
    let (released, now) = (promises(&released), promises(proto::DESCRIPTORS));
    assert!(released.len() > 400, "{}", released.len());
    let broken: Vec<_> = released.difference(&now).collect();
    assert!(broken.is_empty(), "clients that are out there would break: {broken:#?}");
}

/// The differences that the test above reports for changed descriptors.
#[test]
fn descriptors_check_finds_each_change() {
    let released = promises(proto::DESCRIPTORS);
    let changed = |change: &dyn Fn(&mut FileDescriptorProto)| {
        let mut set = FileDescriptorSet::decode(proto::DESCRIPTORS).unwrap();
        set.file.iter_mut().filter(|file| file.package() == "linkis.rm.v1").for_each(change);
        let now = promises(&set.encode_to_vec());
        released.difference(&now).cloned().collect::<Vec<_>>()
    };
    let field = |change: fn(&mut FieldDescriptorProto)| {
        changed(&|file| {
            let messages = file.message_type.iter_mut().filter(|message| message.name() == "RegisterRequest");
            messages.flat_map(|message| &mut message.field).filter(|field| field.name() == "total").for_each(change);
        })
    };
    assert_eq!(changed(&|_| {}), [""; 0]);
    assert_eq!(field(|total| total.number = Some(9)).len(), 1, "another number");
    assert_eq!(field(|total| total.name = Some("all".to_owned())).len(), 1, "another name");
    assert_eq!(field(|total| total.set_type(Type::String)).len(), 1, "another type");
    assert_eq!(field(|total| total.set_label(Label::Repeated)).len(), 1, "many instead of one");
    let gone =
        changed(&|file| file.service.iter_mut().for_each(|service| service.method.retain(|m| m.name() != "Audit")));
    assert_eq!(gone, ["method AdminService.Audit: .linkis.rm.v1.AuditRequest to .linkis.rm.v1.AuditResponse"]);
    let gone = changed(&|file| file.enum_type.iter_mut().for_each(|of| of.value.retain(|v| v.name() != "HEALTH_WARN")));
    assert_eq!(gone, ["enum Health HEALTH_WARN = 2"]);
    let more = changed(&|file| file.message_type.push(DescriptorProto::default()));
    assert_eq!(more, [""; 0], "adding is free");
}
