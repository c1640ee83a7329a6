//! The Helm chart: its manifests by `helm`, against the schemas of Kubernetes.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Output},
};

use crate::harness::*;

/// Returns the output of a tool; `None` if it is not installed.
fn output_of(command: &mut Command) -> Option<Output> {
    let output = command.output().ok();
    if output.is_none() {
        skip_without(&command.get_program().to_string_lossy(), ".ci/full deploy installs it");
    }
    output
}

fn chart() -> PathBuf {
    repo_root().join("deploy/helm/linkis-rm")
}

fn text_of(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat()
}

/// Returns the manifests of the chart with `arguments`, or the error output.
fn render(arguments: &[&str]) -> Option<Result<String, String>> {
    let output = output_of(Command::new("helm").args(["template", "rm"]).arg(chart()).args(arguments))?;
    Some(if output.status.success() { Ok(text_of(&output)) } else { Err(text_of(&output)) })
}

#[test]
fn chart_manifests_match_kubernetes_schemas() {
    let folder = scratch("chart");
    fs::create_dir_all(&folder).unwrap();
    for values in ["open", "full"] {
        let values = chart().join(format!("ci/{values}-values.yaml"));
        let Some(lint) = output_of(Command::new("helm").arg("lint").arg(chart()).arg("-f").arg(&values)) else {
            return;
        };
        assert!(lint.status.success(), "{}", text_of(&lint));
        let manifests = render(&["-f", values.to_str().unwrap()]).unwrap().unwrap();
        let file = folder.join("manifests.yaml");
        fs::write(&file, &manifests).unwrap();
        let Some(validated) = output_of(Command::new("kubernetes-validate").arg(&file)) else { return };
        assert!(validated.status.success(), "{}", text_of(&validated));
    }
}

#[test]
fn chart_values_become_settings_of_pods() {
    let full = chart().join("ci/full-values.yaml");
    let Some(manifests) = render(&["-f", full.to_str().unwrap()]) else { return };
    let manifests = manifests.unwrap();
    for expected in [
        "value: \"67108864\"",
        "serviceAccountName: rm-linkis-rm",
        "automountServiceAccountToken: true",
        "kind: NetworkPolicy",
        "helm.sh/hook: pre-install,pre-upgrade",
        "name: LINKIS_RM_NO_MIGRATE",
        "mountPath: /etc/linkis-rm/jwt",
    ] {
        assert!(manifests.contains(expected), "{expected}: {manifests}");
    }
}

#[test]
fn chart_wrong_values_are_refused() {
    for (values, problem) in [
        ("env.LINKIS_RM_MAX_WAITING=8000", "want string"),
        ("serviceAcount.create=true", "not allowed"),
        ("insecure=false", "set tls.existingSecret"),
    ] {
        let Some(rendered) = render(&["--set", "insecure=true", "--set", values]) else { return };
        let error = rendered.unwrap_err();
        assert!(error.contains(problem), "{values}: {error}");
    }
}
