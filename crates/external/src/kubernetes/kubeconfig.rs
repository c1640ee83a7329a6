//! Parsing of a kubeconfig: the keys that define the access, and keys that are rejected because their effect is
//! unsupported. The parser ignores other keys, as kubectl does. Caller: `access`.

use secrecy::SecretString;
use serde::{Deserialize, de::IgnoredAny};

use super::yaml;

/// Keys of a kubeconfig.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Kubeconfig {
    clusters: Option<Vec<NamedCluster>>,
    users: Option<Vec<NamedUser>>,
    contexts: Option<Vec<NamedContext>>,
    current_context: Option<String>,
}

#[derive(Deserialize)]
struct NamedCluster {
    name: String,
    cluster: Option<Cluster>,
}

#[derive(Deserialize)]
struct NamedUser {
    name: String,
    user: Option<User>,
}

#[derive(Deserialize)]
struct NamedContext {
    name: String,
    context: Option<Context>,
}

#[derive(Deserialize)]
struct Context {
    cluster: String,
    user: Option<String>,
}

/// Server address with its trusted certificates.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Cluster {
    pub server: Option<String>,
    pub certificate_authority: Option<String>,
    pub certificate_authority_data: Option<String>,
    insecure_skip_tls_verify: Option<bool>,
    proxy_url: Option<String>,
    tls_server_name: Option<String>,
}

/// Credentials for the server.
#[derive(Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct User {
    pub token: Option<SecretString>,
    #[serde(rename = "tokenFile")]
    pub token_file: Option<String>,
    pub client_certificate: Option<String>,
    pub client_certificate_data: Option<String>,
    pub client_key: Option<String>,
    pub client_key_data: Option<SecretString>,
    username: Option<String>,
    password: Option<IgnoredAny>,
    exec: Option<IgnoredAny>,
    auth_provider: Option<IgnoredAny>,
    #[serde(rename = "as")]
    act_as: Option<String>,
    as_groups: Option<Vec<IgnoredAny>>,
}

/// Reason why a kubeconfig cannot be used.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum KubeconfigError {
    /// The text is no kubeconfig.
    Unreadable,
    /// The context, its cluster or its user does not exist.
    NoContext,
    /// A key has an unsupported effect.
    NotOffered,
}

/// Returns the cluster and the user of a context, or of the current one.
pub(super) fn choose(yaml: &str, context: Option<&str>) -> Result<(Cluster, User), KubeconfigError> {
    let config = yaml::read(yaml).and_then(|config| serde_json::from_value::<Kubeconfig>(config).ok());
    let config = config.ok_or(KubeconfigError::Unreadable)?;
    let (cluster, user) = config.choose(context).ok_or(KubeconfigError::NoContext)?;
    if cluster.wants_more() || user.wants_more() {
        return Err(KubeconfigError::NotOffered);
    }
    Ok((cluster, user))
}

impl Kubeconfig {
    fn choose(self, context: Option<&str>) -> Option<(Cluster, User)> {
        let name = context.map(str::to_owned).or(self.current_context)?;
        let context = self.contexts?.into_iter().find(|context| context.name == name)?.context?;
        let cluster = self.clusters?.into_iter().find(|cluster| cluster.name == context.cluster)?.cluster?;
        let user = match context.user.filter(|user| !user.is_empty()) {
            None => User::default(),
            Some(name) => self.users?.into_iter().find(|user| user.name == name)?.user.unwrap_or_default(),
        };
        Some((cluster, user))
    }
}

impl Cluster {
    /// Returns whether a key has an unsupported effect.
    fn wants_more(&self) -> bool {
        self.insecure_skip_tls_verify.unwrap_or(false) || is_set(&self.proxy_url) || is_set(&self.tls_server_name)
    }
}

impl User {
    /// Returns whether a key has an unsupported effect.
    fn wants_more(&self) -> bool {
        self.exec.is_some()
            || self.auth_provider.is_some()
            || is_set(&self.username)
            || self.password.is_some()
            || is_set(&self.act_as)
            || self.as_groups.as_ref().is_some_and(|groups| !groups.is_empty())
    }
}

fn is_set(text: &Option<String>) -> bool {
    text.as_ref().is_some_and(|text| !text.is_empty())
}
