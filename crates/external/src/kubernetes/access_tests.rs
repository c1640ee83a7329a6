//! Access from files as kubectl and the kubelet write them.

use std::{fs, path::PathBuf};

use super::*;
use crate::fake::certified;

/// Temporary folder, removed when dropped.
struct TempFolder(PathBuf);

impl TempFolder {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("linkis-rm-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, text).unwrap();
        path
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const TOKEN: &str = "gr8-s3cret";

fn failure(access: Result<AccessConfig, HttpFailure>) -> &'static str {
    match access.map(|_| ()) {
        Err(HttpFailure::NoAccess(why)) => why,
        other => panic!("{other:?}"),
    }
}

fn config(cluster: &str, user: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: here\ncontexts:\n- name: here\n  context: {{cluster: c, user: u}}\n\
         - name: lost\n  context: {{cluster: x, user: u}}\n- name: nobody\n  context: {{cluster: c}}\n\
         clusters:\n- name: c\n  cluster: {{{cluster}}}\nusers:\n- name: u\n  user: {{{user}}}\n"
    )
}

#[test]
fn in_cluster_access_reads_service_account_files() {
    let (folder, (_, ca)) = (TempFolder::new("pod"), certified(&["k8s"]));
    folder.write("ca.crt", &ca);
    assert_eq!(failure(in_cluster("10.0.0.1", "6443", &folder.0)), NO_TOKEN);
    folder.write("token", &format!("{TOKEN}\n"));
    let access = in_cluster("10.0.0.1", "6443", &folder.0).unwrap();
    assert_eq!((access.address.as_str(), access.roots.unwrap().len()), ("https://10.0.0.1:6443", 1));
    assert_eq!(access.token.unwrap().expose_secret(), TOKEN);
    assert_eq!(in_cluster("fd00::1", "", &folder.0).unwrap().address.as_str(), "https://[fd00::1]");
    folder.write("token", "renewed");
    let renewed = in_cluster("10.0.0.1", "6443", &folder.0).unwrap().token.unwrap();
    assert_eq!(renewed.expose_secret(), "renewed");
    assert_eq!(failure(in_cluster("", "", &folder.0)), NO_POD);
    assert_eq!(failure(in_cluster("10.0.0.1", "443", &folder.0.join("nowhere"))), NO_POD);
    folder.write("ca.crt", "nonsense");
    assert_eq!(failure(in_cluster("10.0.0.1", "443", &folder.0)), NO_CERTIFICATE);
}

#[test]
fn kubeconfig_gives_address_and_credentials() {
    let (folder, (_, ca)) = (TempFolder::new("kubeconfig"), certified(&["k8s"]));
    let own = rcgen::generate_simple_self_signed(["linkis".to_owned()]).unwrap();
    folder.write("ca.crt", &ca);
    folder.write("user.crt", &own.cert.pem());
    folder.write("user.key", &own.signing_key.serialize_pem());
    folder.write("token", TOKEN);
    let read = |text: &str, context: Option<&str>| kubeconfig(&folder.write("config", text), context);
    let access =
        read(&config("server: 'https://k8s:6443', certificate-authority: ca.crt", "tokenFile: token"), None).unwrap();
    assert_eq!((access.address.as_str(), access.roots.unwrap().len()), ("https://k8s:6443", 1));
    assert_eq!((access.token.unwrap().expose_secret(), access.identity.is_none()), (TOKEN, true));
    let whole = folder.0.join("user.key").display().to_string();
    let user = format!("client-certificate: user.crt, client-key: '{whole}'");
    let access = read(&config("server: 'https://k8s:6443'", &user), Some("here")).unwrap();
    assert!(access.identity.is_some() && access.token.is_none() && access.roots.is_none());
    let access = read(&config("server: 'http://k8s:8080'", "token: x"), Some("nobody")).unwrap();
    assert!(access.token.is_none() && access.identity.is_none(), "a context without a user");
    for (text, context, why) in [
        ("<html>", None, NO_KUBECONFIG),
        ("[]", None, NO_KUBECONFIG),
        (&*config("server: 'https://k8s'", "token: x"), Some("elsewhere"), NO_CONTEXT),
        (&config("server: 'https://k8s'", "token: x"), Some("lost"), NO_CONTEXT),
        (&config("", "token: x"), None, NO_ADDRESS),
        (&config("server: k8s", "token: x"), None, NO_ADDRESS),
        (&config("server: 'https://k8s', certificate-authority: nowhere", "token: x"), None, NO_CERTIFICATE),
        (&config("server: 'https://k8s', certificate-authority: /dev/zero", "token: x"), None, NO_CERTIFICATE),
        (&config("server: 'https://k8s', certificate-authority-data: eA==", "token: x"), None, NO_CERTIFICATE),
        (&config("server: 'https://k8s'", "client-certificate: user.crt"), None, NO_CERTIFICATE),
        (&config("server: 'https://k8s'", "tokenFile: nowhere"), None, NO_TOKEN),
        (&config("server: 'https://k8s', insecure-skip-tls-verify: true", "token: x"), None, NOT_OFFERED),
        (&config("server: 'https://k8s', proxy-url: 'http://p'", "token: x"), None, NOT_OFFERED),
        (&config("server: 'https://k8s', tls-server-name: other", "token: x"), None, NOT_OFFERED),
        (
            &config("server: 'https://k8s'", "exec: {apiVersion: client.authentication.k8s.io/v1, command: reboot}"),
            None,
            NOT_OFFERED,
        ),
        (&config("server: 'https://k8s'", "username: admin, password: gr8-s3cret"), None, NOT_OFFERED),
        (&config("server: 'https://k8s'", "token: x, as: admin"), None, NOT_OFFERED),
    ] {
        assert_eq!(failure(read(text, context)), why, "{text}");
    }
}

#[test]
fn kubeconfig_that_is_no_small_file_is_refused() {
    for path in ["/dev/zero", "/", "/proc/self/nowhere"] {
        assert_eq!(failure(kubeconfig(Path::new(path), None)), NO_KUBECONFIG, "{path}");
    }
    let folder = TempFolder::new("large");
    let large = folder.write("config", &" ".repeat((1 << 20) + 1));
    assert_eq!(failure(kubeconfig(&large, None)), NO_KUBECONFIG);
}
