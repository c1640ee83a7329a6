//! Authentication and authorization of calls.
//!
//! [`Authenticator`] finds the caller of a call by token, JWT or certificate, and checks the access table. The edge calls
//! [`Authenticator::admit`] once per call and stores the result in the call's extensions. The services read the caller and
//! the call scope from there with the functions of this module.
//! Never: reads the database; passes credentials on to a service, because the edge removes the header.

use std::{pin::Pin, sync::Arc};

use tonic::{
    Request,
    codegen::http::{HeaderMap, header::AUTHORIZATION},
};

use rm_model::{
    access::{CallScope, Denied, Role, Unauthenticated},
    name::FieldError,
    principal::{Actor, Principal},
    token::is_of_service,
};
use rm_service::{
    error::Error,
    jwt::JwtAuthenticator,
    tokens::{Caller, TokenCache},
};
use rm_telemetry::metrics::Metrics;

use super::{
    access::{AccessTable, RequiredIdentity},
    convert, edge,
};

/// Prefix of a token in the `authorization` header, in any case.
const SCHEME: &str = "bearer ";

/// An authenticated caller and the scope of its call.
#[derive(Debug, Clone)]
pub struct AdmittedCaller {
    /// The caller and its rights.
    pub caller: Arc<Caller>,
    /// The part of the call that the rights allow.
    reach: CallScope,
    /// gRPC path of the call.
    method: &'static str,
    /// Address of the peer, if the call came over a connection.
    address: Option<edge::PeerAddress>,
    metrics: Metrics,
}

impl AdmittedCaller {
    /// Returns the part of the call that the caller's rights allow.
    pub fn reach(&self) -> &CallScope {
        &self.reach
    }

    /// Returns true if the caller is an operator or administrator.
    pub fn is_of_operator(&self) -> bool {
        let roles = &self.caller.rights.roles;
        roles.contains(&Role::Operator) || roles.contains(&Role::Admin)
    }

    fn log_denial(&self, denied: &Denied) {
        self.metrics.access.denied();
        log_denied(self.method, &self.caller, self.address, denied);
    }
}

/// Authenticator: finds the caller of a call and checks its role.
#[derive(Debug)]
pub struct Authenticator {
    tokens: TokenCache,
    /// Verifier of JWTs of the configured issuers; `None` if no issuer is configured.
    jwt: Option<Arc<JwtAuthenticator>>,
    /// Accept calls without credentials until the first token is created.
    is_open: bool,
    table: AccessTable,
    metrics: Metrics,
}

/// The parts of a call that authentication reads, before its message arrives.
#[derive(Debug, Clone, Copy)]
pub struct CallCredentials<'a> {
    /// gRPC path.
    pub path: &'a str,
    /// Headers of the call.
    pub headers: &'a HeaderMap,
    /// The caller that the certificate of the connection names, if it has one.
    pub certified: Option<&'a Arc<Caller>>,
    /// Address of the peer.
    pub address: Option<edge::PeerAddress>,
}

impl Authenticator {
    /// Creates an authenticator. If `is_open`, calls without credentials have all rights until the first token is
    /// created.
    pub fn new(tokens: TokenCache, jwt: Option<Arc<JwtAuthenticator>>, is_open: bool, metrics: Metrics) -> Self {
        Self { tokens, jwt, is_open, table: AccessTable::default(), metrics }
    }

    /// Authenticates a call and checks its role. Returns `None` for a call that needs no identity.
    ///
    /// # Errors
    /// - [`Error::Unauthenticated`] if the credentials are missing, unknown, expired or revoked.
    /// - [`Error::Denied`] if no role of the caller has a permission on the call.
    /// - [`Error::NoSuchMethod`] if no such call exists.
    pub fn admit(&self, call: &CallCredentials<'_>) -> Result<Option<AdmittedCaller>, Error> {
        let needed = self.table.needed(call.path);
        if let Some(RequiredIdentity::Nothing) = needed {
            return Ok(None);
        }
        let address = call.address.map(tracing::field::display);
        let caller = self.caller(call).inspect_err(|error| {
            self.metrics.access.unauthenticated(*error);
            tracing::warn!(address, call = %call.path, %error, "call rejected: the caller is not authenticated");
        })?;
        let Some(RequiredIdentity::Role(row)) = needed else { return Err(Error::NoSuchMethod) };
        let log_denial = |denied: &Denied| {
            self.metrics.access.denied();
            log_denied(row.method, &caller, call.address, denied);
        };
        let reach = row.reach(&caller.rights).inspect_err(log_denial)?;
        if row.is_of_administrators() {
            let (principal, call) = (&caller.principal, row.method);
            tracing::info!(%principal, address, call, "an administrator calls");
        }
        let metrics = self.metrics.clone();
        Ok(Some(AdmittedCaller { caller, reach, method: row.method, address: call.address, metrics }))
    }

    fn caller(&self, call: &CallCredentials<'_>) -> Result<Arc<Caller>, Unauthenticated> {
        if let Some(anonymous) = self.tokens.anonymous().filter(|_| self.is_open) {
            return Ok(anonymous);
        }
        let mut shown = call.headers.get_all(AUTHORIZATION).iter();
        match (shown.next(), shown.next()) {
            (None, _) => match call.certified {
                Some(certified) if certified.ended.is_over() => Err(Unauthenticated::CertificateExpired),
                Some(certified) => Ok(certified.clone()),
                None => Err(Unauthenticated::Missing),
            },
            (Some(shown), None) => self.shown(shown.to_str().ok().and_then(token).unwrap_or_default()),
            // Two credentials name no single caller.
            (Some(_), Some(_)) => Err(Unauthenticated::Unknown),
        }
    }

    fn shown(&self, token: &str) -> Result<Arc<Caller>, Unauthenticated> {
        match &self.jwt {
            Some(jwt) if !is_of_service(token) => Ok(jwt.find(token)?),
            _ => self.tokens.find(token),
        }
    }
}

fn token(header: &str) -> Option<&str> {
    let (scheme, token) = header.split_at_checked(SCHEME.len())?;
    scheme.eq_ignore_ascii_case(SCHEME).then_some(token)
}

fn log_denied(call: &str, caller: &Caller, address: Option<edge::PeerAddress>, denied: &Denied) {
    let (Denied { roles, needs }, address) = (denied, address.map(tracing::field::display));
    tracing::warn!(principal = %caller.principal, address, roles, call, needs, "a call is denied");
}

/// Returns the authenticated caller of a call; `None` for a call that needs no identity.
pub fn admitted<M>(call: &Request<M>) -> Option<&AdmittedCaller> {
    call.extensions().get()
}

/// Returns the principal of a call; anonymous for a call that needs no identity.
pub fn of_call<M>(call: &Request<M>) -> Principal {
    admitted(call).map_or(Principal::Anonymous, |admitted| admitted.caller.principal.clone())
}

/// Returns the actor of a call, for the history: its principal and address.
pub fn actor<M>(call: &Request<M>) -> Actor {
    let address = admitted(call).and_then(|admitted| admitted.address);
    Actor { principal: of_call(call), address: address.map(|address| address.to_string().into()), reason: None }
}

/// Returns the actor of a call with the given reason. An empty text gives no reason.
///
/// # Errors
/// A reason that is longer than a name may be, or that has control characters.
pub fn actor_with_reason<M>(call: &Request<M>, reason: &str) -> Result<Actor, FieldError> {
    Ok(Actor { reason: convert::operator::reason(reason)?, ..actor(call) })
}

/// Returns true if an operator or administrator makes the call.
pub fn is_of_operator<M>(call: &Request<M>) -> bool {
    admitted(call).is_some_and(AdmittedCaller::is_of_operator)
}

/// Returns the part of the call that the caller's rights allow.
///
/// # Errors
/// [`Error::Internal`] if the call was not authenticated.
pub fn reach<M>(call: &Request<M>) -> Result<&CallScope, Error> {
    admitted(call).map(AdmittedCaller::reach).ok_or_else(unasked)
}

/// Checks that the call scope covers the objects of the call, and counts and logs a denial.
///
/// # Errors
/// [`Error::Denied`], and those of [`reach`].
pub fn check<M>(call: &Request<M>, check: impl FnOnce(&CallScope) -> Result<(), Denied>) -> Result<(), Error> {
    let admitted = admitted(call).ok_or_else(unasked)?;
    Ok(check(&admitted.reach).inspect_err(|denied| admitted.log_denial(denied))?)
}

/// Checks that an administrator makes the call. `needs` names the missing right in the error.
///
/// # Errors
/// [`Error::Denied`], and those of [`reach`].
pub fn check_admin<M>(call: &Request<M>, needs: &str) -> Result<(), Error> {
    let rights = &admitted(call).ok_or_else(unasked)?.caller.rights;
    let denied = || Denied { roles: rights.role_names(), needs: needs.to_owned() };
    check(call, |_| if rights.roles.contains(&Role::Admin) { Ok(()) } else { Err(denied()) })
}

/// Runs `work` until it ends or the caller's credentials expire or are revoked.
///
/// # Errors
/// [`Error::Unauthenticated`] when the credentials end, and those of `work`.
pub async fn while_admitted<M, T, F>(call: &Request<M>, work: Pin<Box<F>>) -> Result<T, Error>
where
    F: Future<Output = Result<T, Error>> + ?Sized,
{
    let Some(ended) = admitted(call).map(|admitted| &admitted.caller.ended) else { return work.await };
    tokio::select! {
        done = work => done,
        why = ended.why() => Err(why.into()),
    }
}

fn unasked() -> Error {
    Error::defect("no call has been authenticated")
}
