//! Tests of reading Linkis's JSON forms, and of the errors for all other input.

use super::*;

fn error(resource_type: ResourceType, json: &str) -> String {
    match Resource::from_json(resource_type, json) {
        Ok(read) => panic!("{json} was read as {read:?}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn older_json_forms_equal_newest() {
    use ResourceType::{DriverAndYarn, Instance, LoadInstance, Special, Yarn};
    let part = r#"{"memory":1,"cores":2,"instances":3}"#;
    let queue = r#"{"queueMemory":4,"queueCores":5,"queueInstances":6,"queueName":"q","applicationId":""}"#;
    let driver_and_yarn = format!(r#"{{"loadInstanceResource":{part},"yarnResource":{queue}}}"#);
    let wrapped = format!(r#"{{"DriverAndYarnResource":{driver_and_yarn}}}"#);
    for (resource_type, old, new) in [
        (Instance, r#"{"instance":3}"#, r#"{"cores":3,"instances":3}"#),
        (Instance, r#"{"instances":3}"#, r#"{"cores":3,"instances":3}"#),
        (Instance, r#"{"cores":3}"#, r#"{"cores":3,"instances":3}"#),
        (LoadInstance, r#"{"memory":1,"cores":2,"instance":3}"#, part),
        (LoadInstance, r#"{"instance":3, "cores":2, "memory":1}"#, part),
        (Yarn, r#"{"applicationId":"a","queueName":"q","queueMemory":4,"queueCores":5,"queueInstances":6}"#, queue),
        (DriverAndYarn, &wrapped, &driver_and_yarn),
        (Special, r#"{"resources":"{\"gpu\":2}"}"#, r#"{"resources":{"gpu":2}}"#),
    ] {
        let read = |json| Resource::from_json(resource_type, json).unwrap_or_else(|error| panic!("{json}: {error}"));
        assert_eq!(read(old), read(new), "{old}");
    }
}

#[test]
fn names_have_defaults() {
    let yarn = r#"{"queueMemory":4,"queueCores":5,"queueInstances":6,"queueName":null}"#;
    let yarn = Resource::from_json(ResourceType::Yarn, yarn).unwrap();
    assert_eq!((yarn.queue_name(), yarn.application_id()), (Some("default"), Some("")));
    let kubernetes = Resource::from_json(ResourceType::Kubernetes, r#"{"memory":1,"cores":1}"#).unwrap();
    assert_eq!(kubernetes.namespace(), Some("default"));
}

#[test]
fn errors_name_the_field() {
    use ResourceType::{Cpu, DriverAndKubernetes, DriverAndYarn, Instance, LoadInstance, Memory, Special, Yarn};
    let nested = |queue: &str| {
        format!(r#"{{"loadInstanceResource":{{"memory":1,"cores":1,"instances":1}},"yarnResource":{queue}}}"#)
    };
    let (missing, twice) = (nested("{}"), nested(r#"{"queueCores":1,"queueCores":1}"#));
    for (resource_type, json, says) in [
        (Memory, "{}", "`memory` is missing"),
        (Memory, r#"{"memory":null}"#, "`memory` is missing"),
        (Memory, r#"{"memory":1.9}"#, "`memory` is a fraction"),
        (Memory, r#"{"memory":1.0}"#, "`memory` is a fraction"),
        (Memory, r#"{"memory":"1"}"#, "`memory` is a string"),
        (Memory, r#"{"memory":-1}"#, "`memory` is -1: it must be a whole number"),
        (Memory, r#"{"memory":9223372036854775808}"#, "`memory` is out of range"),
        (Memory, r#"{"memory":99999999999999999999}"#, "`memory` is out of range"),
        (Memory, r#"{"memory":[[1]]}"#, "`memory` is an array"),
        (Memory, r#"{"memory":1,"memory":1}"#, "`memory` is given twice"),
        (Memory, r#"{"memory":1,"cores":1}"#, "`cores` is unknown here: known are memory"),
        (Memory, "[]", "`(document)` is an array: it must be an object"),
        (Memory, "{", "not valid JSON"),
        (Memory, r#"{"memory":1} x"#, "not valid JSON"),
        (Cpu, r#"{"cores":true}"#, "`cores` is a boolean"),
        (Instance, "{}", "`instances` is missing"),
        (Instance, r#"{"cores":5,"instances":7}"#, "`instances` (7) and `cores` (5)"),
        (LoadInstance, r#"{"memory":1,"cores":1}"#, "`instances` is missing"),
        (Yarn, r#"{"queueMemory":1,"queueCores":1}"#, "`queueInstances` is missing"),
        (Yarn, r#"{"queueMemory":1,"queueCores":1,"queueInstances":1,"queueName":1}"#, "`queueName` is 1"),
        (DriverAndYarn, "{}", "`loadInstanceResource` is missing"),
        (DriverAndYarn, &missing, "`yarnResource.queueMemory` is missing"),
        (DriverAndYarn, &twice, "`yarnResource.queueCores` is given twice"),
        (DriverAndYarn, r#"{"DriverAndYarnResource":{}}"#, "`DriverAndYarnResource.loadInstanceResource` is missing"),
        (DriverAndYarn, r#"{"DriverAndYarnResource":{},"x":1}"#, "`x` is unknown"),
        (DriverAndKubernetes, r#"{"moduleOperate":1}"#, "`loadInstanceResource` is missing"),
        (Special, r#"{"gpu":2}"#, "`gpu` is unknown here: known are resources"),
        (Special, r#"{"resources":{"gpu":1,"gpu":1}}"#, "`resources.gpu` is given twice"),
        (Special, r#"{"resources":{"gpu":1.5}}"#, "`resources.gpu` is a fraction"),
        (Special, r#"{"resources":"[]"}"#, "`resources` is an array"),
        (Special, r#"{"resources":"\"{}\""}"#, "`resources` is a string"),
        (Special, r#"{"resources":{"":1}}"#, "custom dimension's name is empty"),
    ] {
        let message = error(resource_type, json);
        assert!(message.contains(says), "{resource_type} {json}: {message}");
    }
}

#[test]
fn documents_are_bounded() {
    let deep = "[".repeat(DOCUMENT_BYTES_MAX);
    assert!(error(ResourceType::Memory, &deep).contains("not valid JSON"));
    let padded = |bytes| format!("{:bytes$}", r#"{"memory":1}"#);
    assert!(Resource::from_json(ResourceType::Memory, &padded(DOCUMENT_BYTES_MAX)).is_ok());
    assert!(error(ResourceType::Memory, &padded(DOCUMENT_BYTES_MAX + 1)).contains("at most 16384"));
    let unknown = format!(r#"{{"{}":1}}"#, "x\\n".repeat(2000));
    assert!(error(ResourceType::Memory, &unknown).len() < 300, "a message does not repeat a long name");
}

#[test]
fn largest_special_resource_round_trips() {
    let names = (0..64).map(|n| (format!("{n:\"<96}"), i64::MAX)).collect();
    let largest = Resource::special(names).unwrap();
    assert_eq!(Resource::from_json(ResourceType::Special, &largest.to_json()), Ok(largest));
}

#[test]
fn left_resource_json_keeps_signs() {
    let total = Resource::load_instance(10, 4, 3).unwrap();
    let used = Resource::load_instance(7, 9, 3).unwrap();
    let nothing = total.zero_like();
    let left = Resource::left(&total, &nothing, &used, &nothing).unwrap();
    let read = LeftResource::amounts_from_json(ResourceType::LoadInstance, &left.to_json()).unwrap();
    assert_eq!(read, BTreeMap::from([(Dimension::Memory, 3), (Dimension::Cores, -5)]));
    for wrong in ["", "{}", r#"{"memory":1.5,"cores":0,"instances":0}"#] {
        assert!(LeftResource::amounts_from_json(ResourceType::LoadInstance, wrong).is_err(), "{wrong}");
    }
}
