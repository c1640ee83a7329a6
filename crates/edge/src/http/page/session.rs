//! Credentials of a viewer: a token in the header of gRPC, or in a cookie.
//!
//! The cookie is for browsers, whose event streams have no headers of their own. No script can read it, and no other
//! site can cause its use. The authenticator of gRPC decides; this module stores no session. Callers: `api`, `events`,
//! and the sign-in form.

use std::sync::Arc;

use axum::{
    Extension,
    body::Body,
    extract::State,
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use crate::{
    authenticator::{AdmittedCaller, CallCredentials},
    http::connection_lifetime::ConnectionLifetime,
};
use rm_service::error::Error;

use super::{
    PageServices, PageSlot,
    api::{ApiErrorReply, header_value, json_answer},
};

/// Path of the call that a viewer must be allowed to make.
pub const WATCH: &str = "/linkis.rm.v1.UsageService/Watch";

/// Name of the cookie without TLS.
const COOKIE: &str = "linkis_rm_token";
/// Name of the cookie under TLS. Its prefix prevents other machines of the same domain from setting it.
const SECURE_COOKIE: &str = "__Host-linkis_rm_token";

/// Maximum length of a token, in bytes. Browsers store no longer cookies.
const TOKEN_BYTES_MAX: usize = 4000;

/// Maximum size of the sign-in form, in bytes.
const FORM_BYTES_MAX: usize = 3 * TOKEN_BYTES_MAX;

const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

fn cookie_name(visit: &ConnectionLifetime) -> &'static str {
    if visit.is_encrypted { SECURE_COOKIE } else { COOKIE }
}

/// Returns the credentials of a request in the form of gRPC: the header, or else the cookie.
pub fn shown(headers: &HeaderMap, visit: &ConnectionLifetime) -> Option<HeaderValue> {
    if let Some(shown) = headers.get(header::AUTHORIZATION) {
        return Some(shown.clone());
    }
    let pairs = headers.get_all(header::COOKIE).iter().filter_map(|cookies| cookies.to_str().ok());
    let mut pairs = pairs.flat_map(|cookies| cookies.split(';')).filter_map(|pair| pair.trim().split_once('='));
    let (_, token) = pairs.find(|(name, _)| *name == cookie_name(visit))?;
    bearer(token).ok()
}

fn bearer(token: &str) -> Result<HeaderValue, ApiErrorReply> {
    let mut value = header_value(&format!("Bearer {token}"))?;
    value.set_sensitive(true);
    Ok(value)
}

/// Authenticates a viewer and checks that the viewer may watch.
///
/// # Errors
/// [`Error::Unauthenticated`], [`Error::Denied`].
pub fn admit(
    site: &PageServices,
    shown: Option<HeaderValue>,
    visit: &ConnectionLifetime,
) -> Result<AdmittedCaller, Error> {
    admit_to(site, WATCH, shown, visit)
}

/// Authenticates a viewer for the call at `path`.
///
/// # Errors
/// [`Error::Unauthenticated`], [`Error::Denied`].
pub fn admit_to(
    site: &PageServices,
    path: &str,
    shown: Option<HeaderValue>,
    visit: &ConnectionLifetime,
) -> Result<AdmittedCaller, Error> {
    let mut headers = HeaderMap::new();
    shown.and_then(|shown| headers.insert(header::AUTHORIZATION, shown));
    let call = CallCredentials { path, headers: &headers, certified: None, address: Some(visit.peer.into()) };
    site.identity.admit(&call)?.ok_or_else(|| Error::defect("callers are not authenticated"))
}

/// Returns the principal and roles of a viewer, as the page gets them.
pub fn who(admitted: &AdmittedCaller) -> Value {
    let caller = &admitted.caller;
    let is_known = caller.principal != rm_model::principal::Principal::Anonymous;
    let roles: Vec<_> = caller.rights.roles.iter().map(|role| role.as_str()).collect();
    json!({"principal": caller.principal.as_str(), "roles": roles, "authentication": is_known})
}

/// Returns whether the viewer is signed in. Missing credentials are a normal result and no error.
pub async fn status(
    State(slot): State<PageSlot>,
    Extension(visit): Extension<Arc<ConnectionLifetime>>,
    headers: HeaderMap,
) -> Result<Response, ApiErrorReply> {
    let site = slot.site()?;
    let shown = shown(&headers, &visit);
    let reply = match admit(&site, shown.clone(), &visit) {
        Ok(_) => json!({"signed_in": true}),
        Err(Error::Unauthenticated(_)) if shown.is_none() => json!({"signed_in": false, "why": ""}),
        Err(error @ (Error::Unauthenticated(_) | Error::Denied(_))) => {
            json!({"signed_in": false, "why": error.to_string()})
        }
        Err(error) => return Err(error.into()),
    };
    Ok(json_answer(reply.to_string()))
}

/// Stores a token in the cookie, if it permits watching.
///
/// # Errors
/// 400, 401 or 413 for a missing or invalid token; 403 for a token without the permission, or a request of another
/// site.
pub async fn sign_in(
    State(slot): State<PageSlot>,
    Extension(visit): Extension<Arc<ConnectionLifetime>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiErrorReply> {
    let site = slot.site()?;
    check_site(&headers)?;
    let too_long = |_| ApiErrorReply::new(StatusCode::PAYLOAD_TOO_LARGE, "the token is not valid: it is too long");
    let form = axum::body::to_bytes(body, FORM_BYTES_MAX).await.map_err(too_long)?;
    let token = form_urlencoded::parse(&form).find(|(name, _)| name == "token").map(|(_, token)| token);
    let token = token.ok_or_else(|| ApiErrorReply::new(StatusCode::BAD_REQUEST, "the form has no token"))?;
    let fits = |c: char| c.is_ascii_graphic() && !matches!(c, '"' | ',' | ';' | '\\');
    if token.len() > TOKEN_BYTES_MAX || !token.chars().all(fits) {
        return Err(ApiErrorReply::new(StatusCode::UNAUTHORIZED, "the token is not valid, or too long for a browser"));
    }
    admit(&site, Some(bearer(&token)?), &visit)?;
    Ok(with_cookie(&visit, &token, ""))
}

/// Removes the cookie.
///
/// # Errors
/// 403 for a request of another site.
pub async fn sign_out(
    Extension(visit): Extension<Arc<ConnectionLifetime>>,
    headers: HeaderMap,
) -> Result<Response, ApiErrorReply> {
    check_site(&headers)?;
    Ok(with_cookie(&visit, "", "; Max-Age=0"))
}

/// Returns a response that sets the cookie until the browser closes or the viewer signs out.
fn with_cookie(visit: &ConnectionLifetime, token: &str, more: &str) -> Response {
    let secure = if visit.is_encrypted { "; Secure" } else { "" };
    let cookie = format!("{}={token}; Path=/; HttpOnly; SameSite=Strict{secure}{more}", cookie_name(visit));
    (StatusCode::NO_CONTENT, [(header::SET_COOKIE, cookie), (header::CACHE_CONTROL, "no-store".to_owned())])
        .into_response()
}

/// Rejects requests that another site causes. Browsers name the site in a header of its own over TLS or on the same
/// machine, and otherwise in the origin.
fn check_site(headers: &HeaderMap) -> Result<(), ApiErrorReply> {
    let is_own_site = match headers.get(FETCH_SITE).map(HeaderValue::as_bytes) {
        None => true,
        Some(site) => matches!(site, b"same-origin" | b"none"),
    };
    let is_own_origin = headers.get(header::ORIGIN).is_none_or(|origin| {
        let host = origin.to_str().ok().and_then(|origin| origin.split_once("://")).map(|(_, host)| host);
        host.is_some() && host == headers.get(header::HOST).and_then(|host| host.to_str().ok())
    });
    if is_own_site && is_own_origin {
        return Ok(());
    }
    Err(ApiErrorReply::new(StatusCode::FORBIDDEN, "the request is from another site"))
}
