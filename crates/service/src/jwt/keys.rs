//! Keys of an issuer, and verification of JWT signatures by ring, as for TLS.
//!
//! Never: accepts an algorithm other than the key's own.
//! Caller: `jwt`.

use jsonwebtoken::{
    Algorithm, AlgorithmFamily, DecodingKey, DecodingKeyKind, Validation,
    crypto::{CryptoProvider, JwtVerifier, KeyUtils},
    errors::{Error, ErrorKind, new_error},
    jwk::{AlgorithmParameters, EllipticCurve, Jwk, JwkSet, KeyAlgorithm, PublicKeyUse},
    signature::{self, Verifier},
};
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ED25519, RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents, UnparsedPublicKey,
};

use crate::tokens::CallerExpiry;
use rm_model::access::JwtRejection;

use super::{claims::Claims, config::Issuer};

/// Maximum number of keys of an issuer.
const KEYS_MAX: usize = 64;

/// Minimum size of an RSA modulus, in bytes.
const RSA_BYTES_MIN: usize = 2048 / 8;

/// Tolerated clock difference, in seconds: a JWT is accepted that much longer, and that much earlier.
pub const LEEWAY_SECONDS: u64 = 30;

/// The keys of an issuer.
#[derive(Debug, Default)]
pub struct IssuerKeys(Vec<IssuerKey>);

/// One key.
#[derive(Debug)]
pub struct IssuerKey {
    id: Option<String>,
    /// The only algorithm of the key.
    algorithm: Algorithm,
    key: DecodingKey,
    public: AlgorithmParameters,
    /// Ends the streams of callers when the key is withdrawn.
    pub ended: CallerExpiry,
}

/// Reason why a key set is not usable.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// The text is not a JSON Web Key Set.
    #[error("is not a JSON Web Key Set")]
    Json(#[from] serde_json::Error),
    /// The set has too many keys.
    #[error("has {0} keys; at most {KEYS_MAX} are allowed")]
    TooMany(usize),
    /// No key of the set can verify a signature.
    #[error("has no usable key: RSA of at least 2048 bits for RS256, P-256 for ES256, or Ed25519 for EdDSA")]
    None,
}

impl IssuerKeys {
    /// Parses a JSON Web Key Set. Keys of other types or uses are left out.
    ///
    /// # Errors
    /// [`KeysError`] if no usable key is left.
    pub fn read(json: &[u8]) -> Result<Self, KeysError> {
        let set: JwkSet = serde_json::from_slice(json)?;
        if set.keys.len() > KEYS_MAX {
            return Err(KeysError::TooMany(set.keys.len()));
        }
        let keys: Vec<IssuerKey> = set.keys.into_iter().filter_map(key).collect();
        if keys.is_empty() { Err(KeysError::None) } else { Ok(Self(keys)) }
    }

    /// Takes over the end signals of keys that are also in `before`, so that their streams continue.
    pub fn after(mut self, before: &Self) -> Self {
        for key in &mut self.0 {
            let same = before.0.iter().find(|before| before.is_same(key));
            key.ended = same.map(|same| same.ended.clone()).unwrap_or_default();
        }
        self
    }

    /// Ends the streams under keys that are not in `now`.
    pub fn end_others(&self, now: &Self) {
        let gone = self.0.iter().filter(|key| !now.0.iter().any(|now| now.is_same(key)));
        gone.for_each(|key| key.ended.end(JwtRejection::Withdrawn.into()));
    }

    /// Returns the same keys with end signals of their own.
    pub fn apart(&self) -> Self {
        let apart = |key: &IssuerKey| IssuerKey {
            id: key.id.clone(),
            algorithm: key.algorithm,
            key: key.key.clone(),
            public: key.public.clone(),
            ended: CallerExpiry::default(),
        };
        Self(self.0.iter().map(apart).collect())
    }

    /// Returns the key with this id; without an id, the only key with this algorithm.
    ///
    /// # Errors
    /// [`JwtRejection::UnknownKey`]; [`JwtRejection::Algorithm`] if the key has another algorithm.
    pub fn find(&self, id: Option<&str>, algorithm: Algorithm) -> Result<&IssuerKey, JwtRejection> {
        let Some(id) = id else {
            let mut able = self.0.iter().filter(|key| key.algorithm == algorithm);
            return match (able.next(), able.next()) {
                (Some(key), None) => Ok(key),
                _ => Err(JwtRejection::UnknownKey),
            };
        };
        let key = self.0.iter().find(|key| key.id.as_deref() == Some(id)).ok_or(JwtRejection::UnknownKey)?;
        if key.algorithm == algorithm { Ok(key) } else { Err(JwtRejection::Algorithm) }
    }

    /// Returns the number of keys.
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

impl IssuerKey {
    fn is_same(&self, other: &Self) -> bool {
        (&self.id, self.algorithm, &self.public) == (&other.id, other.algorithm, &other.public)
    }

    /// Verifies a JWT by this key, for this service and the current time. Returns its claims.
    ///
    /// # Errors
    /// The reason why the JWT is not accepted.
    pub fn check(&self, jwt: &str, issuer: &Issuer) -> Result<Claims, JwtRejection> {
        // An error means that the provider is installed already.
        let _ = RING.install_default();
        let mut wanted = Validation::new(self.algorithm);
        wanted.set_issuer(&[&issuer.issuer]);
        wanted.set_audience(&issuer.audiences);
        wanted.set_required_spec_claims(&["exp", "iss", "aud"]);
        (wanted.leeway, wanted.validate_nbf) = (LEEWAY_SECONDS, true);
        let decoded = jsonwebtoken::decode(jwt, &self.key, &wanted);
        decoded.map(|decoded| decoded.claims).map_err(|error| bad(error.kind()))
    }
}

/// Converts a key for signatures; `None` if it has another type or use.
fn key(jwk: Jwk) -> Option<IssuerKey> {
    let Jwk { common, algorithm: public } = jwk;
    let (algorithm, named) = match &public {
        AlgorithmParameters::RSA(_) => (Algorithm::RS256, KeyAlgorithm::RS256),
        AlgorithmParameters::EllipticCurve(key) if key.curve == EllipticCurve::P256 => {
            (Algorithm::ES256, KeyAlgorithm::ES256)
        }
        AlgorithmParameters::OctetKeyPair(key) if key.curve == EllipticCurve::Ed25519 => {
            (Algorithm::EdDSA, KeyAlgorithm::EdDSA)
        }
        _ => return None,
    };
    let is_ours = common.key_algorithm.is_none_or(|algorithm| algorithm == named)
        && common.public_key_use.is_none_or(|used| used == PublicKeyUse::Signature);
    let key = match &public {
        AlgorithmParameters::RSA(key) => DecodingKey::from_rsa_components(&key.n, &key.e),
        AlgorithmParameters::EllipticCurve(key) => DecodingKey::from_ec_components(&key.x, &key.y),
        AlgorithmParameters::OctetKeyPair(key) => DecodingKey::from_ed_components(&key.x),
        _ => return None,
    };
    let key = key.ok().filter(|key| is_ours && is_long_enough(key))?;
    Some(IssuerKey { id: common.key_id, algorithm, key, public, ended: CallerExpiry::default() })
}

fn is_long_enough(key: &DecodingKey) -> bool {
    match key.kind() {
        DecodingKeyKind::RsaModulusExponent { n, .. } => {
            n.iter().skip_while(|byte| **byte == 0).count() >= RSA_BYTES_MIN
        }
        DecodingKeyKind::SecretOrDer(key) => key.len() == 32 || key.len() == 65,
    }
}

fn bad(kind: &ErrorKind) -> JwtRejection {
    match kind {
        ErrorKind::InvalidSignature => JwtRejection::Signature,
        ErrorKind::ExpiredSignature => JwtRejection::Expired,
        ErrorKind::ImmatureSignature => JwtRejection::NotYet,
        ErrorKind::InvalidIssuer => JwtRejection::Issuer,
        ErrorKind::InvalidAudience => JwtRejection::Audience,
        ErrorKind::MissingRequiredClaim(claim) if claim == "aud" => JwtRejection::Audience,
        ErrorKind::InvalidAlgorithm | ErrorKind::UnsupportedAlgorithm => JwtRejection::Algorithm,
        _ => JwtRejection::Malformed,
    }
}

/// Signature provider of jsonwebtoken, for verification only.
static RING: CryptoProvider = CryptoProvider {
    signer_factory: |_, _| Err(new_error(ErrorKind::UnsupportedAlgorithm)),
    verifier_factory: verifier,
    key_utils: KeyUtils::new_unimplemented(),
};

fn verifier(algorithm: &Algorithm, key: &DecodingKey) -> Result<Box<dyn JwtVerifier>, Error> {
    let is_of = |family| if key.family() == family { Ok(()) } else { Err(new_error(ErrorKind::InvalidKeyFormat)) };
    match algorithm {
        Algorithm::RS256 => is_of(AlgorithmFamily::Rsa)?,
        Algorithm::ES256 => is_of(AlgorithmFamily::Ec)?,
        Algorithm::EdDSA => is_of(AlgorithmFamily::Ed)?,
        _ => return Err(new_error(ErrorKind::UnsupportedAlgorithm)),
    }
    Ok(Box::new(RingVerifier { algorithm: *algorithm, key: key.clone() }))
}

struct RingVerifier {
    algorithm: Algorithm,
    key: DecodingKey,
}

impl Verifier<Vec<u8>> for RingVerifier {
    fn verify(&self, message: &[u8], signed: &Vec<u8>) -> Result<(), signature::Error> {
        let checked = match (self.key.kind(), self.algorithm) {
            (DecodingKeyKind::RsaModulusExponent { n, e }, Algorithm::RS256) => {
                RsaPublicKeyComponents { n, e }.verify(&RSA_PKCS1_2048_8192_SHA256, message, signed)
            }
            (DecodingKeyKind::SecretOrDer(key), Algorithm::ES256) => {
                UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, key).verify(message, signed)
            }
            (DecodingKeyKind::SecretOrDer(key), Algorithm::EdDSA) => {
                UnparsedPublicKey::new(&ED25519, key).verify(message, signed)
            }
            _ => return Err(signature::Error::new()),
        };
        checked.map_err(|_| signature::Error::new())
    }
}

impl JwtVerifier for RingVerifier {
    fn algorithm(&self) -> Algorithm {
        self.algorithm
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::jwt::config;
    use rm_external::allowed::AllowedHosts;

    /// Key and JWT of RFC 7515, A.2.
    const RSA: &str = "ofgWCuLjybRlzo0tZWJjNiuSfb4p4fAkd_wWJcyQoTbji9k0l8W26mPddxHmfHQp-Vaw-4qPCJrcS2mJPMEzP1Pt0Bm4d4QlL-yRT-SFd2lZS-\
        pCgNMsD1W_YpRPEwOWvG6b32690r2jZ47soMZo9wGzjb_7OMg0LOL-bSf63kpaSHSXndS5z5rexMdbBYUsLA9e-KXBdQOS-UTo7WTBEMa2R2CapHg665xsmtdV\
        MTBQY4uDZlxvb3qCo5ZwKh9kG4LT6_I5IhlJH7aGhyxXFvUK-DWNmoudF8NAco9_h9iaGNj8q2ethFkMLs91kzk2PAcDTW9gb54h4FRWyuXpoQ";
    const RS256: &str = "eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGxlLmNvbS9pc19yb290Ijp\
        0cnVlfQ.cC4hiUPoj9Eetdgtv3hF80EGrhuB__dzERat0XF9g2VtQgr9PJbu3XOiZj5RZmh7AAuHIm4Bh-0Qc_lF5YKt_O8W2Fp5jujGbds9uJdbF9CUAr7t1d\
        nZcAcQjbKBYNX4BAynRFdiuB--f_nZLgrnbyTyWzO75vRK5h6xBArLIARNPvkSjtQBMHlb1L07Qe7K0GarZRmB_eSN9383LcOLn6_dO--xi12jzDwusC-eOkHW\
        EsqtFZESc6BfI7noOPqvhJ1phCnvWh6IeYI2w9QOYEUipUTI8np6LbgGY9Fs98rqVt5AXLIhWkWywlVmtVrBp0igcN_IoypGlUPQGe77Rw";

    /// Key and JWT of RFC 7515, A.3.
    const EC: [&str; 2] =
        ["f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU", "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0"];
    const ES256: &str = "eyJhbGciOiJFUzI1NiJ9.eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGxlLmNvbS9pc19yb290Ijp\
        0cnVlfQ.DtEhU3ljbEg8L38VWAfUAqOyKAM6-Xx-F4GawxaepmXFCgfTjDxw5djxLa8ISlSApmWQxfKTUJqPP3-Kg6NU1Q";

    /// Key and JWS of RFC 8037, A.4. The payload is not a set of claims.
    const ED: &str = "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo";
    const EDDSA: &str = "eyJhbGciOiJFZERTQSJ9.RXhhbXBsZSBvZiBFZDI1NTE5IHNpZ25pbmc.hgyY0il_MGCjP0JzlnLWG1PPOt7-09PGcvMg3AIbQR6dWbhijcNR4\
        ki4iylGjg5BhVsPt9g7sVvpAr_MuM0KAg";

    fn rsa() -> Value {
        json!({"kty": "RSA", "kid": "r", "n": RSA, "e": "AQAB", "alg": "RS256", "use": "sig", "x5c": ["MII"]})
    }

    fn ec() -> Value {
        json!({"kty": "EC", "kid": "e", "crv": "P-256", "x": EC[0], "y": EC[1]})
    }

    fn ed() -> Value {
        json!({"kty": "OKP", "kid": "d", "crv": "Ed25519", "x": ED, "use": "sig"})
    }

    fn keys(keys: &[Value]) -> Result<IssuerKeys, KeysError> {
        IssuerKeys::read(json!({ "keys": keys }).to_string().as_bytes())
    }

    #[test]
    fn signature_algorithms_match_standard_examples() {
        let _ = RING.install_default();
        let keys = keys(&[rsa(), ec(), ed()]).unwrap();
        for (jwt, id, algorithm) in
            [(RS256, "r", Algorithm::RS256), (ES256, "e", Algorithm::ES256), (EDDSA, "d", Algorithm::EdDSA)]
        {
            let (message, signed) = jwt.rsplit_once('.').unwrap();
            let key = &keys.find(Some(id), algorithm).unwrap().key;
            let is_good =
                |message: &str| jsonwebtoken::crypto::verify(signed, message.as_bytes(), key, algorithm).unwrap();
            assert!(is_good(message) && !is_good(&message[1..]), "{id}");
            let others = keys.0.iter().filter(|other| other.id.as_deref() != Some(id));
            for other in others {
                let checked = jsonwebtoken::crypto::verify(signed, message.as_bytes(), &other.key, algorithm);
                assert!(!checked.unwrap_or(false), "{id} by {:?}", other.id);
            }
            assert_eq!(keys.find(None, algorithm).unwrap().id.as_deref(), Some(id), "the only one");
        }
        assert_eq!(keys.find(Some("x"), Algorithm::RS256).unwrap_err(), JwtRejection::UnknownKey);
        assert_eq!(keys.find(Some("r"), Algorithm::ES256).unwrap_err(), JwtRejection::Algorithm);
    }

    #[test]
    fn signature_is_checked_before_audience() {
        let config = json!({"issuers": [{"name": "n", "issuer": "joe", "audiences": ["a"], "keys": "/k",
            "grants": [{"roles": ["viewer"], "users_from": "sub"}]}]});
        let issuer = config::read(config.to_string().as_bytes(), &AllowedHosts::NONE).unwrap().remove(0);
        let keys = keys(&[rsa(), ec()]).unwrap();
        let check = |id, algorithm, jwt: &str| keys.find(Some(id), algorithm).unwrap().check(jwt, &issuer).unwrap_err();
        assert_eq!(check("r", Algorithm::RS256, RS256), JwtRejection::Audience, "it is signed, but has no audience");
        let forged = RS256.replace(".cC4h", ".cC4i");
        assert_eq!(check("r", Algorithm::RS256, &forged), JwtRejection::Signature);
        assert_eq!(check("r", Algorithm::RS256, ES256), JwtRejection::Algorithm);
        assert_eq!(check("e", Algorithm::ES256, "a.b"), JwtRejection::Malformed);
    }

    #[test]
    fn key_set_ignores_keys_without_signature_use() {
        let with = |mut key: Value, name: &str, value: &str| {
            key[name] = value.into();
            key
        };
        for wrong in [
            with(rsa(), "use", "enc"),
            with(rsa(), "alg", "RS512"),
            with(rsa(), "alg", "HS256"),
            with(rsa(), "n", &RSA[..200]),
            with(rsa(), "n", "!"),
            with(ec(), "crv", "P-384"),
            with(ec(), "crv", "secp256k1"),
            with(ec(), "x", "AAAA"),
            with(ed(), "crv", "X25519"),
            with(ed(), "x", "AAAA"),
            json!({"kty": "oct", "kid": "o", "k": "c2VjcmV0", "alg": "HS256"}),
            json!({"kty": "new", "kid": "x"}),
        ] {
            assert!(matches!(keys(std::slice::from_ref(&wrong)), Err(KeysError::None)), "{wrong}");
            assert_eq!(keys(&[wrong, ed()]).unwrap().len(), 1);
        }
        assert!(matches!(keys(&vec![ed(); 65]), Err(KeysError::TooMany(65))));
        for wrong in ["", "[]", "{}", "{\"keys\": 1}"] {
            assert!(matches!(IssuerKeys::read(wrong.as_bytes()), Err(KeysError::Json(_))), "{wrong}");
        }
    }

    #[test]
    fn key_rotation_keeps_streams_of_remaining_keys() {
        let before = keys(&[rsa(), ec()]).unwrap();
        let now = keys(&[ec(), ed()]).unwrap().after(&before);
        before.end_others(&now);
        assert!(before.0[0].ended.is_over() && !before.0[1].ended.is_over());
        now.0[0].ended.end(JwtRejection::Withdrawn.into());
        assert!(before.0[1].ended.is_over(), "it is the same");
        assert!(!now.0[1].ended.is_over());
    }
}
