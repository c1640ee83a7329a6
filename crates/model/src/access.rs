//! Access rights: roles, the EMs and users that they are bound to, and the part of a call that they allow.
//!
//! A role gives a call one [`Permission`]. [`CallScope::of`] combines the permissions of all roles of a caller into the part of
//! the call that the caller may use. The reasons for a failed authentication are here too, with the texts that callers
//! receive.
//!
//! Never: verifies a credential, or reads a token from the tables. Callers: the authenticator and all services.

use std::{collections::BTreeSet, fmt, sync::Arc};

use super::{
    em::EmInstance,
    name::{FieldError, Name},
    scope::{Scope, USER},
};

text_enum! {
    /// A role of a caller, in ascending order of rights. Tokens and the configuration contain the texts.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Role {
        /// An EM; acts for its own EM instances.
        Ecm = "ecm",
        /// Requests and releases resources for users.
        Manager = "manager",
        /// Reads only.
        Viewer = "viewer",
        /// Operates the cluster: reads everything, drains EMs, audits and repairs the stored counters.
        Operator = "operator",
        /// All calls.
        Admin = "admin",
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Wildcard for any application or any host.
const ANY: &str = "*";

/// The EMs that a caller with the role `ecm` may act for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmPattern {
    /// Application name; `None` for any application.
    pub application: Option<String>,
    /// Instances of the application.
    pub instance: InstancePattern,
}

/// Matches the instance part of an EM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstancePattern {
    /// All instances.
    Any,
    /// All instances on one network host: `host1` matches `host1` and `host1:9102`.
    Host(String),
}

impl EmPattern {
    /// Returns the pattern for the EMs on one network host.
    pub fn of_host(application: Option<String>, host: impl Into<String>) -> Self {
        Self { application, instance: InstancePattern::Host(host.into()) }
    }

    /// Parses `application/host`, `host` (any application) or `application/*` (any host).
    ///
    /// # Errors
    /// An empty part, or a pattern that matches every EM.
    pub fn parse(field: &str, text: &str) -> Result<Self, FieldError> {
        let (application, host) = text.split_once('/').unwrap_or((ANY, text));
        let (application, host) = (Name::parse(field, application)?, Name::parse(field, host)?);
        let application = Some(application.to_string()).filter(|application| application != ANY);
        match host.as_str() {
            ANY if application.is_none() => {
                Err(FieldError::new(field, "matches every EM; name an application, a host, or both"))
            }
            ANY => Ok(Self { application, instance: InstancePattern::Any }),
            host => Ok(Self::of_host(application, host)),
        }
    }

    /// Returns whether the pattern matches the EM. Host names are compared without case.
    pub fn matches(&self, em: &EmInstance) -> bool {
        let of_application = self.application.as_ref().is_none_or(|name| name == em.application_name.as_str());
        let of_instance = match &self.instance {
            InstancePattern::Any => true,
            InstancePattern::Host(host) => {
                let instance = em.instance.as_str();
                host == instance || host.eq_ignore_ascii_case(host_of(instance))
            }
        };
        of_application && of_instance
    }
}

impl fmt::Display for EmPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = match &self.instance {
            InstancePattern::Any => ANY,
            InstancePattern::Host(host) => host,
        };
        write!(f, "{}/{host}", self.application.as_deref().unwrap_or(ANY))
    }
}

/// Returns the instance without its port, if it has a numeric port.
fn host_of(instance: &str) -> &str {
    match instance.rsplit_once(':') {
        Some((host, port)) if !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => instance,
    }
}

/// Maximum number of users or EMs in one caller's rights. A page of tickets is merged from one query per user, so the
/// number is bounded.
pub const USERS_MAX: usize = 32;

/// The rights of a caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rights {
    /// Roles of the caller.
    pub roles: BTreeSet<Role>,
    /// EMs that the role `ecm` may act for.
    pub ems: Vec<EmPattern>,
    /// Users whose tickets the roles `manager` and `viewer` cover; `None` for all users.
    pub users: Option<BTreeSet<Name>>,
}

impl Rights {
    /// Returns unrestricted rights.
    pub fn of_admin() -> Self {
        Self { roles: [Role::Admin].into(), ems: vec![], users: None }
    }

    /// Returns the rights of an EM that acts for `ems`.
    pub fn of_ecm(ems: Vec<EmPattern>) -> Self {
        Self { roles: [Role::Ecm].into(), ems, users: None }
    }

    /// Returns the role names, separated by commas, for display.
    pub fn role_names(&self) -> String {
        self.roles.iter().map(|role| role.as_str()).collect::<Vec<_>>().join(",")
    }
}

/// The permission that a role gives for one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Permission {
    /// The role does not permit the call.
    No,
    /// The role permits the call for its own EMs or users.
    Own,
    /// The role permits the call without restriction.
    All,
}

/// The part of a call that a caller's rights allow: everything, or certain EMs and users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallScope(Option<Arc<AccessScope>>);

/// EMs and users that a restricted call may concern; a match in either list permits the call.
#[derive(Debug, PartialEq, Eq)]
struct AccessScope {
    roles: String,
    ems: Vec<EmPattern>,
    users: BTreeSet<Name>,
}

impl CallScope {
    /// The unrestricted call scope.
    pub const ALL: Self = Self(None);

    /// Combines the `permission` of all roles in `rights`; `None` if no role permits the call.
    pub fn of(rights: &Rights, permission: impl Fn(Role) -> Permission) -> Option<Self> {
        let (mut ems, mut users, mut is_any) = (vec![], BTreeSet::new(), false);
        for role in &rights.roles {
            match (permission(*role), role, &rights.users) {
                (Permission::No, ..) => continue,
                (Permission::All, ..) | (Permission::Own, Role::Manager | Role::Viewer, None) => {
                    return Some(Self::ALL);
                }
                (Permission::Own, Role::Manager | Role::Viewer, Some(own)) => users.extend(own.iter().cloned()),
                (Permission::Own, Role::Ecm | Role::Operator | Role::Admin, _) => {
                    ems.extend(rights.ems.iter().cloned())
                }
            }
            is_any = true;
        }
        is_any.then(|| Self(Some(Arc::new(AccessScope { roles: rights.role_names(), ems, users }))))
    }

    /// Returns whether the call is unrestricted.
    pub fn is_all(&self) -> bool {
        self.0.is_none()
    }

    /// Returns the users that the call may concern; `None` for all users.
    pub fn users(&self) -> Option<&BTreeSet<Name>> {
        self.0.as_deref().map(|bound| &bound.users)
    }

    /// Returns whether the call may concern this user.
    pub fn has_user(&self, user: &Name) -> bool {
        self.users().is_none_or(|users| users.contains(user))
    }

    /// Returns whether the call may read the counters of a scope. A restricted call reads only scopes of its own users.
    pub fn has_scope(&self, scope: &Scope) -> bool {
        let user = scope.labels().get(USER);
        self.users().is_none_or(|users| user.is_some_and(|user| users.iter().any(|known| known.as_str() == user)))
    }

    /// Returns whether the call may concern this EM.
    fn has_em(&self, em: &EmInstance) -> bool {
        self.0.as_deref().is_none_or(|bound| bound.ems.iter().any(|pattern| pattern.matches(em)))
    }

    /// Checks that the call may concern this EM.
    ///
    /// # Errors
    /// [`Denied`] if it may not.
    pub fn check_em(&self, em: &EmInstance) -> Result<(), Denied> {
        if self.has_em(em) { Ok(()) } else { Err(self.denied(|| format!("the EM {em} among its own"))) }
    }

    /// Checks that the call may concern a ticket or request of this user on this EM. `em` is `None` if no EM is named.
    ///
    /// # Errors
    /// [`Denied`] if it may not.
    pub fn check(&self, em: Option<&EmInstance>, user: &Name) -> Result<(), Denied> {
        if self.has_user(user) || self.is_all() || em.is_some_and(|em| self.has_em(em)) {
            return Ok(());
        }
        Err(self.denied(|| match em {
            Some(em) => format!("the EM {em} among its own, or the user {user} among its users"),
            None => format!("an EM of its own, or the user {user} among its users"),
        }))
    }

    /// Returns the error for a call outside this call scope; `needs` names the missing right.
    pub fn denied(&self, needs: impl FnOnce() -> String) -> Denied {
        let roles = self.0.as_deref().map(|bound| bound.roles.clone()).unwrap_or_default();
        Denied { roles, needs: needs() }
    }
}

/// Reason for a failed authentication.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unauthenticated {
    /// The call has no token.
    #[error("the call has no token, and this service requires one; send \"authorization: Bearer TOKEN\"")]
    Missing,
    /// The token is unknown.
    #[error("the token of the call is unknown; create one with linkis-rm token create")]
    Unknown,
    /// The token has expired.
    #[error("the token of the call has expired; create another with linkis-rm token create")]
    Expired,
    /// The token was revoked.
    #[error("the token of the call was revoked; create another with linkis-rm token create")]
    Revoked,
    /// The client certificate of the connection has expired.
    #[error("the client certificate of this connection has expired; connect again with another")]
    CertificateExpired,
    /// The token is a rejected JWT, or an unknown token while JWTs are accepted.
    #[error(transparent)]
    Jwt(#[from] JwtRejection),
}

/// Maximum length of a JWT in bytes. The headers of a call are limited to 8 KB.
pub const JWT_BYTES_MAX: usize = 6 << 10;

/// Reason for the rejection of a JWT.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum JwtRejection {
    /// Longer than [`JWT_BYTES_MAX`].
    #[error(
        "the JWT of the call has more than {JWT_BYTES_MAX} bytes; configure its issuer to omit unused claims, groups \
            for example"
    )]
    TooLarge,
    /// Not a JWT that can be parsed.
    #[error("the token of the call is unknown, and it is not a well-formed JWT; check the token")]
    Malformed,
    /// The signature algorithm is not supported, or does not match the key.
    #[error(
        "the JWT of the call has an unsupported signature algorithm, or another than its key; sign with RS256, \
        ES256 or EdDSA"
    )]
    Algorithm,
    /// The configuration does not contain the issuer.
    #[error("the issuer of the call's JWT is unknown; add it to --jwt-config")]
    Issuer,
    /// The configuration does not list the audience for the issuer.
    #[error("the JWT of the call has another audience than --jwt-config allows for its issuer")]
    Audience,
    /// The issuer's key set does not contain the signing key.
    #[error(
        "the JWT of the call is signed with a key that its issuer does not publish; if the key is new, retry in some \
            seconds"
    )]
    UnknownKey,
    /// The signature does not verify.
    #[error("the signature of the call's JWT is invalid")]
    Signature,
    /// The `nbf` time is in the future.
    #[error("the JWT of the call is not valid yet; check the clocks")]
    NotYet,
    /// The `exp` time has passed.
    #[error("the JWT of the call has expired; request another from its issuer")]
    Expired,
    /// The key or the configuration that accepted the JWT is no longer valid.
    #[error(
        "the key of the call's JWT was withdrawn, or the configuration of its issuer has changed; retry, or request \
            another JWT"
    )]
    Withdrawn,
}

impl Unauthenticated {
    /// All reasons that do not concern JWTs.
    pub const ALL: [Self; 5] = [Self::Missing, Self::Unknown, Self::Expired, Self::Revoked, Self::CertificateExpired];
}

/// Error of a call that the caller's rights do not permit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("this caller is {}, and the call needs {needs}", if roles.is_empty() { "nothing" } else { roles })]
pub struct Denied {
    /// Role names of the caller; may be empty.
    pub roles: String,
    /// The missing right, for display.
    pub needs: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn em(application: &str, instance: &str) -> EmInstance {
        EmInstance::parse("em", application, instance).unwrap()
    }

    fn user(text: &str) -> Name {
        Name::parse("user", text).unwrap()
    }

    #[test]
    fn em_pattern_matches_only_its_host() {
        for (pattern, instance, matches) in [
            ("host1", "host1:9102", true),
            ("host1", "host1", true),
            ("HOST1", "host1:9102", true),
            ("host1", "host10:9102", false),
            ("host1", "host1:9102:9102", false),
            ("host1", "host1:", false),
            ("host1", "host1:x", false),
            ("host1", "xhost1:9102", false),
            ("host1:9102", "host1:9102", true),
            ("host1:9102", "host1:9103", false),
            ("host1:9102", "host1", false),
            ("[::1]", "[::1]:9102", true),
            ("a/host1", "host1:9102", true),
            ("b/host1", "host1:9102", false),
            ("a/*", "whatever", true),
            ("b/*", "whatever", false),
            ("*/host1", "host1:1", true),
        ] {
            let parsed = EmPattern::parse("em", pattern).unwrap();
            assert_eq!(parsed.matches(&em("a", instance)), matches, "{pattern} {instance}");
        }
        for wrong in ["", "*", "*/*", "/", "a/", "/b"] {
            assert!(EmPattern::parse("em", wrong).is_err(), "{wrong}");
        }
        assert!(
            !EmPattern::of_host(None, "*").matches(&em("a", "host1:1")),
            "the rights of a certificate name no user"
        );
    }

    #[test]
    fn rights_of_several_roles_are_their_union() {
        let users = || Some([user("alice")].into());
        let ems = || vec![EmPattern::of_host(None, "host1")];
        let rights = |roles: &[Role], users| Rights { roles: roles.iter().copied().collect(), ems: ems(), users };
        let own = |_| Permission::Own;
        let of = |roles: &[Role], users| CallScope::of(&rights(roles, users), own);
        assert_eq!(of(&[], users()), None);
        assert_eq!(of(&[Role::Manager], None), Some(CallScope::ALL));
        let manager = of(&[Role::Manager], users()).unwrap();
        assert!(manager.has_user(&user("alice")) && !manager.has_user(&user("bob")));
        assert!(manager.check_em(&em("a", "host1:1")).is_err(), "a manager has no EMs");
        let ecm = of(&[Role::Ecm], users()).unwrap();
        assert!(ecm.check_em(&em("a", "host1:1")).is_ok() && ecm.check_em(&em("a", "host2:1")).is_err());
        assert!(!ecm.has_user(&user("alice")), "an ecm has no users");
        let both = of(&[Role::Ecm, Role::Manager], users()).unwrap();
        assert!(both.check(Some(&em("a", "host1:1")), &user("bob")).is_ok());
        assert!(both.check(Some(&em("a", "host2:1")), &user("alice")).is_ok());
        let denied = both.check(Some(&em("a", "host2:1")), &user("bob")).unwrap_err();
        assert_eq!(denied.roles, "ecm,manager");
        assert!(both.check(None, &user("bob")).is_err());
        assert_eq!(CallScope::of(&rights(&[Role::Viewer], None), |_| Permission::No), None);
        assert_eq!(CallScope::of(&Rights::of_admin(), |_| Permission::All), Some(CallScope::ALL));
    }
}
