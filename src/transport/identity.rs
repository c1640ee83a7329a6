//! Who calls: the edge finds it out, once per call, and everything behind carries it along.

use std::{pin::Pin, sync::Arc};

use tonic::{
    Request,
    codegen::http::{HeaderMap, header::AUTHORIZATION},
};

use crate::{
    domain::{
        access::{Denied, Reach, Role, Unauthenticated},
        name::FieldError,
        principal::{Actor, Principal},
        token::is_of_service,
    },
    error::Error,
    metrics::Metrics,
    service::{
        jwt::Jwt,
        tokens::{Caller, Tokens},
    },
};

use super::{
    access::{Needed, Table},
    convert, edge,
};

/// What stands before a token.
const SCHEME: &str = "bearer ";

/// A caller that was let in, and what its call may be about.
#[derive(Debug, Clone)]
pub struct Admitted {
    /// Who it is.
    pub caller: Arc<Caller>,
    /// What is left of the call.
    reach: Reach,
    /// Which call.
    method: &'static str,
    /// Where it comes from.
    address: Option<edge::PeerAddress>,
    metrics: Metrics,
}

impl Admitted {
    /// What the call may be about.
    pub fn reach(&self) -> &Reach {
        &self.reach
    }

    /// Whether somebody calls who runs the cluster.
    pub fn is_of_operator(&self) -> bool {
        let roles = &self.caller.rights.roles;
        roles.contains(&Role::Operator) || roles.contains(&Role::Admin)
    }

    fn tell(&self, denied: &Denied) {
        self.metrics.access.denied();
        tell_denied(self.method, &self.caller, self.address, denied);
    }
}

/// Finds out who calls, and lets in whoever may.
#[derive(Debug)]
pub struct Identity {
    tokens: Tokens,
    /// Of whose issuers JWTs are believed; `None` if none are.
    jwt: Option<Arc<Jwt>>,
    /// Whether nobody is asked as long as there are no tokens.
    is_open: bool,
    table: Table,
    metrics: Metrics,
}

/// What is known of a call before it is read.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    /// Which call.
    pub path: &'a str,
    /// What comes with it.
    pub headers: &'a HeaderMap,
    /// Whom the certificate of its connection is for.
    pub certified: Option<&'a Arc<Caller>>,
    /// Where it comes from.
    pub address: Option<edge::PeerAddress>,
}

impl Identity {
    /// By these tokens, and JWTs; if `is_open`, everybody may do everything as long as there are no tokens.
    pub fn new(tokens: Tokens, jwt: Option<Arc<Jwt>>, is_open: bool, metrics: Metrics) -> Self {
        Self { tokens, jwt, is_open, table: Table::default(), metrics }
    }

    /// Lets a call in; `None` if nobody need know who makes it.
    ///
    /// # Errors
    /// [`Error::Unauthenticated`], [`Error::Denied`], [`Error::NoSuchMethod`].
    pub fn admit(&self, call: &Call<'_>) -> Result<Option<Admitted>, Error> {
        let needed = self.table.needed(call.path);
        if let Some(Needed::Nothing) = needed {
            return Ok(None);
        }
        let address = call.address.map(tracing::field::display);
        let caller = self.caller(call).inspect_err(|error| {
            self.metrics.access.unauthenticated(*error);
            tracing::warn!(address, call = %call.path, %error, "a call is refused: it is not known who makes it");
        })?;
        let Some(Needed::Role(row)) = needed else { return Err(Error::NoSuchMethod) };
        let tell = |denied: &Denied| {
            self.metrics.access.denied();
            tell_denied(row.method, &caller, call.address, denied);
        };
        let reach = row.reach(&caller.rights).inspect_err(tell)?;
        if row.is_of_administrators() {
            let (principal, call) = (&caller.principal, row.method);
            tracing::info!(%principal, address, call, "an administrator calls");
        }
        let metrics = self.metrics.clone();
        Ok(Some(Admitted { caller, reach, method: row.method, address: call.address, metrics }))
    }

    fn caller(&self, call: &Call<'_>) -> Result<Arc<Caller>, Unauthenticated> {
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
            // Which of them would be meant?
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

/// Logs that somebody wanted what he may not.
fn tell_denied(call: &str, caller: &Caller, address: Option<edge::PeerAddress>, denied: &Denied) {
    let (Denied { roles, needs }, address) = (denied, address.map(tracing::field::display));
    tracing::warn!(principal = %caller.principal, address, roles, call, needs, "a call is denied");
}

/// Who makes a call; `None` if nobody need know.
pub fn admitted<M>(call: &Request<M>) -> Option<&Admitted> {
    call.extensions().get()
}

/// Who makes a call, by name; anonymous if nobody need know.
pub fn of_call<M>(call: &Request<M>) -> Principal {
    admitted(call).map_or(Principal::Anonymous, |admitted| admitted.caller.principal.clone())
}

/// Who makes a call that only operators and administrators may make, and where it comes from.
pub fn actor<M>(call: &Request<M>) -> Actor {
    let address = admitted(call).and_then(|admitted| admitted.address);
    Actor { principal: of_call(call), address: address.map(|address| address.to_string().into()), reason: None }
}

/// The same with why they make it; an empty text gives no reason.
///
/// # Errors
/// If it is longer than a name may be, or has control characters.
pub fn actor_with_reason<M>(call: &Request<M>, reason: &str) -> Result<Actor, FieldError> {
    Ok(Actor { reason: convert::operator::reason(reason)?, ..actor(call) })
}

/// Whether a call is made by somebody who runs the cluster.
pub fn is_of_operator<M>(call: &Request<M>) -> bool {
    admitted(call).is_some_and(Admitted::is_of_operator)
}

/// What a call may be about.
///
/// # Errors
/// [`Error::Internal`] if nobody has found that out.
pub fn reach<M>(call: &Request<M>) -> Result<&Reach, Error> {
    admitted(call).map(Admitted::reach).ok_or_else(unasked)
}

/// Whether a call may be about what it turned out to be about.
///
/// # Errors
/// [`Error::Denied`]; as [`reach`].
pub fn check<M>(call: &Request<M>, check: impl FnOnce(&Reach) -> Result<(), Denied>) -> Result<(), Error> {
    let admitted = admitted(call).ok_or_else(unasked)?;
    Ok(check(&admitted.reach).inspect_err(|denied| admitted.tell(denied))?)
}

/// Whether an administrator makes a call; otherwise it needs what is said.
///
/// # Errors
/// [`Error::Denied`]; as [`reach`].
pub fn check_admin<M>(call: &Request<M>, needs: &str) -> Result<(), Error> {
    let rights = &admitted(call).ok_or_else(unasked)?.caller.rights;
    let denied = || Denied { roles: rights.role_names(), needs: needs.to_owned() };
    check(call, |_| if rights.roles.contains(&Role::Admin) { Ok(()) } else { Err(denied()) })
}

/// Carries out what may take long, for no longer than its caller may call.
///
/// # Errors
/// [`Error::Unauthenticated`]; as `work`.
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
    Error::defect("nobody has asked who calls")
}
