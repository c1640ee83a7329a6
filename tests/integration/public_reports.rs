//! Faults that users of other projects reported, as small cases with an input and the right result.
//!
//! Each file has one subject. Its tables name the source, the kind of fault, the input and the right result; `ELSEWHERE` names the
//! tests of other modules. An input is an example of its kind, not a copy. A new report is a new row.

use std::{fmt::Debug, fs, path::PathBuf};

use crate::harness::repo_root;

mod counters;
mod databases;

/// One reported fault.
pub struct Case<I, R> {
    /// Project and number, or the document that shows the input.
    pub source: &'static str,
    /// Kind of the fault.
    pub fault: &'static str,
    pub input: I,
    pub right: R,
}

/// Builds a row: source, fault, input, right result.
pub const fn case<I, R>(source: &'static str, fault: &'static str, input: I, right: R) -> Case<I, R> {
    Case { source, fault, input, right }
}

/// Reports that a test of another module or crate covers: source, fault, name of the test.
const ELSEWHERE: [(&str, &str, &str); 31] = [
    (
        "grpc/grpc compression.md, PROTOCOL-HTTP2",
        "an unknown encoding, a flag without an encoding, gzip that is none",
        "compression_rules_hold",
    ),
    ("grpc/grpc reflection.proto", "an unknown symbol ends the stream", "reflection_rules_hold"),
    ("grpc/grpc PROTOCOL-HTTP2", "large metadata ends the server", "calls_with_large_metadata_are_refused_alone"),
    ("grpc/grpc-rust#963, grpc/grpc-java#8385", "the health of a service is not known", "health_checking_rules_hold"),
    (
        "PostgreSQL database in LATIN1",
        "a name that the database cannot store is an internal error",
        "database_of_other_encoding_is_refused_by_name",
    ),
    (
        "transact-rs/sqlx pool exhaustion, managed PostgreSQL with 25 connections",
        "an instance without a connection for its committer serves",
        "database_with_few_connections_keeps_instance_unready",
    ),
    (
        "pgbouncer/pgbouncer pool_mode",
        "a pooler drops session settings",
        "pooler_with_other_pooling_is_refused_at_start",
    ),
    ("apache-spark-on-k8s/spark#467, kubeflow/sdk#581", "G is 10^9 in one place and 2^30 in another", "sizes_parse"),
    (
        "apache-spark-on-k8s/spark#467, kubeflow/sdk#581",
        "a size overflows, is negative or empty",
        "malformed_size_is_refused",
    ),
    (
        "apache/linkis table dump of 2022",
        "instances is called instance; a document is nested under its class name",
        "older_json_forms_equal_newest",
    ),
    (
        "apache/linkis table dump of 2022",
        "memory is text, a fraction, out of range or given twice",
        "errors_name_the_field",
    ),
    (
        "kubernetes-sigs/kueue#12838, PR 13391; Project-HAMi/HAMi PR 1966",
        "a negative amount makes credit",
        "invalid_request_returns_field",
    ),
    (
        "YUNIKORN-2171, YARN-11964",
        "an EM comes back smaller than its tickets",
        "registration_repeated_keeps_tickets_and_resizes",
    ),
    (
        "kubernetes-sigs/kueue#5176",
        "a limit is set below the tickets of its scope",
        "limit_over_live_tickets_counts_their_sum",
    ),
    (
        "hashicorp/nomad#1240, hashicorp/consul#4741",
        "two machines register under one identity",
        "stale_epoch_unregister_is_refused",
    ),
    (
        "RFC 6874, Unicode",
        "names with zones, other scripts, letter cases or normal forms are one",
        "names_with_separators_stay_distinct",
    ),
    ("apache/linkis combined labels", "joined label values are ambiguous", "limit_on_joined_labels_counts_each_pair"),
    (
        "kubernetes/kubernetes#21654, kubernetes/apimachinery#72, DataDog/integrations-core PR 17280",
        "a quantity is read in another unit",
        "quantity_in_every_kubernetes_form_is_parsed",
    ),
    ("kubernetes/kubernetes#138148", "a quota of other pods decides", "quota_with_scopes_of_other_pods_is_ignored"),
    (
        "aptakube/aptakube#465",
        "a quota of an extended resource is not read",
        "extended_resources_of_quotas_nodes_and_pods_are_parsed",
    ),
    ("kubernetes/kubernetes#117663", "a count of objects is an extended resource", "quota_object_counts_are_left_out"),
    (
        "apache/linkis#1899, #198; TOSIT-IO/tdp-getting-started#229",
        "a row or an address of Linkis's table is not read",
        "linkis_yarn_addresses_in_any_form_are_accepted",
    ),
    (
        "hadoop-yarn-api-python-client#98, PR 113; timberlake PR 80",
        "a standby is taken as active, or its redirect is followed",
        "active_address_of_several_is_found_and_remembered",
    ),
    ("apache/linkis#1039, #1148, PR 1051", "Kerberos is wanted", "yarn_malformed_reply_error_omits_content"),
    (
        "jupyter-server/enterprise_gateway#441",
        "haState is a sentence or absent",
        "single_address_is_fetched_without_probe",
    ),
    (
        "capacity-scheduler and fair-scheduler replies of several releases",
        "use in another spelling is no use",
        "queue_use_in_any_spelling_counts_in_full",
    ),
    (
        "apache/hadoop FairScheduler samples; YARN-11414, YARN-11965",
        "an unlimited maximum overflows; a labelled partition counts for all",
        "queue_maximum_without_limit_or_partition_is_bounded",
    ),
    ("apache/linkis#704, #175", "a queue is absent", "request_in_absent_or_stopped_queue_is_refused"),
    (
        "apache/linkis#1192",
        "a burst between two snapshots is granted more than is left",
        "external_queue_burst_is_granted_within_capacity",
    ),
    (
        "volcano-sh/volcano#748, #947, #1096",
        "small requests starve a large one; large requests share what is released",
        "wait_queue_large_request_is_not_starved",
    ),
    (
        "kubernetes-sigs/kueue#4809, volcano-sh/volcano#2534",
        "the head of a queue reserves more than its own limit",
        "wait_queue_user_limit_blocks_no_other_user",
    ),
];

#[test]
fn public_reports_of_other_modules_name_existing_tests() {
    let mut sources = String::new();
    let mut folders: Vec<PathBuf> = ["src", "crates", "tests"].map(|folder| repo_root().join(folder)).into();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            match entry.extension() {
                None if entry.is_dir() => folders.push(entry),
                Some(extension) if extension == "rs" => sources += &fs::read_to_string(entry).unwrap(),
                _ => {}
            }
        }
    }
    for (source, fault, test) in ELSEWHERE {
        assert!(sources.contains(&format!("fn {test}(")), "{source}: {fault}: there is no test {test}");
    }
}

/// Results of cases that are not right.
#[derive(Default)]
pub struct Wrong(Vec<String>);

impl Wrong {
    /// Compares the result of a case with the right one.
    pub fn compare<I: Debug, R: Debug, S: Debug + PartialEq<R>>(&mut self, case: &Case<I, R>, result: S) {
        if result != case.right {
            let Case { source, fault, input, right } = case;
            self.0.push(format!("{source}: {fault}\n  input {input:?}\n  right {right:?}\n  found {result:?}"));
        }
    }

    /// Fails with all cases that are not right.
    #[track_caller]
    pub fn none(self) {
        assert!(self.0.is_empty(), "{}", self.0.join("\n"));
    }
}
