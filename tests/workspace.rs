//! Walls between the crates: the crates that each may use, and the libraries that each must not use. docs/ARCHITECTURE.md explains them.

use std::{collections::BTreeMap, process::Command};

use serde_json::Value;

/// Crate name, the crates of this workspace that it may use, and the libraries that it must not use.
struct Wall {
    name: &'static str,
    may: &'static [&'static str],
    must_not: &'static [&'static str],
}

const WALLS: [Wall; 10] = [
    Wall { name: "rm-model", may: &[], must_not: &["prost", "sqlx", "tokio", "tonic", "tracing"] },
    Wall { name: "rm-engine", may: &["rm-model"], must_not: &["prost", "sqlx", "tokio", "tonic", "tracing"] },
    Wall { name: "rm-proto", may: &["rm-model"], must_not: &["hyper", "sqlx"] },
    Wall { name: "rm-telemetry", may: &["rm-model"], must_not: &["prost", "sqlx"] },
    Wall { name: "rm-store", may: &["rm-model", "rm-telemetry"], must_not: &["prost", "tonic"] },
    Wall { name: "rm-external", may: &["rm-model"], must_not: &["sqlx", "tonic"] },
    Wall {
        name: "rm-service",
        may: &["rm-engine", "rm-external", "rm-model", "rm-store", "rm-telemetry"],
        must_not: &["axum", "hyper", "prost", "tonic"],
    },
    Wall { name: "rm-edge", may: &["rm-model", "rm-proto", "rm-service", "rm-telemetry"], must_not: &["sqlx"] },
    Wall { name: "rm-client", may: &["rm-model", "rm-proto"], must_not: &["axum", "clap", "sqlx"] },
    Wall { name: "rm-devpg", may: &[], must_not: &["prost", "tonic"] },
];

#[test]
fn crates_use_only_what_their_walls_permit() {
    let packages = packages();
    for Wall { name, may, must_not } in WALLS {
        for used in &packages[name] {
            let is_permitted =
                if used.starts_with("rm-") { may.contains(&&**used) } else { !must_not.contains(&&**used) };
            assert!(is_permitted, "{name} must not use {used}");
        }
    }
    let walled = |name: &String| name.starts_with("rm-") && name != "rm-tests";
    for name in packages.keys().filter(|name| walled(name)) {
        assert!(WALLS.iter().any(|wall| wall.name == name), "{name} has no wall: name what it may use");
    }
}

/// Returns the packages of this workspace, each with the dependencies of its library.
fn packages() -> BTreeMap<String, Vec<String>> {
    let arguments = ["metadata", "--no-deps", "--offline", "--format-version", "1"];
    let output = Command::new(env!("CARGO")).args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let dependencies = |package: &Value| {
        let all = package["dependencies"].as_array().unwrap().iter();
        all.filter(|dependency| dependency["kind"].is_null()).map(|dependency| text(&dependency["name"])).collect()
    };
    metadata["packages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|package| (text(&package["name"]), dependencies(package)))
        .collect()
}
