//! Claims: derives the principal and the rights of a caller from the claims of a verified JWT.
//!
//! Never: reads a claim before the signature is verified.
//! Caller: `jwt`.

use serde_json::{Map, Value};

use rm_model::{
    access::{EmPattern, Rights, USERS_MAX},
    name::Name,
};

use super::config::{ClaimGrant, ClaimPath, GrantBinding, Issuer};

/// Claims of a JWT, by name.
pub type Claims = Map<String, Value>;

/// Returns the principal and rights of a caller. The rights are empty if no grant applies; `None` if the claims name no
/// principal.
pub fn caller(issuer: &Issuer, claims: &Claims) -> Option<(Name, Rights)> {
    let names = texts(&issuer.principal, claims);
    let [name] = names.as_slice() else { return None };
    let name = Name::parse("jwt", &format!("{}/{name}", issuer.name)).ok()?;
    let rights = issuer.grants.iter().find_map(|grant| rights(grant, claims));
    let nothing = Rights { roles: Default::default(), ems: vec![], users: None };
    Some((name, rights.unwrap_or(nothing)))
}

/// Returns the rights of a grant, if its conditions hold and its bounds can be resolved.
fn rights(grant: &ClaimGrant, claims: &Claims) -> Option<Rights> {
    let holds = |(claim, wanted): (&ClaimPath, &Vec<String>)| {
        texts(claim, claims).iter().any(|text| wanted.iter().any(|wanted| wanted == text))
    };
    if !grant.conditions.iter().all(holds) {
        return None;
    }
    let ems = match &grant.ems {
        GrantBinding::Not => vec![],
        GrantBinding::To(ems) => ems.clone(),
        GrantBinding::From(claim) => {
            named(claim, claims)?.into_iter().map(|host| EmPattern::of_host(None, host.as_str())).collect()
        }
    };
    let users = match &grant.users {
        GrantBinding::Not => None,
        GrantBinding::To(users) => Some(users.clone()),
        GrantBinding::From(claim) => Some(named(claim, claims)?.into_iter().collect()),
    };
    Some(Rights { roles: grant.roles.clone(), ems, users })
}

/// Returns the names in a claim; `None` if there are none, too many, or an invalid one.
fn named(claim: &ClaimPath, claims: &Claims) -> Option<Vec<Name>> {
    let names: Vec<Name> =
        texts(claim, claims).iter().map(|text| Name::parse("jwt", text).ok()).collect::<Option<_>>()?;
    (1..=USERS_MAX).contains(&names.len()).then_some(names)
}

/// Returns the text of a claim, or the texts of its list.
fn texts<'a>(claim: &ClaimPath, claims: &'a Claims) -> Vec<&'a str> {
    match at(claim, claims) {
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(texts)) => texts.iter().filter_map(Value::as_str).collect(),
        _ => vec![],
    }
}

/// Returns the value of a claim, by name or by path.
fn at<'a>(claim: &ClaimPath, claims: &'a Claims) -> Option<&'a Value> {
    let Some(path) = claim.0.strip_prefix('/') else { return claims.get(&claim.0) };
    let (first, rest) = path.split_once('/').map_or((path, None), |(first, rest)| (first, Some(rest)));
    let value = claims.get(&first.replace("~1", "/").replace("~0", "~"))?;
    match rest {
        Some(rest) => value.pointer(&format!("/{rest}")),
        None => Some(value),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::jwt::config;
    use rm_external::allowed::AllowedHosts;

    fn issuer(grants: &Value) -> Issuer {
        let config = json!({"issuers": [{
            "name": "idp", "issuer": "i", "audiences": ["a"], "keys": "/keys.json", "grants": grants,
        }]});
        config::read(config.to_string().as_bytes(), &AllowedHosts::NONE).unwrap().remove(0)
    }

    fn told(grants: &Value, claims: Value) -> Option<(String, String)> {
        let Value::Object(claims) = claims else { panic!("{claims}") };
        let (name, rights) = caller(&issuer(grants), &claims)?;
        let ems: Vec<_> = rights.ems.iter().map(EmPattern::to_string).collect();
        let users = rights.users.as_ref().map(|users| users.iter().map(Name::as_str).collect::<Vec<_>>().join("+"));
        Some((name.to_string(), format!("{} {} {}", rights.role_names(), ems.join("+"), users.unwrap_or("all".into()))))
    }

    #[test]
    fn claim_grant_with_first_matching_conditions_applies() {
        let grants = json!([
            {"if": {"sub": "system:serviceaccount:linkis:manager"}, "roles": ["manager", "viewer"]},
            {"if": {"groups": ["admins", "root"], "/org/unit~1name": "it"}, "roles": ["admin"]},
            {"if": {"/kubernetes.io/namespace": "linkis"}, "roles": ["ecm"], "ems_from": "/kubernetes.io/node/name"},
            {"if": {"sub": "fixed"}, "roles": ["ecm", "viewer"], "ems": ["a/host1"], "users": ["bob"]},
            {"roles": ["viewer"], "users_from": "names"},
        ]);
        for (claims, name, rights) in [
            (
                json!({"sub": "system:serviceaccount:linkis:manager"}),
                "idp/system:serviceaccount:linkis:manager",
                "manager,viewer  all",
            ),
            (json!({"sub": "x", "groups": ["a", "root"], "org": {"unit/name": "it"}}), "idp/x", "admin  all"),
            (json!({"sub": "x", "groups": ["a", "root"], "org": {"unit/name": "sales"}}), "idp/x", "  all"),
            (json!({"sub": "x", "groups": "root", "org": {"unit/name": ["it"]}}), "idp/x", "admin  all"),
            (
                json!({"sub": "x", "kubernetes.io": {"namespace": "linkis", "node": {"name": "n1"}}}),
                "idp/x",
                "ecm */n1 all",
            ),
            // The grant's bound cannot be resolved, so the grant does not apply.
            (json!({"sub": "x", "kubernetes.io": {"namespace": "linkis"}, "names": "alice"}), "idp/x", "viewer  alice"),
            (json!({"sub": "fixed"}), "idp/fixed", "ecm,viewer a/host1 bob"),
            (json!({"sub": "x", "names": ["alice", "bob"]}), "idp/x", "viewer  alice+bob"),
            (json!({"sub": "x", "names": ["alice", "\n"]}), "idp/x", "  all"),
            (json!({"sub": "x", "names": []}), "idp/x", "  all"),
            (json!({"sub": "x", "names": (0..33).map(|n| n.to_string()).collect::<Vec<_>>()}), "idp/x", "  all"),
            (json!({"sub": "x", "names": {"a": 1}}), "idp/x", "  all"),
        ] {
            assert_eq!(told(&grants, claims.clone()), Some((name.to_owned(), rights.to_owned())), "{claims}");
        }
        for nobody in [
            json!({}),
            json!({"sub": 1}),
            json!({"sub": ["a", "b"]}),
            json!({"sub": "\u{7}"}),
            json!({"sub": "x".repeat(255)}),
        ] {
            assert_eq!(told(&grants, nobody.clone()), None, "{nobody}");
        }
    }
}
