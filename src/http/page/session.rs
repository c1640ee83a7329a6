//! Who looks: whoever shows a token, in the header that gRPC has or, because a browser's streams have no headers of their own, in a cookie
//! that no script can read and no other site can have sent.

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
    error::Error,
    http::visit::Visit,
    transport::identity::{Admitted, Call},
};

use super::{
    Site, Slot,
    api::{Answer, header_value, json_answer},
};

/// The call that whoever looks must be allowed to make.
pub const WATCH: &str = "/linkis.rm.v1.UsageService/Watch";

/// The cookie. Under TLS, its name keeps other hosts of the same domain from setting it.
const COOKIE: &str = "linkis_rm_token";
const SECURE_COOKIE: &str = "__Host-linkis_rm_token";

/// How long a token may be: a browser keeps no longer cookie.
const TOKEN_BYTES_MAX: usize = 4000;

/// How long what is sent to sign in may be.
const FORM_BYTES_MAX: usize = 3 * TOKEN_BYTES_MAX;

const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

fn cookie_name(visit: &Visit) -> &'static str {
    if visit.is_encrypted { SECURE_COOKIE } else { COOKIE }
}

/// What somebody shows, as gRPC has it: the header, or else the cookie.
pub fn shown(headers: &HeaderMap, visit: &Visit) -> Option<HeaderValue> {
    if let Some(shown) = headers.get(header::AUTHORIZATION) {
        return Some(shown.clone());
    }
    let pairs = headers.get_all(header::COOKIE).iter().filter_map(|cookies| cookies.to_str().ok());
    let mut pairs = pairs.flat_map(|cookies| cookies.split(';')).filter_map(|pair| pair.trim().split_once('='));
    let (_, token) = pairs.find(|(name, _)| *name == cookie_name(visit))?;
    bearer(token).ok()
}

fn bearer(token: &str) -> Result<HeaderValue, Answer> {
    let mut value = header_value(&format!("Bearer {token}"))?;
    value.set_sensitive(true);
    Ok(value)
}

/// Who looks, if he may.
///
/// # Errors
/// [`Error::Unauthenticated`], [`Error::Denied`].
pub fn admit(site: &Site, shown: Option<HeaderValue>, visit: &Visit) -> Result<Admitted, Error> {
    admit_to(site, WATCH, shown, visit)
}

/// The same of another call, which is named by its path.
pub fn admit_to(site: &Site, path: &str, shown: Option<HeaderValue>, visit: &Visit) -> Result<Admitted, Error> {
    let mut headers = HeaderMap::new();
    shown.and_then(|shown| headers.insert(header::AUTHORIZATION, shown));
    let call = Call { path, headers: &headers, certified: None, address: Some(visit.peer.into()) };
    site.identity.admit(&call)?.ok_or_else(|| Error::defect("nobody need be known who calls"))
}

/// What the page is told of who looks.
pub fn who(admitted: &Admitted) -> Value {
    let caller = &admitted.caller;
    let is_known = caller.principal != crate::domain::principal::Principal::Anonymous;
    let roles: Vec<_> = caller.rights.roles.iter().map(|role| role.as_str()).collect();
    json!({"principal": caller.principal.as_str(), "roles": roles, "authentication": is_known})
}

/// Tells whether somebody is signed in who may look; not as a failure, because it is none.
pub async fn told(
    State(slot): State<Slot>,
    Extension(visit): Extension<Arc<Visit>>,
    headers: HeaderMap,
) -> Result<Response, Answer> {
    let site = slot.site()?;
    let shown = shown(&headers, &visit);
    let told = match admit(&site, shown.clone(), &visit) {
        Ok(_) => json!({"signed_in": true}),
        Err(Error::Unauthenticated(_)) if shown.is_none() => json!({"signed_in": false, "why": ""}),
        Err(error @ (Error::Unauthenticated(_) | Error::Denied(_))) => {
            json!({"signed_in": false, "why": error.to_string()})
        }
        Err(error) => return Err(error.into()),
    };
    Ok(json_answer(told.to_string()))
}

/// Puts a token into the cookie, if it is one that may look.
pub async fn sign_in(
    State(slot): State<Slot>,
    Extension(visit): Extension<Arc<Visit>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Answer> {
    let site = slot.site()?;
    check_site(&headers)?;
    let too_long = |_| Answer::new(StatusCode::PAYLOAD_TOO_LARGE, "that is no token: it is too long");
    let form = axum::body::to_bytes(body, FORM_BYTES_MAX).await.map_err(too_long)?;
    let token = form_urlencoded::parse(&form).find(|(name, _)| name == "token").map(|(_, token)| token);
    let token = token.ok_or_else(|| Answer::new(StatusCode::BAD_REQUEST, "the form has no token"))?;
    let fits = |c: char| c.is_ascii_graphic() && !matches!(c, '"' | ',' | ';' | '\\');
    if token.len() > TOKEN_BYTES_MAX || !token.chars().all(fits) {
        return Err(Answer::new(StatusCode::UNAUTHORIZED, "that is no token, or one that is too long for a browser"));
    }
    admit(&site, Some(bearer(&token)?), &visit)?;
    Ok(with_cookie(&visit, &token, ""))
}

/// Removes the cookie.
pub async fn sign_out(Extension(visit): Extension<Arc<Visit>>, headers: HeaderMap) -> Result<Response, Answer> {
    check_site(&headers)?;
    Ok(with_cookie(&visit, "", "; Max-Age=0"))
}

/// Until the browser is closed, or somebody signs out.
fn with_cookie(visit: &Visit, token: &str, more: &str) -> Response {
    let secure = if visit.is_encrypted { "; Secure" } else { "" };
    let cookie = format!("{}={token}; Path=/; HttpOnly; SameSite=Strict{secure}{more}", cookie_name(visit));
    (StatusCode::NO_CONTENT, [(header::SET_COOKIE, cookie), (header::CACHE_CONTROL, "no-store".to_owned())])
        .into_response()
}

/// Another site cannot sign anybody in or out: browsers say which one asks, where the connection is encrypted or local by a header of its
/// own, otherwise by the origin alone.
fn check_site(headers: &HeaderMap) -> Result<(), Answer> {
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
    Err(Answer::new(StatusCode::FORBIDDEN, "another site has asked for that"))
}
