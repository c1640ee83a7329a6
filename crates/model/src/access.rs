//! Who may do what: roles, what they are bound to, and what that leaves of a call.

use std::{collections::BTreeSet, fmt, sync::Arc};

use super::{
    em::EmInstance,
    name::{FieldError, Name},
    scope::{Scope, USER},
};

/// What a caller is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// A host that starts engines: speaks for itself.
    Ecm,
    /// Asks for resources for users, and gives them back.
    Manager,
    /// Looks.
    Viewer,
    /// Runs the cluster: sees everything, takes hosts out, and proves that the books are in order.
    Operator,
    /// May do everything.
    Admin,
}

impl Role {
    /// All there are, the least mighty first.
    pub const ALL: [Self; 5] = [Self::Ecm, Self::Manager, Self::Viewer, Self::Operator, Self::Admin];

    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ecm => "ecm",
            Self::Manager => "manager",
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }

    /// The reverse of [`Role::as_str`].
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.as_str() == text)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// For any application or instance.
const ANY: &str = "*";

/// Which EMs a host may speak for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmPattern {
    /// Only of this application; `None` for any.
    pub application: Option<String>,
    /// Which instances.
    pub instance: InstancePattern,
}

/// Which instances of an EM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstancePattern {
    /// All.
    Any,
    /// Those on a host: `host1` is also for `host1:9102`.
    Host(String),
}

impl EmPattern {
    /// The EMs on one host.
    pub fn of_host(application: Option<String>, host: impl Into<String>) -> Self {
        Self { application, instance: InstancePattern::Host(host.into()) }
    }

    /// As a person types it: `application/host`, `host` for any application, `*` for any host.
    ///
    /// # Errors
    /// If it is empty, or for everything.
    pub fn parse(field: &str, text: &str) -> Result<Self, FieldError> {
        let (application, host) = text.split_once('/').unwrap_or((ANY, text));
        let (application, host) = (Name::parse(field, application)?, Name::parse(field, host)?);
        let application = Some(application.to_string()).filter(|application| application != ANY);
        match host.as_str() {
            ANY if application.is_none() => {
                Err(FieldError::new(field, "is for all hosts there are; name an application, a host, or both"))
            }
            ANY => Ok(Self { application, instance: InstancePattern::Any }),
            host => Ok(Self::of_host(application, host)),
        }
    }

    /// Whether it is for this EM.
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

/// What stands before the port, if there is one.
fn host_of(instance: &str) -> &str {
    match instance.rsplit_once(':') {
        Some((host, port)) if !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => instance,
    }
}

/// How many users, or EMs, a caller may be bound to: a page of its tickets is gathered from the first of each.
pub const USERS_MAX: usize = 32;

/// What a caller may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rights {
    /// What it is.
    pub roles: BTreeSet<Role>,
    /// As an ecm, for which EMs it speaks.
    pub ems: Vec<EmPattern>,
    /// As a manager or viewer, whose tickets it deals with; `None` for everybody's.
    pub users: Option<BTreeSet<Name>>,
}

impl Rights {
    /// Everything.
    pub fn of_admin() -> Self {
        Self { roles: [Role::Admin].into(), ems: vec![], users: None }
    }

    /// A host that speaks for itself.
    pub fn of_ecm(ems: Vec<EmPattern>) -> Self {
        Self { roles: [Role::Ecm].into(), ems, users: None }
    }

    /// Its roles, for people.
    pub fn role_names(&self) -> String {
        self.roles.iter().map(|role| role.as_str()).collect::<Vec<_>>().join(",")
    }
}

/// What a role may do with a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Permission {
    /// Nothing.
    No,
    /// What concerns the EMs or users that its holder is bound to.
    Own,
    /// Everything.
    All,
}

/// What is left of a call to one caller: everything, or what concerns certain EMs or users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reach(Option<Arc<Bound>>);

/// What a call may be about: one of these EMs, or one of these users.
#[derive(Debug, PartialEq, Eq)]
struct Bound {
    roles: String,
    ems: Vec<EmPattern>,
    users: BTreeSet<Name>,
}

impl Reach {
    /// No bounds at all.
    pub const ALL: Self = Self(None);

    /// What a caller with these rights may do with a call that gives each role this `permission`; `None` for nothing.
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
        is_any.then(|| Self(Some(Arc::new(Bound { roles: rights.role_names(), ems, users }))))
    }

    /// Whether it has no bounds.
    pub fn is_all(&self) -> bool {
        self.0.is_none()
    }

    /// Whose tickets it is about; `None` for everybody's.
    pub fn users(&self) -> Option<&BTreeSet<Name>> {
        self.0.as_deref().map(|bound| &bound.users)
    }

    /// Whether it reaches what is this user's.
    pub fn has_user(&self, user: &Name) -> bool {
        self.users().is_none_or(|users| users.contains(user))
    }

    /// Whether it reaches the counters of a scope: all are reached without bounds, else those of one of its users.
    pub fn has_scope(&self, scope: &Scope) -> bool {
        let user = scope.labels().get(USER);
        self.users().is_none_or(|users| user.is_some_and(|user| users.iter().any(|known| known.as_str() == user)))
    }

    /// Whether it reaches this EM.
    fn has_em(&self, em: &EmInstance) -> bool {
        self.0.as_deref().is_none_or(|bound| bound.ems.iter().any(|pattern| pattern.matches(em)))
    }

    /// Whether the call may be about this EM.
    ///
    /// # Errors
    /// [`Denied`] if not.
    pub fn check_em(&self, em: &EmInstance) -> Result<(), Denied> {
        if self.has_em(em) { Ok(()) } else { Err(self.denied(|| format!("the EM {em} among its own"))) }
    }

    /// Whether the call may be about what this user has, or wants, on this EM; `None` for whichever EM.
    ///
    /// # Errors
    /// [`Denied`] if not.
    pub fn check(&self, em: Option<&EmInstance>, user: &Name) -> Result<(), Denied> {
        if self.has_user(user) || self.is_all() || em.is_some_and(|em| self.has_em(em)) {
            return Ok(());
        }
        Err(self.denied(|| match em {
            Some(em) => format!("the EM {em} among its own, or the user {user} among its users"),
            None => format!("an EM of its own, or the user {user} among its users"),
        }))
    }

    /// Why a call is not within it.
    pub fn denied(&self, needs: impl FnOnce() -> String) -> Denied {
        let roles = self.0.as_deref().map(|bound| bound.roles.clone()).unwrap_or_default();
        Denied { roles, needs: needs() }
    }
}

/// Why nobody is let in with what was shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unauthenticated {
    /// Nothing was.
    #[error("this service asks who calls, and the call has no token; send \"authorization: Bearer TOKEN\"")]
    Missing,
    /// There is no such token.
    #[error("the token of the call is none that is known; linkis-rm tokens create makes one")]
    Unknown,
    /// Its time is over.
    #[error("the time of the call's token is over; linkis-rm tokens create makes another")]
    Expired,
    /// Somebody has revoked it.
    #[error("the token of the call was revoked; linkis-rm tokens create makes another")]
    Revoked,
    /// It is a client's certificate whose time is over.
    #[error("the time of the certificate that this connection began with is over; connect again with another")]
    CertificateExpired,
    /// It is a JWT, or none of this service's tokens where JWTs are believed.
    #[error(transparent)]
    Jwt(#[from] BadJwt),
}

/// The longest JWT that is read, in bytes: the headers of a call have 8 KB.
pub const JWT_BYTES_MAX: usize = 6 << 10;

/// Why a JWT is not believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadJwt {
    /// It is too long.
    #[error(
        "the JWT of the call has more than {JWT_BYTES_MAX} bytes; have its issuer leave out what nobody asks for here, groups for example"
    )]
    TooLarge,
    /// It is none.
    #[error("the token of the call is none of this service's, and no JWT that can be read")]
    Malformed,
    /// It is signed in a way that nobody is believed by.
    #[error("the JWT of the call is signed neither by RS256 nor ES256 nor EdDSA, or otherwise than its key is for")]
    Algorithm,
    /// Whoever has issued it is unknown.
    #[error("the JWT of the call is of an issuer that --jwt-config does not name")]
    Issuer,
    /// It is meant for others.
    #[error("the JWT of the call is for others: its audience is none of those that --jwt-config names for its issuer")]
    Audience,
    /// Its key is unknown.
    #[error(
        "the JWT of the call is signed with a key that its issuer does not tell of; if the key is new, it is known in some seconds"
    )]
    UnknownKey,
    /// Its signature is wrong.
    #[error("the signature of the call's JWT is wrong")]
    Signature,
    /// Its time has not come.
    #[error("the JWT of the call is not good yet; are the clocks right?")]
    NotYet,
    /// Its time is over.
    #[error("the time of the call's JWT is over; ask its issuer for another")]
    Expired,
    /// The key or the configuration by which it was believed is not in force any more.
    #[error(
        "the key of the call's JWT was withdrawn, or what is believed of its issuer has changed; try again, or ask for another"
    )]
    Withdrawn,
}

impl Unauthenticated {
    /// All there are.
    pub const ALL: [Self; 5] = [Self::Missing, Self::Unknown, Self::Expired, Self::Revoked, Self::CertificateExpired];
}

/// A caller may not do what it wants.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("this caller is {}, and the call needs {needs}", if roles.is_empty() { "nothing" } else { roles })]
pub struct Denied {
    /// Its roles.
    pub roles: String,
    /// What it would need.
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
    fn a_pattern_is_for_its_own_host_and_no_other() {
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
        assert!(!EmPattern::of_host(None, "*").matches(&em("a", "host1:1")), "of a certificate, it is a name");
    }

    #[test]
    fn what_is_left_is_what_any_role_leaves() {
        let users = || Some([user("alice")].into());
        let ems = || vec![EmPattern::of_host(None, "host1")];
        let rights = |roles: &[Role], users| Rights { roles: roles.iter().copied().collect(), ems: ems(), users };
        let own = |_| Permission::Own;
        let of = |roles: &[Role], users| Reach::of(&rights(roles, users), own);
        assert_eq!(of(&[], users()), None);
        assert_eq!(of(&[Role::Manager], None), Some(Reach::ALL));
        let manager = of(&[Role::Manager], users()).unwrap();
        assert!(manager.has_user(&user("alice")) && !manager.has_user(&user("bob")));
        assert!(manager.check_em(&em("a", "host1:1")).is_err(), "a manager's EMs are nobody's");
        let ecm = of(&[Role::Ecm], users()).unwrap();
        assert!(ecm.check_em(&em("a", "host1:1")).is_ok() && ecm.check_em(&em("a", "host2:1")).is_err());
        assert!(!ecm.has_user(&user("alice")), "an ecm's users are nobody's");
        let both = of(&[Role::Ecm, Role::Manager], users()).unwrap();
        assert!(both.check(Some(&em("a", "host1:1")), &user("bob")).is_ok());
        assert!(both.check(Some(&em("a", "host2:1")), &user("alice")).is_ok());
        let denied = both.check(Some(&em("a", "host2:1")), &user("bob")).unwrap_err();
        assert_eq!(denied.roles, "ecm,manager");
        assert!(both.check(None, &user("bob")).is_err());
        assert_eq!(Reach::of(&rights(&[Role::Viewer], None), |_| Permission::No), None);
        assert_eq!(Reach::of(&Rights::of_admin(), |_| Permission::All), Some(Reach::ALL));
    }
}
