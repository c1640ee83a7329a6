//! Configuration of JWTs (`--jwt-config`): the accepted issuers, their keys, and the rights that their claims give.
//!
//! Never: reads keys; `source` does.
//! Callers: `jwt`, and `claims`, which evaluates the grants.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use serde::Deserialize;

use rm_external::{ServerAddress, allowed::AllowedHosts};
use rm_model::{
    access::{EmPattern, Role, USERS_MAX},
    name::{FieldError, Name},
};

/// Maximum numbers of issuers, of audiences per issuer, and of grants per issuer.
const ISSUERS_MAX: usize = 16;
const AUDIENCES_MAX: usize = 16;
const GRANTS_MAX: usize = 256;

/// Maximum length of an issuer's name.
const NAME_CHARS_MAX: usize = 32;

/// Prefix of the principals of certificates, which no issuer may have.
const CERTIFIED: &str = "ecm";

/// Issuer of JWTs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Issuer {
    /// Prefix of its principals in the history and the log.
    pub name: String,
    /// Required claim `iss`.
    pub issuer: String,
    /// Accepted audiences: the claim `aud` must contain one of them.
    pub audiences: Vec<String>,
    /// Source of its keys.
    pub source: KeySource,
    /// Claim with the name of the caller.
    pub principal: ClaimPath,
    /// Grants; the first whose conditions hold applies.
    pub grants: Vec<ClaimGrant>,
}

/// Source of keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeySource {
    /// A file.
    File(PathBuf),
    /// An address.
    Address {
        /// The address.
        address: ServerAddress,
        /// File with the accepted CA certificates; `None` for those of the system.
        ca: Option<PathBuf>,
        /// File with the token that the address requires; `None` for none.
        token: Option<PathBuf>,
    },
}

/// Claim: a name, or a JSON Pointer (RFC 6901), which begins with `/`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimPath(pub String);

/// Rights of callers with certain claims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimGrant {
    /// Conditions: each of these claims must contain one of the texts.
    pub conditions: BTreeMap<ClaimPath, Vec<String>>,
    /// Roles of the caller.
    pub roles: BTreeSet<Role>,
    /// EMs that a caller with role `ecm` may act for.
    pub ems: GrantBinding<Vec<EmPattern>>,
    /// Users whose tickets a manager or viewer may access.
    pub users: GrantBinding<BTreeSet<Name>>,
}

/// Bound of a grant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GrantBinding<T> {
    /// Unbounded.
    Not,
    /// Bounded to these.
    To(T),
    /// Bounded to the names in a claim.
    From(ClaimPath),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileForm {
    issuers: Vec<IssuerForm>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct IssuerForm {
    name: String,
    issuer: String,
    audiences: Vec<String>,
    keys: String,
    ca: Option<PathBuf>,
    token_file: Option<PathBuf>,
    principal: Option<String>,
    grants: Vec<GrantForm>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GrantForm {
    #[serde(default, rename = "if")]
    conditions: BTreeMap<String, OneOrMany>,
    roles: Vec<String>,
    ems: Option<Vec<String>>,
    ems_from: Option<String>,
    users: Option<Vec<String>>,
    users_from: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

/// Error in a configuration.
#[derive(Debug, thiserror::Error)]
pub enum JwtConfigError {
    /// The text is not JSON, or has another structure.
    #[error("it cannot be read")]
    Json(#[from] serde_json::Error),
    /// A field is invalid.
    #[error(transparent)]
    Field(#[from] FieldError),
}

/// Parses a configuration. Addresses of keys must be on `allowed` hosts.
///
/// # Errors
/// [`JwtConfigError`] with the first invalid field.
pub fn read(json: &[u8], allowed: &AllowedHosts) -> Result<Vec<Issuer>, JwtConfigError> {
    let file: FileForm = serde_json::from_slice(json)?;
    check_count("issuers", file.issuers.len(), ISSUERS_MAX)?;
    let mut issuers: Vec<Issuer> = Vec::new();
    for (number, form) in file.issuers.into_iter().enumerate() {
        let at = format!("issuers[{number}]");
        let issuer = form.check(&at, allowed)?;
        for other in &issuers {
            let taken = |field: &str| {
                FieldError::new(format!("{at}.{field}"), "is also the name or the claim \"iss\" of another issuer")
            };
            if other.name == issuer.name {
                return Err(taken("name").into());
            }
            if other.issuer == issuer.issuer {
                return Err(taken("issuer").into());
            }
        }
        issuers.push(issuer);
    }
    Ok(issuers)
}

fn check_count(field: &str, count: usize, most: usize) -> Result<(), FieldError> {
    match (1..=most).contains(&count) {
        true => Ok(()),
        false => Err(FieldError::new(field, format!("has {count}; 1 to {most} are allowed"))),
    }
}

impl IssuerForm {
    fn check(self, at: &str, allowed: &AllowedHosts) -> Result<Issuer, FieldError> {
        let field = |name: &str| format!("{at}.{name}");
        let is_char = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_.".contains(c);
        let is_name = (1..=NAME_CHARS_MAX).contains(&self.name.len()) && self.name.chars().all(is_char);
        if !is_name || self.name == CERTIFIED {
            let problem =
                format!("must be 1 to {NAME_CHARS_MAX} of a-z, 0-9, \"-\", \"_\" and \".\", and not {CERTIFIED:?}");
            return Err(FieldError::new(field("name"), problem));
        }
        if self.issuer.is_empty() {
            return Err(FieldError::new(field("issuer"), "is empty; it is the claim \"iss\" of the JWTs"));
        }
        check_count(&field("audiences"), self.audiences.len(), AUDIENCES_MAX)?;
        if self.audiences.iter().any(String::is_empty) {
            return Err(FieldError::new(field("audiences"), "has an empty element"));
        }
        check_count(&field("grants"), self.grants.len(), GRANTS_MAX)?;
        let source = source(at, &self.keys, self.ca, self.token_file, allowed)?;
        let principal = ClaimPath::parse(&field("principal"), self.principal.unwrap_or_else(|| "sub".to_owned()))?;
        let grants = self.grants.into_iter().enumerate();
        let grants = grants.map(|(number, grant)| grant.check(&format!("{at}.grants[{number}]")));
        let grants = grants.collect::<Result<_, _>>()?;
        Ok(Issuer { name: self.name, issuer: self.issuer, audiences: self.audiences, source, principal, grants })
    }
}

fn source(
    at: &str,
    keys: &str,
    ca: Option<PathBuf>,
    token: Option<PathBuf>,
    allowed: &AllowedHosts,
) -> Result<KeySource, FieldError> {
    let field = |name: &str| format!("{at}.{name}");
    let is_address = keys.starts_with("http://") || keys.starts_with("https://");
    if !is_address {
        let without = [("ca", ca.is_some()), ("token_file", token.is_some())];
        if let Some((name, _)) = without.into_iter().find(|(_, is_set)| *is_set) {
            return Err(FieldError::new(
                field(name),
                "is only for keys at an https:// address, but these keys are in a file",
            ));
        }
        return match keys {
            "" => Err(FieldError::new(field("keys"), "is empty; name a file with a JSON Web Key Set, or its address")),
            path => Ok(KeySource::File(path.into())),
        };
    }
    let address = ServerAddress::parse(keys).map_err(|problem| FieldError::new(field("keys"), problem))?;
    allowed.check(&address).map_err(|failure| FieldError::new(field("keys"), failure.to_string()))?;
    if token.is_some() && keys.starts_with("http://") {
        return Err(FieldError::new(field("token_file"), "would be sent unencrypted; name an https:// address"));
    }
    Ok(KeySource::Address { address, ca, token })
}

impl ClaimPath {
    fn parse(field: &str, text: String) -> Result<Self, FieldError> {
        match text.is_empty() {
            true => Err(FieldError::new(field, "is empty; name a claim")),
            false => Ok(Self(text)),
        }
    }
}

impl GrantForm {
    fn check(self, at: &str) -> Result<ClaimGrant, FieldError> {
        let field = |name: &str| format!("{at}.{name}");
        let role = |text: &String| {
            let names = Role::ALL.map(Role::as_str).join(", ");
            let unknown = || FieldError::new(field("roles"), format!("{text:?} is unknown; give one of {names}"));
            Role::parse(text).ok_or_else(unknown)
        };
        let roles: BTreeSet<Role> = self.roles.iter().map(role).collect::<Result<_, _>>()?;
        if roles.is_empty() {
            return Err(FieldError::new(field("roles"), "is empty"));
        }
        let conditions = self.conditions.into_iter().map(|(claim, texts)| {
            let texts = match texts {
                OneOrMany::One(text) => vec![text],
                OneOrMany::Many(texts) => texts,
            };
            Ok((ClaimPath::parse(&field("if"), claim)?, texts))
        });
        let conditions = conditions.collect::<Result<_, FieldError>>()?;
        let em = |em: &String| EmPattern::parse(&field("ems"), em);
        let ems = bound(&field("ems"), self.ems, self.ems_from, |ems| ems.iter().map(em).collect())?;
        let user = |user: &String| Name::parse(&field("users"), user);
        let users = bound(&field("users"), self.users, self.users_from, |users| users.iter().map(user).collect())?;
        let grant = ClaimGrant { conditions, roles, ems, users };
        grant.check(at)?;
        Ok(grant)
    }
}

fn bound<T>(
    field: &str,
    to: Option<Vec<String>>,
    from: Option<String>,
    read: impl FnOnce(&[String]) -> Result<T, FieldError>,
) -> Result<GrantBinding<T>, FieldError> {
    match (to, from) {
        (None, None) => Ok(GrantBinding::Not),
        (None, Some(claim)) => Ok(GrantBinding::From(ClaimPath::parse(&format!("{field}_from"), claim)?)),
        (Some(to), None) => {
            check_count(field, to.len(), USERS_MAX)?;
            read(&to).map(GrantBinding::To)
        }
        (Some(_), Some(_)) => Err(FieldError::new(field, format!("conflicts with {field}_from; omit one of them"))),
    }
}

impl ClaimGrant {
    fn check(&self, at: &str) -> Result<(), FieldError> {
        let has = |role| self.roles.contains(&role);
        let wrong = |name: &str, problem: &str| Err(FieldError::new(format!("{at}.{name}"), problem));
        if has(Role::Ecm) == (self.ems == GrantBinding::Not) {
            return wrong("ems", "is required by the role ecm, and only allowed with it; set ems or ems_from");
        }
        if self.users != GrantBinding::Not && !has(Role::Manager) && !has(Role::Viewer) {
            return wrong("users", "is only allowed with the roles manager and viewer");
        }
        // Otherwise all principals of the issuer would have these rights: a principal can often choose the audience of its JWT.
        let is_for_oneself =
            self.roles.iter().all(|role| *role == Role::Viewer) && matches!(self.users, GrantBinding::From(_));
        if self.conditions.is_empty() && !is_for_oneself {
            return wrong("if", "is missing, so every JWT of this issuer would have these rights; name claims");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn sound() -> Value {
        json!({"issuers": [{
            "name": "k8s", "issuer": "https://kubernetes.default.svc", "audiences": ["linkis-rm"],
            "keys": "https://kubernetes.default.svc/openid/v1/jwks", "ca": "/ca.crt", "token_file": "/token",
            "grants": [
                {"if": {"sub": "system:serviceaccount:linkis:manager"}, "roles": ["manager"]},
                {"if": {"/kubernetes.io/namespace": ["linkis", "rm"]}, "roles": ["ecm"], "ems_from": "/kubernetes.io/node/name"},
                {"roles": ["viewer"], "users_from": "email"},
            ],
        }]})
    }

    fn told(config: &Value) -> Result<Vec<Issuer>, String> {
        let allowed = AllowedHosts::parse("kubernetes.default.svc").unwrap();
        read(config.to_string().as_bytes(), &allowed).map_err(|error| {
            let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
            format!("{error}: {source}")
        })
    }

    #[test]
    fn jwt_config_with_valid_fields_is_parsed() {
        let issuers = told(&sound()).unwrap();
        let [issuer] = issuers.as_slice() else { panic!("{issuers:?}") };
        assert_eq!((issuer.principal.0.as_str(), issuer.grants.len()), ("sub", 3));
        assert_eq!(issuer.grants[1].ems, GrantBinding::From(ClaimPath("/kubernetes.io/node/name".to_owned())));
        assert_eq!(issuer.grants[1].conditions.values().next().unwrap().len(), 2);
        assert!(matches!(&issuer.source, KeySource::Address { ca: Some(_), token: Some(_), .. }));
    }

    #[test]
    fn jwt_config_error_names_field() {
        let grant = |grant: Value| ("/issuers/0/grants/0", grant);
        let when = json!({"sub": "x"});
        for ((place, value), wrong) in [
            (("/issuers", json!([])), "issuers: has 0; 1 to 16 are allowed"),
            (("/issuers/0/name", json!("K8S")), "issuers[0].name: must be"),
            (("/issuers/0/name", json!("ecm")), "issuers[0].name: must be"),
            (("/issuers/0/issuer", json!("")), "issuers[0].issuer: is empty"),
            (("/issuers/0/audiences", json!([])), "issuers[0].audiences: has 0"),
            (("/issuers/0/audiences", json!([""])), "issuers[0].audiences: has an empty element"),
            (("/issuers/0/keys", json!("https://elsewhere/keys")), "--external-hosts"),
            (("/issuers/0/keys", json!("https://a:b@kubernetes.default.svc")), "must be http://HOST:PORT"),
            (("/issuers/0/keys", json!("http://kubernetes.default.svc")), "issuers[0].token_file: would be sent"),
            (("/issuers/0/keys", json!("/keys.json")), "issuers[0].ca: is only for keys at an https"),
            (("/issuers/0/grants", json!([])), "issuers[0].grants: has 0"),
            (("/issuers/0/principal", json!("")), "issuers[0].principal: is empty; name a claim"),
            (("/issuers/0/leeway", json!(1)), "unknown field `leeway`"),
            (
                grant(json!({"if": when, "roles": ["boss"]})),
                "issuers[0].grants[0].roles: \"boss\" is unknown; give one of ecm, manager",
            ),
            (grant(json!({"if": when, "roles": []})), "roles: is empty"),
            (grant(json!({"if": when, "roles": ["ecm"]})), "grants[0].ems: is required by the role ecm"),
            (grant(json!({"if": when, "roles": ["ecm"], "ems": ["*"]})), "matches every EM"),
            (grant(json!({"if": when, "roles": ["ecm"], "ems": ["h"], "ems_from": "sub"})), "omit one of them"),
            (
                grant(json!({"if": when, "roles": ["admin"], "users": ["alice"]})),
                "is only allowed with the roles manager and viewer",
            ),
            (grant(json!({"if": when, "roles": ["viewer"], "users": []})), "users: has 0"),
            (grant(json!({"roles": ["admin"]})), "grants[0].if: is missing"),
            (grant(json!({"roles": ["viewer"]})), "grants[0].if: is missing"),
            (grant(json!({"if": {"sub": 1}, "roles": ["viewer"]})), "it cannot be read"),
        ] {
            let mut config = sound();
            match config.pointer_mut(place) {
                Some(there) => *there = value,
                None => {
                    let (within, name) = place.rsplit_once('/').unwrap();
                    config.pointer_mut(within).unwrap()[name] = value;
                }
            }
            let error = told(&config).unwrap_err();
            assert!(error.contains(wrong), "{wrong}: {error}");
        }
        let mut twice = sound();
        let first = twice["issuers"][0].clone();
        twice["issuers"].as_array_mut().unwrap().push(first);
        assert!(told(&twice).unwrap_err().contains("issuers[1].name: is also the name"));
        assert!(told(&json!({"issuers": 1})).unwrap_err().contains("line 1 column"));
    }
}
