//! Conformance with Apache Linkis: results of its resource classes, recorded from runs, compared with the results of this crate.
//!
//! Each vector is (operation, result of Linkis, comparison): `Same`, or `Differs(own result, reason)`. A vector with
//! `Differs` must differ. A resource is written as Linkis's class name and JSON, an error as its kind and place.
//! Linkis's display texts (its `toJson` and `toString`) are prose, not a format, and have no counterpart here.

use std::collections::BTreeMap;

use rm_model::resource::{
    KubernetesAmounts, LoadInstanceAmounts, Resource, ResourceError, ResourceParts, ResourceType, YarnAmounts,
    format_size, parse_size, whole_gb,
};

enum Ours {
    Same,
    Differs(&'static str, &'static str),
}
use Ours::{Differs, Same};

const WRAPS: &str = "Linkis takes what has no such view as infinite and wraps around";
const UNVIEWED: &str = "an incomparable pair is an error";
const MISSING: &str = "a missing field is an error, not infinite";
const QUEUES: &str = "amounts of two queues or namespaces don't mix";
const NOT_OFFERED: &str = "not offered";

fn check(what: &str, linkis: &str, ours: &Ours, answer: &str) {
    match ours {
        Same => assert_eq!(answer, linkis, "{what}"),
        Differs(expected, because) => {
            assert_eq!(answer, *expected, "{what}, which differs: {because}");
            assert_ne!(linkis, *expected, "{what} does not differ");
        }
    }
}

/// A result as the tables write it.
trait Show {
    fn show(self) -> String;
}

impl Show for Resource {
    fn show(self) -> String {
        format!("{}Resource {}", self.resource_type(), self.to_json())
    }
}

impl Show for bool {
    fn show(self) -> String {
        self.to_string()
    }
}

impl Show for i64 {
    fn show(self) -> String {
        self.to_string()
    }
}

impl Show for &'static str {
    fn show(self) -> String {
        self.to_owned()
    }
}

impl<T: Show> Show for Result<T, ResourceError> {
    fn show(self) -> String {
        use ResourceError::*;
        match self {
            Ok(answer) => answer.show(),
            Err(BelowZero { dimension, from, taken }) => format!("below zero: {dimension} {from} - {taken}"),
            Err(Overflow { dimension }) => format!("overflow: {dimension}"),
            Err(InvalidDivisor { divisor }) => format!("divisor: {divisor}"),
            Err(DifferentQueue { left, right }) => format!("different queue: {left}, {right}"),
            Err(Unanswerable { from, onto }) => format!("unanswerable: {from} as {onto}"),
            Err(MissingField { field }) => format!("missing: {field}"),
            Err(UnknownField { field, .. }) => format!("unknown: {field}"),
            Err(InvalidField { field, found, .. }) => format!("invalid: {field} is {found}"),
            Err(Disagreement { field, other, .. }) => format!("disagree: {field}, {other}"),
            Err(InvalidSize { text }) => format!("no size: {text}"),
            Err(UnknownType { name }) => format!("unknown type: {name}"),
            Err(other) => format!("error: {other}"),
        }
    }
}

const G: i64 = 1 << 30;

fn mem(memory: i64) -> Resource {
    Resource::memory(memory).unwrap()
}

fn cpu(cores: i64) -> Resource {
    Resource::cpu(cores).unwrap()
}

fn inst(instances: i64) -> Resource {
    Resource::instance(instances).unwrap()
}

fn load() -> Resource {
    Resource::load(4 * G, 4).unwrap()
}

fn li(memory: i64, cores: i64, instances: i64) -> Resource {
    Resource::load_instance(memory, cores, instances).unwrap()
}

const LI: LoadInstanceAmounts = LoadInstanceAmounts { memory: 4 * G, cores: 4, instances: 3 };
const NO_DRIVER: LoadInstanceAmounts = LoadInstanceAmounts { memory: 0, cores: 0, instances: 0 };

fn lis() -> Resource {
    Resource::from_parts(ResourceParts::LoadInstance(LI)).unwrap()
}

fn yarn(memory: i64, cores: i64, instances: i64, queue: &str, application: &str) -> YarnAmounts {
    YarnAmounts {
        queue_memory: memory,
        queue_cores: cores,
        queue_instances: instances,
        queue_name: queue.into(),
        application_id: application.into(),
    }
}

fn y_of(queue: &str, application: &str) -> Resource {
    Resource::from_parts(ResourceParts::Yarn(yarn(8 * G, 8, 2, queue, application))).unwrap()
}

fn y() -> Resource {
    y_of("q1", "application_1")
}

fn y2() -> Resource {
    Resource::from_parts(ResourceParts::Yarn(yarn(2 * G, 2, 5, "q2", ""))).unwrap()
}

fn dy() -> Resource {
    Resource::from_parts(ResourceParts::DriverAndYarn(LI, yarn(8 * G, 8, 2, "q1", "application_1"))).unwrap()
}

/// (LI(1G,1,1), Yarn(0,0,0,"q"))
fn dy_without_yarn() -> Resource {
    let driver = LoadInstanceAmounts { memory: G, cores: 1, instances: 1 };
    Resource::from_parts(ResourceParts::DriverAndYarn(driver, yarn(0, 0, 0, "q", ""))).unwrap()
}

fn kubernetes(memory: i64, millicores: i64, namespace: &str) -> KubernetesAmounts {
    KubernetesAmounts { memory, millicores, namespace: namespace.into() }
}

fn k() -> Resource {
    Resource::from_parts(ResourceParts::Kubernetes(kubernetes(4 * G, 2000, "ns1"))).unwrap()
}

/// In the namespace "default".
fn k2() -> Resource {
    Resource::from_parts(ResourceParts::Kubernetes(kubernetes(G, 500, ""))).unwrap()
}

fn dk() -> Resource {
    Resource::from_parts(ResourceParts::DriverAndKubernetes(LI, kubernetes(4 * G, 2000, "ns1"))).unwrap()
}

/// Request of Spark on Kubernetes in cluster mode, without amounts for the driver.
fn dk_cluster() -> Resource {
    Resource::from_parts(ResourceParts::DriverAndKubernetes(NO_DRIVER, kubernetes(G, 1000, "ns"))).unwrap()
}

fn special(amounts: &[(&str, i64)]) -> Resource {
    let amounts: BTreeMap<_, _> = amounts.iter().map(|(name, amount)| ((*name).to_owned(), *amount)).collect();
    Resource::special(amounts).unwrap()
}

fn sp() -> Resource {
    special(&[("gpu", 2), ("disk", 100)])
}

fn spb() -> Resource {
    special(&[("gpu", 1)])
}

fn init(resource_type: &str) -> Result<Resource, ResourceError> {
    resource_type.parse().map(Resource::zero)
}

macro_rules! vectors {
    ($($what:literal: $linkis:literal => $ours:expr, $answer:expr;)*) => {
        $(check($what, $linkis, &$ours, &$answer.show());)*
    };
}

#[test]
fn json_is_written_alike() {
    vectors! {
        "MemoryResource": r#"MemoryResource {"memory":4294967296}"# => Same, mem(4 * G);
        "CPUResource": r#"CPUResource {"cores":4}"# => Same, cpu(4);
        "InstanceResource": r#"InstanceResource {"cores":3,"instances":3}"# => Same, inst(3);
        "LoadResource": r#"LoadResource {"memory":4294967296,"cores":4}"# => Same, load();
        "LoadInstanceResource": r#"LoadInstanceResource {"memory":4294967296,"cores":4,"instances":3,"instance":3}"#
            => Same, lis();
        "YarnResource": r#"YarnResource {"queueMemory":8589934592,"queueCores":8,"queueInstances":2,"queueName":"q1","applicationId":"application_1"}"#
            => Same, y();
        "DriverAndYarnResource": r#"DriverAndYarnResource {"loadInstanceResource":{"memory":4294967296,"cores":4,"instances":3,"instance":3},"yarnResource":{"queueMemory":8589934592,"queueCores":8,"queueInstances":2,"queueName":"q1","applicationId":"application_1"}}"#
            => Same, dy();
        "KubernetesResource": r#"KubernetesResource {"memory":4294967296,"cores":2000,"namespace":"ns1"}"# => Same, k();
        "DriverAndKubernetesResource": r#"DriverAndKubernetesResource {"loadInstanceResource":{"memory":4294967296,"cores":4,"instances":3,"instance":3},"kubernetesResource":{"memory":4294967296,"cores":2000,"namespace":"ns1"},"moduleOperate":true}"#
            => Same, dk();
        "SpecialResource": r#"SpecialResource {"resources":{"gpu":2,"disk":100}}"#
            => Differs(r#"SpecialResource {"resources":{"disk":100,"gpu":2}}"#, "names are sorted"), sp();
    }
}

#[test]
fn json_is_read_strictly() {
    use ResourceType::{Cpu, DriverAndYarn, Instance, Load, LoadInstance, Memory, Special, Yarn};
    let read = Resource::from_json;
    let wrapper = r#"{"DriverAndYarnResource":{"loadInstanceResource":{"memory":1,"cores":2,"instances":3},"yarnResource":{"queueMemory":4,"queueCores":5,"queueInstances":6,"queueName":"q","applicationId":""}}}"#;
    vectors! {
        "Memory {}": r#"MemoryResource {"memory":9223372036854775807}"#
            => Differs("missing: memory", MISSING), read(Memory, "{}");
        "LoadInstance {}": r#"LoadInstanceResource {"memory":9223372036854775807,"cores":2147483647,"instances":2147483647,"instance":2147483647}"#
            => Differs("missing: memory", MISSING), read(LoadInstance, "{}");
        "LoadInstance of 1.0 to 1.3": r#"LoadInstanceResource {"memory":1,"cores":2,"instances":2147483647,"instance":2147483647}"#
            => Differs(r#"LoadInstanceResource {"memory":1,"cores":2,"instances":3,"instance":3}"#, "the older form means what it said"),
            read(LoadInstance, r#"{"memory":1,"cores":2,"instance":3}"#);
        "LoadInstance with instances": r#"LoadInstanceResource {"memory":1,"cores":2,"instances":3,"instance":3}"#
            => Same, read(LoadInstance, r#"{"memory":1,"cores":2,"instances":3}"#);
        "LoadInstance with both, differing": r#"LoadInstanceResource {"memory":1,"cores":2,"instances":3,"instance":3}"#
            => Differs("disagree: instances, instance", "one of the two is wrong"),
            read(LoadInstance, r#"{"memory":1,"cores":2,"instances":3,"instance":9}"#);
        "Yarn without instances": r#"YarnResource {"queueMemory":1,"queueCores":2,"queueInstances":2147483647,"queueName":"default","applicationId":""}"#
            => Differs("missing: queueInstances", MISSING), read(Yarn, r#"{"queueMemory":1,"queueCores":2}"#);
        "Yarn with a null queue": r#"YarnResource {"queueMemory":1,"queueCores":2147483647,"queueInstances":2147483647,"queueName":null,"applicationId":""}"#
            => Differs("missing: queueCores", MISSING), read(Yarn, r#"{"queueName":null,"queueMemory":1}"#);
        "DriverAndYarn {}": r#"DriverAndYarnResource {"loadInstanceResource":{"memory":9223372036854775807,"cores":2147483647,"instances":2147483647,"instance":2147483647},"yarnResource":{"queueMemory":9223372036854775807,"queueCores":2147483647,"queueInstances":2147483647,"queueName":"default","applicationId":""}}"#
            => Differs("missing: loadInstanceResource", MISSING), read(DriverAndYarn, "{}");
        "DriverAndYarn with null parts": r#"DriverAndYarnResource {"loadInstanceResource":null,"yarnResource":null}"#
            => Differs("missing: loadInstanceResource", MISSING),
            read(DriverAndYarn, r#"{"loadInstanceResource":null,"yarnResource":null}"#);
        "Special": "DESER-FAIL InvalidDefinitionException"
            => Differs(r#"SpecialResource {"resources":{"gpu":2}}"#, "written text can be read"),
            read(Special, r#"{"resources":{"gpu":2}}"#);
        "Special without resources": "DESER-FAIL InvalidDefinitionException"
            => Differs("unknown: gpu", "a typed error, as Linkis fails too"), read(Special, r#"{"gpu":2}"#);
        "Instance with cores": r#"InstanceResource {"cores":5,"instances":2147483647}"#
            => Differs(r#"InstanceResource {"cores":5,"instances":5}"#, "they are one amount, and older versions wrote cores"),
            read(Instance, r#"{"cores":5}"#);
        "Instance with instances": r#"InstanceResource {"cores":2147483647,"instances":5}"#
            => Differs(r#"InstanceResource {"cores":5,"instances":5}"#, "they are one amount"),
            read(Instance, r#"{"instances":5}"#);
        "Instance with both, differing": r#"InstanceResource {"cores":5,"instances":7}"#
            => Differs("disagree: instances, cores", "they are one amount"), read(Instance, r#"{"cores":5,"instances":7}"#);
        "Load with a fraction and a string": r#"LoadResource {"memory":1,"cores":3}"#
            => Differs("invalid: memory is a fraction or in exponent form", "amounts are whole numbers"),
            read(Load, r#"{"memory":1.9,"cores":"3"}"#);
        "Memory out of range": "DESER-FAIL JsonMappingException: Numeric value (99999999999999999999) out of range of long (-9223372036854775808 - 9223372036854775807)"
            => Differs("invalid: memory is out of range", "the error names the field"),
            read(Memory, r#"{"memory":99999999999999999999}"#);
        "CPU out of range": "DESER-FAIL JsonMappingException: Numeric value (3000000000) out of range of int (-2147483648 - 2147483647)"
            => Differs(r#"CPUResource {"cores":3000000000}"#, "all amounts have 63 bits"), read(Cpu, r#"{"cores":3000000000}"#);
        "DriverAndYarn of 1.0 to 1.3": r#"DriverAndYarnResource {"loadInstanceResource":{"memory":9223372036854775807,"cores":2147483647,"instances":2147483647,"instance":2147483647},"yarnResource":{"queueMemory":9223372036854775807,"queueCores":2147483647,"queueInstances":2147483647,"queueName":"default","applicationId":""}}"#
            => Differs(r#"DriverAndYarnResource {"loadInstanceResource":{"memory":1,"cores":2,"instances":3,"instance":3},"yarnResource":{"queueMemory":4,"queueCores":5,"queueInstances":6,"queueName":"q","applicationId":""}}"#, "the older form means what it said"),
            read(DriverAndYarn, wrapper);
    }
}

#[test]
fn memory_cpu_and_instance_operators_match_linkis() {
    vectors! {
        "mem+mem": r#"MemoryResource {"memory":4294967297}"# => Same, mem(4 * G).add(&mem(1));
        "mem-big": r#"MemoryResource {"memory":-5368709120}"#
            => Differs("below zero: memory 4294967296 - 9663676416", "no amount is negative"), mem(4 * G).minus(&mem(9 * G));
        "mem+cpu(mismatch)": r#"MemoryResource {"memory":-9223372032559808513}"#
            => Differs("unanswerable: CPU as Memory", WRAPS), mem(4 * G).add(&cpu(4));
        "mem-cpu(mismatch)": r#"MemoryResource {"memory":-9223372032559808511}"#
            => Differs("unanswerable: CPU as Memory", WRAPS), mem(4 * G).minus(&cpu(4));
        "mem.moreThan(cpu)": "false" => Differs("unanswerable: CPU as Memory", UNVIEWED), mem(4 * G).more_than(&cpu(4));
        "mem.notLess(cpu)": "false" => Differs("unanswerable: CPU as Memory", UNVIEWED), mem(4 * G).not_less_than(&cpu(4));
        "mem/0": "THROWS ArithmeticException: / by zero" => Differs("divisor: 0", "a typed error"), mem(4 * G).divide_by(0);
        "mem*0.5f": r#"MemoryResource {"memory":2147483648}"# => Same, mem(4 * G).multiply_by(0.5);
        "mem(Long.MAX)+1": r#"MemoryResource {"memory":-9223372036854775808}"#
            => Differs("overflow: memory", "nothing wraps"), mem(i64::MAX).add(&mem(1));
        "inst+inst": r#"CPUResource {"cores":6}"#
            => Differs(r#"InstanceResource {"cores":6,"instances":6}"#, "a sum keeps its type"), inst(3).add(&inst(3));
        "inst-inst": r#"CPUResource {"cores":-2}"#
            => Differs("below zero: instances 3 - 5", "no amount is negative"), inst(3).minus(&inst(5));
        "cpu+inst": r#"CPUResource {"cores":7}"#
            => Differs("unanswerable: Instance as CPU", "instances are not cores"), cpu(4).add(&inst(3));
        "inst.notLess(cpu4)": "false"
            => Differs("unanswerable: CPU as Instance", "instances are not cores"), inst(3).not_less_than(&cpu(4));
        "zero(inst)": r#"InstanceResource {"cores":0,"instances":0}"# => Same, inst(3).zero_like();
        "overflow int cores": r#"CPUResource {"cores":-2147483648}"#
            => Differs(r#"CPUResource {"cores":2147483648}"#, "all amounts have 63 bits"),
            cpu(i64::from(i32::MAX)).add(&cpu(1));
    }
}

#[test]
fn load_and_load_instance_operators_match_linkis() {
    let (a, b) = (li(2 * G, 1, 1), li(G, 2, 1));
    let (some, zero) = (li(G, 0, 1), li(0, 0, 0));
    vectors! {
        "load+mem": r#"LoadResource {"memory":8589934592,"cores":4}"# => Same, load().add(&mem(4 * G));
        "load+cpu": r#"LoadResource {"memory":4294967296,"cores":8}"# => Same, load().add(&cpu(4));
        "load+li(mismatch)": r#"LoadResource {"memory":-9223372032559808513,"cores":-2147483645}"#
            => Differs("unanswerable: LoadInstance as Load", WRAPS), load().add(&lis());
        "load.notLess(li)": "false"
            => Differs("unanswerable: LoadInstance as Load", UNVIEWED), load().not_less_than(&lis());
        "load*0.3f": r#"LoadResource {"memory":1288490240,"cores":1}"# => Same, load().multiply_by(0.3);
        "li*0.3f": r#"LoadInstanceResource {"memory":1288490240,"cores":1,"instances":0,"instance":0}"#
            => Same, lis().multiply_by(0.3);
        "li/2": r#"LoadInstanceResource {"memory":2147483648,"cores":2,"instances":1,"instance":1}"#
            => Same, lis().divide_by(2);
        "li+dy": r#"LoadInstanceResource {"memory":8589934592,"cores":8,"instances":6,"instance":6}"#
            => Same, lis().add(&dy());
        "li-dy": r#"LoadInstanceResource {"memory":0,"cores":0,"instances":0,"instance":0}"# => Same, lis().minus(&dy());
        "li+dk": r#"LoadInstanceResource {"memory":8589934592,"cores":8,"instances":6,"instance":6}"#
            => Same, lis().add(&dk());
        "li+y(mismatch)": r#"LoadInstanceResource {"memory":-9223372032559808513,"cores":-2147483645,"instances":-2147483646,"instance":-2147483646}"#
            => Differs("unanswerable: Yarn as LoadInstance", WRAPS), lis().add(&y());
        "li.notLess(dy)": "true" => Same, lis().not_less_than(&dy());
        "li>zero with cores=0": "false" => Same, some.more_than(&zero);
        // More in some dimension, so zero does not cover it.
        "li caseMore zero with cores=0": "true" => Same, zero.covers(&some).map(|covered| !covered);
        "incomparable a.moreThan(b)": "false" => Same, a.more_than(&b);
        "incomparable a.less(b)": "true" => Differs("false", "less is not the negation of not-less"), a.less_than(&b);
        "incomparable b.less(a)": "true" => Differs("false", "less is not the negation of not-less"), b.less_than(&a);
        "compare lexicographic": "1"
            => Differs(NOT_OFFERED, "a total order next to the partial one invites mistakes"), NOT_OFFERED;
    }
}

#[test]
fn yarn_operators_match_linkis() {
    let null_queue = Resource::from_json(
        ResourceType::Yarn,
        r#"{"queueMemory":8589934592,"queueCores":8,"queueInstances":2,"queueName":null}"#,
    )
    .unwrap();
    vectors! {
        "y+y2": r#"YarnResource {"queueMemory":10737418240,"queueCores":10,"queueInstances":7,"queueName":"q2","applicationId":""}"#
            => Differs("different queue: q1, q2", QUEUES), y().add(&y2());
        "y2+y": r#"YarnResource {"queueMemory":10737418240,"queueCores":10,"queueInstances":7,"queueName":"q1","applicationId":""}"#
            => Differs("different queue: q2, q1", QUEUES), y2().add(&y());
        "y-y2": r#"YarnResource {"queueMemory":6442450944,"queueCores":6,"queueInstances":-3,"queueName":"q2","applicationId":""}"#
            => Differs("different queue: q1, q2", QUEUES), y().minus(&y2());
        "y*0.5f": r#"YarnResource {"queueMemory":4294967296,"queueCores":4,"queueInstances":1,"queueName":"q1","applicationId":""}"#
            => Same, y().multiply_by(0.5);
        "y.notLess(y2) (instances 2<5)": "true" => Differs("different queue: q1, q2", QUEUES), y().not_less_than(&y2());
        "y.moreThan(y2)": "true" => Differs("different queue: q1, q2", QUEUES), y().more_than(&y2());
        "y.equalsTo diff queue": "false"
            => Differs("different queue: q1, q2", QUEUES), y().equals(&y_of("q2", "application_1"));
        "y.equalsTo diff appId": "true" => Same, y().equals(&y_of("q1", "application_2"));
        "y+li(mismatch)": r#"YarnResource {"queueMemory":-9223372028264841217,"queueCores":-2147483641,"queueInstances":-2147483647,"queueName":"default","applicationId":""}"#
            => Differs("unanswerable: LoadInstance as Yarn", WRAPS), y().add(&lis());
        "y.equalsTo null queue": r#"THROWS NullPointerException: Cannot invoke "String.equals(Object)" because "this.queueName" is null"#
            => Differs("different queue: default, q1", "a null queue is the default one"), null_queue.equals(&y());
    }
    // The instances of a queue count, also in an equal queue.
    let more_instances = Resource::from_parts(ResourceParts::Yarn(yarn(2 * G, 2, 5, "q1", ""))).unwrap();
    assert_eq!(y().not_less_than(&more_instances), Ok(false));
    assert_eq!(y().more_than(&more_instances), Ok(false));
}

#[test]
fn driver_and_yarn_operators_match_linkis() {
    vectors! {
        "dy+dy": r#"DriverAndYarnResource {"loadInstanceResource":{"memory":8589934592,"cores":8,"instances":6,"instance":6},"yarnResource":{"queueMemory":17179869184,"queueCores":16,"queueInstances":4,"queueName":"q1","applicationId":""}}"#
            => Same, dy().add(&dy());
        "dy+y": r#"DriverAndYarnResource {"loadInstanceResource":{"memory":4294967296,"cores":4,"instances":3,"instance":3},"yarnResource":{"queueMemory":17179869184,"queueCores":16,"queueInstances":4,"queueName":"q1","applicationId":""}}"#
            => Same, dy().add(&y());
        "dy+li": r#"DriverAndYarnResource {"loadInstanceResource":{"memory":8589934592,"cores":8,"instances":6,"instance":6},"yarnResource":{"queueMemory":8589934592,"queueCores":8,"queueInstances":2,"queueName":"default","applicationId":""}}"#
            => Differs(r#"DriverAndYarnResource {"loadInstanceResource":{"memory":8589934592,"cores":8,"instances":6,"instance":6},"yarnResource":{"queueMemory":8589934592,"queueCores":8,"queueInstances":2,"queueName":"q1","applicationId":""}}"#, "a part without queue amounts does not rename the queue"),
            dy().add(&lis());
        "dy-load": r#"DriverAndYarnResource {"loadInstanceResource":{"memory":0,"cores":0,"instances":3,"instance":3},"yarnResource":{"queueMemory":8589934592,"queueCores":8,"queueInstances":2,"queueName":"default","applicationId":""}}"#
            => Differs(r#"DriverAndYarnResource {"loadInstanceResource":{"memory":0,"cores":0,"instances":3,"instance":3},"yarnResource":{"queueMemory":8589934592,"queueCores":8,"queueInstances":2,"queueName":"q1","applicationId":""}}"#, "a part without queue amounts does not rename the queue"),
            dy().minus(&load());
        "dy*dy": "THROWS ResourceWarnException: errCode: 11002 ,desc: Unsupported operation: multiplied(不支持的操作：multiplied)"
            => Differs("overflow: memory", "works by dimension, and this product is too large"), dy().multiply(&dy());
        "dy/dy": "THROWS ResourceWarnException: errCode: 11002 ,desc: Unsupported operation: multiplied(不支持的操作：multiplied)"
            => Differs(r#"DriverAndYarnResource {"loadInstanceResource":{"memory":1,"cores":1,"instances":1,"instance":1},"yarnResource":{"queueMemory":1,"queueCores":1,"queueInstances":1,"queueName":"q1","applicationId":""}}"#, "works by dimension"),
            dy().divide(&dy());
        "dy*0.5f": r#"DriverAndYarnResource {"loadInstanceResource":{"memory":2147483648,"cores":2,"instances":1,"instance":1},"yarnResource":{"queueMemory":4294967296,"queueCores":4,"queueInstances":1,"queueName":"q1","applicationId":""}}"#
            => Same, dy().multiply_by(0.5);
        "dy/2": r#"DriverAndYarnResource {"loadInstanceResource":{"memory":2147483648,"cores":2,"instances":1,"instance":1},"yarnResource":{"queueMemory":4294967296,"queueCores":4,"queueInstances":1,"queueName":"q1","applicationId":""}}"#
            => Same, dy().divide_by(2);
        "dy.notLess(dy)": "true" => Same, dy().not_less_than(&dy());
        "dy yarn cores 0 moreThan zero": "false" => Same, dy_without_yarn().more_than(&dy_without_yarn().zero_like());
        "zero(dy)": r#"DriverAndYarnResource {"loadInstanceResource":{"memory":0,"cores":0,"instances":0,"instance":0},"yarnResource":{"queueMemory":0,"queueCores":0,"queueInstances":0,"queueName":"q1","applicationId":""}}"#
            => Same, dy().zero_like();
        "dy+k(mismatch)": r#"DriverAndYarnResource {"loadInstanceResource":{"memory":-9223372032559808513,"cores":-2147483645,"instances":-2147483646,"instance":-2147483646},"yarnResource":{"queueMemory":-9223372028264841217,"queueCores":-2147483641,"queueInstances":-2147483647,"queueName":"default","applicationId":""}}"#
            => Differs("unanswerable: Kubernetes as DriverAndYarn", WRAPS), dy().add(&k());
    }
}

#[test]
fn kubernetes_operators_match_linkis() {
    let halved = r#"DriverAndKubernetesResource {"loadInstanceResource":{"memory":2147483648,"cores":2,"instances":1,"instance":1},"kubernetesResource":{"memory":2147483648,"cores":1000,"namespace":"ns1"},"moduleOperate":true}"#;
    let init = Resource::zero(ResourceType::DriverAndKubernetes);
    vectors! {
        "k+k": r#"KubernetesResource {"memory":5368709120,"cores":2500,"namespace":"ns1"}"#
            => Differs("different queue: ns1, default", QUEUES), k().add(&k2());
        "k.notLess ns differs": "false" => Differs("different queue: ns1, default", QUEUES), k().not_less_than(&k2());
        "k.moreThan ns differs": "true" => Differs("different queue: ns1, default", QUEUES), k().more_than(&k2());
        "k.equalsTo ns differs": "true" => Differs("different queue: ns1, default", QUEUES), k().equals(&k2());
        "k*0.3f": r#"KubernetesResource {"memory":1288490240,"cores":600,"namespace":"ns1"}"# => Same, k().multiply_by(0.3);
        "zero(k)": "THROWS ResourceWarnException: errCode: 11003 ,desc: Not supported resource type:class org.apache.linkis.manager.common.entity.resource.KubernetesResource(不支持的资源类型)"
            => Differs(r#"KubernetesResource {"memory":0,"cores":0,"namespace":"ns1"}"#, "every type has a zero"), k().zero_like();
        "dk*0.5f": r#"DriverAndKubernetesResource {"loadInstanceResource":{"memory":2147483648,"cores":2,"instances":1,"instance":1},"kubernetesResource":{"memory":4294967296,"cores":2000,"namespace":"ns1"},"moduleOperate":true}"#
            => Differs(halved, "both parts are scaled"), dk().multiply_by(0.5);
        "dk/2": r#"DriverAndKubernetesResource {"loadInstanceResource":{"memory":2147483648,"cores":2,"instances":1,"instance":1},"kubernetesResource":{"memory":4294967296,"cores":2000,"namespace":"ns1"},"moduleOperate":true}"#
            => Differs(halved, "both parts are divided"), dk().divide_by(2);
        "dk+dk": r#"DriverAndKubernetesResource {"loadInstanceResource":{"memory":8589934592,"cores":8,"instances":6,"instance":6},"kubernetesResource":{"memory":8589934592,"cores":4000,"namespace":"ns1"},"moduleOperate":true}"#
            => Same, dk().add(&dk());
        "dk.moreThan(init)": "false" => Same, dk_cluster().more_than(&init);
        "dk.notLess(init) ns mismatch": "false"
            => Differs("true", "the namespace of nothing doesn't matter"), dk_cluster().not_less_than(&init);
    }
}

#[test]
fn special_operators_match_linkis() {
    let empty = special(&[]);
    let missing_is_zero = "a missing name is zero";
    let one_kind = "there is one kind of amount";
    vectors! {
        "sp+spb(missing key rhs)": r#"THROWS NullPointerException: Cannot invoke "java.lang.Long.longValue()" because "<parameter3>" is null"#
            => Differs(r#"SpecialResource {"resources":{"disk":100,"gpu":3}}"#, missing_is_zero), sp().add(&spb());
        "spb+sp(extra key rhs)": r#"SpecialResource {"resources":{"gpu":3}}"#
            => Differs(r#"SpecialResource {"resources":{"disk":100,"gpu":3}}"#, "nothing is dropped"), spb().add(&sp());
        "spb-sp": r#"SpecialResource {"resources":{"gpu":-1}}"#
            => Differs("below zero: gpu 1 - 2", "no amount is negative"), spb().minus(&sp());
        "sp+mem": r#"SpecialResource {"resources":{}}"#
            => Differs("unanswerable: Memory as Special", "nothing is dropped"), sp().add(&mem(4 * G));
        "sp.moreThan(mem)": "true" => Differs("unanswerable: Memory as Special", UNVIEWED), sp().more_than(&mem(4 * G));
        "sp.notLess(spb)": "THROWS ResourceWarnException: errCode: 11003 ,desc: Not supported resource type:class java.lang.Long(不支持的资源类型)"
            => Differs("true", missing_is_zero), sp().not_less_than(&spb());
        "spb.notLess(sp)": "false" => Same, spb().not_less_than(&sp());
        "empty.notLess(sp)": "true" => Differs("false", missing_is_zero), empty.not_less_than(&sp());
        "empty.moreThan(empty)": "true" => Differs("false", "nothing is not more than nothing"), empty.more_than(&empty);
        "sp int vs long type mismatch": "THROWS ResourceWarnException: errCode: 11003 ,desc: Not supported resource type:class java.lang.Integer(不支持的资源类型)"
            => Differs("true", one_kind), special(&[("gpu", 2)]).not_less_than(&special(&[("gpu", 2)]));
        "sp int+long": "THROWS ClassCastException: class java.lang.Long cannot be cast to class java.lang.Integer (java.lang.Long and java.lang.Integer are in module java.base of loader 'bootstrap')"
            => Differs(r#"SpecialResource {"resources":{"gpu":4}}"#, one_kind), special(&[("gpu", 2)]).add(&special(&[("gpu", 2)]));
        "sp.equalsTo(mem)": "true" => Differs("unanswerable: Memory as Special", UNVIEWED), sp().equals(&mem(4 * G));
    }
}

#[test]
fn zero_of_every_type_matches_linkis() {
    vectors! {
        "init(Default)": r#"LoadResource {"memory":0,"cores":0}"#
            => Differs("unknown type: Default", "a resource has a type"), init("Default");
        "init(Memory)": r#"MemoryResource {"memory":0}"# => Same, init("Memory");
        "init(CPU)": r#"CPUResource {"cores":0}"# => Same, init("CPU");
        "init(Load)": r#"LoadResource {"memory":0,"cores":0}"# => Same, init("Load");
        "init(Instance)": r#"InstanceResource {"cores":0,"instances":0}"# => Same, init("Instance");
        "init(LoadInstance)": r#"LoadInstanceResource {"memory":0,"cores":0,"instances":0,"instance":0}"#
            => Same, init("LoadInstance");
        "init(Yarn)": r#"YarnResource {"queueMemory":0,"queueCores":0,"queueInstances":0,"queueName":"default","applicationId":""}"#
            => Same, init("Yarn");
        "init(DriverAndYarn)": r#"DriverAndYarnResource {"loadInstanceResource":{"memory":0,"cores":0,"instances":0,"instance":0},"yarnResource":{"queueMemory":0,"queueCores":0,"queueInstances":0,"queueName":"default","applicationId":""}}"#
            => Same, init("DriverAndYarn");
        "init(Kubernetes)": r#"KubernetesResource {"memory":0,"cores":0,"namespace":"default"}"# => Same, init("Kubernetes");
        "init(DriverAndKubernetes)": r#"DriverAndKubernetesResource {"loadInstanceResource":{"memory":0,"cores":0,"instances":0,"instance":0},"kubernetesResource":{"memory":0,"cores":0,"namespace":"default"},"moduleOperate":true}"#
            => Same, init("DriverAndKubernetes");
        "init(Special)": r#"SpecialResource {"resources":{}}"# => Same, init("Special");
    }
}

#[test]
fn sizes_are_written_and_read_alike() {
    let one_of_it = "the largest unit of which there is one, so that a gigabyte reads as one";
    for (what, linkis, ours) in [
        (G * 3 / 2, "1536.0 MB", Differs("1.5 GB", one_of_it)),
        (2047 << 20, "2047.0 MB", Differs("2.0 GB", one_of_it)),
        (0, "0.0 B", Differs("0 B", "bytes are whole")),
        (-3 * G, "-3.0 GB", Same),
        (i64::MAX, "8388608.0 TB", Same),
    ] {
        check(&format!("bytesToString({what})"), linkis, &ours, &format_size(what));
    }
    let refused = "a typed error, as Linkis fails too";
    let throws = "THROWS IllegalArgumentException";
    for (what, linkis, ours) in [
        ("1g", "1073741824", Same),
        ("1G", "1073741824", Same),
        ("1gb", "1073741824", Same),
        ("1.5g", "1610612736", Same),
        ("512m", "536870912", Same),
        ("100", "100", Same),
        ("1 GB", "1073741824", Same),
        ("1e9", throws, Differs("no size: 1e9", refused)),
        ("-1g", throws, Differs("no size: -1g", refused)),
        ("1t", "1099511627776", Same),
        ("1.25 tb", "1374389534720", Same),
    ] {
        check(&format!("bytes({what})"), linkis, &ours, &parse_size(what).show());
    }
}

/// Amounts in Linkis's messages about shortages, including those of its unit test.
#[test]
fn whole_gigabytes_are_truncated_alike() {
    for (what, linkis) in
        [(1_610_612_736, 1), (-2_147_483_648, -2), (644_245_094_400, 600), (20_454_781_747_200, 19_050)]
    {
        assert_eq!(whole_gb(what), linkis, "negGb({what}b)");
    }
}
