//! Property tests of resources with random values.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// Small amounts often coincide, large ones overflow.
fn amount() -> impl Strategy<Value = i64> {
    prop_oneof![8 => 0..4_i64, 1 => 0..=i64::MAX]
}

fn name() -> impl Strategy<Value = String> {
    prop_oneof![Just("q".to_owned()), Just("default".to_owned()), "[^\\p{Cc}]{1,8}"]
}

fn driver() -> impl Strategy<Value = LoadInstanceAmounts> {
    (amount(), amount(), amount()).prop_map(|(memory, cores, instances)| LoadInstanceAmounts {
        memory,
        cores,
        instances,
    })
}

fn yarn() -> impl Strategy<Value = YarnAmounts> {
    (amount(), amount(), amount(), name(), name()).prop_map(
        |(queue_memory, queue_cores, queue_instances, queue_name, application_id)| YarnAmounts {
            queue_memory,
            queue_cores,
            queue_instances,
            queue_name,
            application_id,
        },
    )
}

fn kubernetes() -> impl Strategy<Value = KubernetesAmounts> {
    (amount(), amount(), name()).prop_map(|(memory, millicores, namespace)| KubernetesAmounts {
        memory,
        millicores,
        namespace,
    })
}

fn custom() -> impl Strategy<Value = BTreeMap<String, i64>> {
    prop::collection::btree_map(name(), amount(), 0..4)
}

fn of_type(resource_type: ResourceType) -> BoxedStrategy<Resource> {
    let parts = match resource_type {
        ResourceType::Memory => amount().prop_map(|memory| ResourceParts::Memory { memory }).boxed(),
        ResourceType::Cpu => amount().prop_map(|cores| ResourceParts::Cpu { cores }).boxed(),
        ResourceType::Load => {
            (amount(), amount()).prop_map(|(memory, cores)| ResourceParts::Load { memory, cores }).boxed()
        }
        ResourceType::Instance => amount().prop_map(|instances| ResourceParts::Instance { instances }).boxed(),
        ResourceType::LoadInstance => driver().prop_map(ResourceParts::LoadInstance).boxed(),
        ResourceType::Yarn => yarn().prop_map(ResourceParts::Yarn).boxed(),
        ResourceType::DriverAndYarn => {
            (driver(), yarn()).prop_map(|(driver, yarn)| ResourceParts::DriverAndYarn(driver, yarn)).boxed()
        }
        ResourceType::Kubernetes => kubernetes().prop_map(ResourceParts::Kubernetes).boxed(),
        ResourceType::DriverAndKubernetes => (driver(), kubernetes())
            .prop_map(|(driver, kubernetes)| ResourceParts::DriverAndKubernetes(driver, kubernetes))
            .boxed(),
        ResourceType::Special => custom().prop_map(ResourceParts::Special).boxed(),
    };
    parts.prop_map(|parts| Resource::from_parts(parts).unwrap()).boxed()
}

fn resource_type() -> impl Strategy<Value = ResourceType> {
    prop::sample::select(ResourceType::ALL.to_vec())
}

fn any_resource() -> impl Strategy<Value = Resource> {
    resource_type().prop_flat_map(of_type)
}

/// Returns three resources of one type.
fn three() -> impl Strategy<Value = (Resource, Resource, Resource)> {
    resource_type()
        .prop_flat_map(|resource_type| (of_type(resource_type), of_type(resource_type), of_type(resource_type)))
}

proptest! {
    #[test]
    fn resource_parts_and_json_round_trip(resource in any_resource()) {
        prop_assert_eq!(Resource::from_parts(resource.parts()).unwrap().parts(), resource.parts());
        let read = Resource::from_json(resource.resource_type(), &resource.to_json()).unwrap();
        prop_assert_eq!(read.parts(), resource.parts());
    }

    #[test]
    fn resource_add_then_subtract_is_identity((a, b, _) in three()) {
        if let Ok(sum) = a.add(&b) {
            prop_assert_eq!(sum.minus(&b).unwrap(), a.clone());
            prop_assert!(sum.covers(&a).unwrap() && sum.covers(&b).unwrap());
        }
        prop_assert_eq!(a.add(&b).ok(), b.add(&a).ok());
    }

    #[test]
    fn covers_is_a_partial_order((a, b, c) in three()) {
        let covers = |a: &Resource, b: &Resource| a.covers(b) == Ok(true);
        prop_assert!(covers(&a, &a));
        prop_assert_eq!(covers(&a, &b) && covers(&b, &a), a == b);
        if covers(&a, &b) && covers(&b, &c) && a.covers(&c).is_ok() {
            prop_assert!(covers(&a, &c));
        }
        prop_assert_eq!(a.equals(&b).unwrap_or(false), a == b);
    }

    #[test]
    fn resource_less_mirrors_more((a, b, _) in three()) {
        let less = a.less_than(&b);
        prop_assert_eq!(less.clone().ok(), b.more_than(&a).ok());
        if less == Ok(true) {
            prop_assert_eq!(b.less_than(&a), Ok(false));
            prop_assert_eq!(a.not_more_than(&b), Ok(true));
            prop_assert_eq!(a.covers(&b), Ok(false));
        }
    }

    #[test]
    fn resource_minus_succeeds_where_covers_holds((a, b, _) in three()) {
        prop_assert_eq!(a.minus(&b).is_ok(), a.covers(&b) == Ok(true));
    }

    #[test]
    fn left_resource_covers_exactly_fitting_requests((total, used, asked) in three()) {
        let zero = Resource::zero(total.resource_type());
        if let Ok(left) = Resource::left(&total, &zero, &used, &zero) {
            if let (Ok(need), true) = (used.add(&asked), left.is_negative_anywhere()) {
                prop_assert!(total.covers(&need) != Ok(true));
            } else if let Ok(need) = used.add(&asked) {
                prop_assert_eq!(left.covers(&asked), total.covers(&need) == Ok(true));
            }
        }
    }

    #[test]
    fn scaling_down_never_gives_more(a in any_resource(), rate in 0.0_f32..=1.0) {
        prop_assert!(a.covers(&a.multiply_by(rate).unwrap()).unwrap());
        prop_assert_eq!(a.multiply_by(1.0).unwrap(), a);
    }

    #[test]
    fn resource_parsers_never_panic(text in any::<String>(), json in "[{}\":,0-9a-z\\[\\]. -]{0,40}", rate in any::<f32>()) {
        for resource_type in ResourceType::ALL {
            let _ = Resource::from_json(resource_type, &text);
            let _ = Resource::from_json(resource_type, &json);
        }
        let _ = (parse_size(&text), parse_size(&json), text.parse::<ResourceType>());
        let _ = Resource::load(i64::MAX, 3).unwrap().multiply_by(rate);
    }

    #[test]
    fn corrupt_json_is_refused_or_parsed_literally(
        resource in any_resource(),
        cuts in prop::collection::vec((any::<prop::sample::Index>(), 0..6_usize, "[-0-9a-z\"{}:,. ]{0,3}"), 1..4),
    ) {
        let mut document: Vec<char> = resource.to_json().chars().collect();
        for (at, removed, inserted) in cuts {
            let from = at.index(document.len() + 1);
            let to = (from + removed).min(document.len());
            document.splice(from..to, inserted.chars());
        }
        let document: String = document.into_iter().collect();
        if let Ok(read) = Resource::from_json(resource.resource_type(), &document) {
            prop_assert!(read.amounts().all(|(_, amount)| amount >= 0), "{document}");
            let again = Resource::from_json(resource.resource_type(), &read.to_json()).unwrap();
            prop_assert_eq!(again.parts(), read.parts(), "{}", document);
        }
    }

    #[test]
    fn printed_size_parses_within_its_decimal(bytes in 0..=i64::MAX / 2) {
        let read = parse_size(&format_size(bytes)).unwrap();
        prop_assert!(read.abs_diff(bytes) <= bytes.unsigned_abs() / 20);
    }
}
