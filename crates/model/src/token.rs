//! Tokens: random credentials of callers, `lrm_` followed by 43 random characters and a checksum of 6 characters.
//!
//! The checksum distinguishes a mistyped token from an unknown one without a lookup. Only the hash of a token is stored.
//! Never: shows a token or its hash in `Debug` output.
//! Callers: the authenticator, the store and the `tokens` command.

use std::fmt;

use secrecy::SecretString;
use sha2::{Digest as _, Sha256};

/// Prefix of every token, by which secret scanners find published ones.
const PREFIX: &str = "lrm_";

/// Number of random characters: 256 bits.
const RANDOM_CHARS: usize = 43;

/// Length of the checksum, in characters.
const CHECK_CHARS: usize = 6;

const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// First byte value that is discarded, because it would make some characters more likely.
const FAIR_BYTES: u8 = 248;

/// Stored hash of a token: sufficient to recognize the token, but not to use it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenHash([u8; 32]);

impl TokenHash {
    /// Returns the hash of a token; `None` if the text is not a token of this service.
    pub fn of(token: &str) -> Option<Self> {
        let rest = token.strip_prefix(PREFIX)?;
        let (random, check) = rest.split_once('_')?;
        let is_token = random.len() == RANDOM_CHARS && check.as_bytes() == checksum(random.as_bytes());
        is_token.then(|| Self(Sha256::digest(token).into()))
    }

    /// Parses a stored hash.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// Returns the bytes to store.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// The hash is hidden too, because it confirms a guessed token.
impl fmt::Debug for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenHash(…)")
    }
}

/// Returns whether the text has the prefix of this service's tokens.
pub fn is_of_service(token: &str) -> bool {
    token.starts_with(PREFIX)
}

/// Creates a token from random bytes; `None` if `random` has too few.
pub fn make(random: impl IntoIterator<Item = u8>) -> Option<(SecretString, TokenHash)> {
    let fair = random.into_iter().filter(|byte| *byte < FAIR_BYTES);
    let chars: Vec<u8> = fair.map(|byte| digit(u32::from(byte))).take(RANDOM_CHARS).collect();
    let chars = String::from_utf8(chars).ok().filter(|chars| chars.len() == RANDOM_CHARS)?;
    let check = String::from_utf8(checksum(chars.as_bytes()).to_vec()).ok()?;
    let token = format!("{PREFIX}{chars}_{check}");
    TokenHash::of(&token).map(|hash| (SecretString::from(token), hash))
}

/// Returns the digit for `number` modulo 62.
fn digit(number: u32) -> u8 {
    let digits = u32::try_from(DIGITS.len()).unwrap_or(u32::MAX);
    usize::try_from(number % digits).ok().and_then(|place| DIGITS.get(place)).copied().unwrap_or(b'0')
}

fn checksum(chars: &[u8]) -> [u8; CHECK_CHARS] {
    let mut left = crc32(chars);
    let mut check = [0; CHECK_CHARS];
    for place in check.iter_mut().rev() {
        *place = digit(left);
        left /= 62;
    }
    check
}

/// CRC-32 as in zlib and Ethernet.
fn crc32(bytes: &[u8]) -> u32 {
    const POLYNOMIAL: u32 = 0xEDB8_8320;
    let step = |crc: u32, _| if crc & 1 == 1 { (crc >> 1) ^ POLYNOMIAL } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret as _;

    use super::*;

    #[test]
    fn token_checksum_is_crc32() {
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
    }

    #[test]
    fn token_text_is_recognised_and_other_text_is_not() {
        let (token, hash) = make((0..=255).cycle().skip(7)).unwrap();
        let token = token.expose_secret();
        assert_eq!((token.len(), TokenHash::of(token)), (54, Some(hash)));
        let turned = |at: usize| {
            let mut bytes = token.as_bytes().to_vec();
            bytes[at] = if bytes[at] == b'x' { b'y' } else { b'x' };
            String::from_utf8(bytes).unwrap()
        };
        for at in 0..token.len() {
            assert_eq!(TokenHash::of(&turned(at)), None, "mistyped at {at}");
        }
        for wrong in ["", "lrm_", "lrm__", "secret", &token[1..], &token[..53], &format!("{token} "), "lrm_ü_ü"] {
            assert_eq!(TokenHash::of(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn token_characters_are_uniform() {
        let count = |wanted: u8| (0..FAIR_BYTES).filter(|byte| digit(u32::from(*byte)) == wanted).count();
        assert!(DIGITS.iter().all(|wanted| count(*wanted) == 4));
        assert!(make([255; 1000]).is_none() && make([0; 42]).is_none());
    }

    #[test]
    fn token_and_hash_debug_is_hidden() {
        let (token, hash) = make([9; 43]).unwrap();
        let told = format!("{token:?} {hash:?}");
        assert!(!told.contains("9999") && !told.contains(token.expose_secret()), "{told}");
    }
}
