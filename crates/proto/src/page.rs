//! Pages of lists: page sizes and page tokens.
//!
//! A token has the key of the last entry and a hash of its call and filters. A token of another call or of other
//! filters is rejected, because its key would start at an arbitrary entry. Callers: the gRPC services that list objects.

use prost::Message;
use sha2::{Digest as _, Sha256};

use rm_model::name::FieldError;

/// Number of entries of a page if the caller states none.
pub const PAGE_SIZE: i64 = 100;

/// Maximum number of entries of a page.
pub const PAGE_SIZE_MAX: i64 = 1000;

/// Number of hash bytes in a token that identify a call and its filters.
const BINDING_BYTES: usize = 8;

/// Separator between the hash and the key in a token.
const SEPARATOR: char = '.';

/// Page that a call requests.
#[derive(Debug)]
pub struct PageRequest {
    /// Maximum number of its entries.
    pub size: i64,
    binding: String,
}

impl PageRequest {
    /// Creates the page of the call `method` for `requested` entries; 0 means the default, and a larger size than allowed
    /// is reduced. `filters` is the message of the call without its page fields.
    ///
    /// # Errors
    /// A negative size.
    pub fn new(method: &str, requested: i32, filters: &impl Message) -> Result<Self, FieldError> {
        let size = match requested {
            ..0 => {
                let problem =
                    format!("must not be negative; 0 is for {PAGE_SIZE}, and at most {PAGE_SIZE_MAX} are returned");
                return Err(FieldError::new("page_size", problem));
            }
            0 => PAGE_SIZE,
            _ => i64::from(requested).min(PAGE_SIZE_MAX),
        };
        // The zero byte separates the method from the filters, because no method name contains one.
        let hash =
            Sha256::new().chain_update(method).chain_update([0_u8]).chain_update(filters.encode_to_vec()).finalize();
        Ok(Self { size, binding: hex(hash.iter().take(BINDING_BYTES)) })
    }

    /// Returns the token of the page that begins after the entry with this key.
    pub fn token(&self, key: &str) -> String {
        format!("{}{SEPARATOR}{key}", self.binding)
    }

    /// Returns the key of the entry before the page, as `parse` reads it; `None` for the first page.
    ///
    /// # Errors
    /// A token of another call or of other filters, or with a key that `parse` rejects.
    pub fn after<'t, K>(
        &self,
        token: &'t str,
        parse: impl FnOnce(&'t str) -> Option<K>,
    ) -> Result<Option<K>, FieldError> {
        if token.is_empty() {
            return Ok(None);
        }
        let key = token.split_once(SEPARATOR).filter(|(binding, _)| *binding == self.binding).map(|(_, key)| key);
        key.and_then(parse).map(Some).ok_or_else(bad_token)
    }

    /// Returns [`PageRequest::size`] as a length.
    pub fn entries_max(&self) -> usize {
        usize::try_from(self.size).unwrap_or(usize::MAX)
    }

    /// Truncates `entries` to the page. Returns true if an entry was cut off, so that another page follows.
    pub fn cut<T>(&self, entries: &mut Vec<T>) -> bool {
        let size = self.entries_max();
        let more = entries.len() > size;
        entries.truncate(size);
        more
    }
}

/// Returns the error for a token that does not belong to the call.
pub fn bad_token() -> FieldError {
    let problem =
        "is not from this call with these filters; repeat the call unchanged, or omit the token for the first page";
    FieldError::new("page_token", problem)
}

/// Returns hexadecimal digits of `bytes`.
pub fn hex<'b>(bytes: impl IntoIterator<Item = &'b u8>) -> String {
    bytes.into_iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Parses hexadecimal digits; `None` if the text has others or an odd number of them.
pub fn parse_hex(text: &str) -> Option<Vec<u8>> {
    let is_hex = text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let byte = |at| u8::from_str_radix(text.get(at..at + 2)?, 16).ok();
    if is_hex { (0..text.len()).step_by(2).map(byte).collect() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_size_is_bounded_and_token_is_bound_to_filters() {
        let page = |requested| PageRequest::new("ListEms", requested, &());
        assert_eq!(
            [0, 1, 1000, 1001, i32::MAX].map(|requested| page(requested).unwrap().size),
            [100, 1, 1000, 1000, 1000]
        );
        assert_eq!(page(-1).unwrap_err().field, "page_size");
        let token = page(1).unwrap().token("a.b");
        assert_eq!(page(7).unwrap().after(&token, Some), Ok(Some("a.b")), "of any size");
        assert_eq!(page(7).unwrap().after("", Some), Ok(None));
        assert_eq!(page(7).unwrap().after(&token, |_| None::<()>), Err(bad_token()));
        let filtered = PageRequest::new("ListEms", 1, &"x".to_owned()).unwrap();
        let other = PageRequest::new("ListScopes", 1, &()).unwrap();
        for (page, token) in [(&filtered, token.as_str()), (&other, &token), (&other, "a"), (&other, ".a")] {
            assert_eq!(page.after(token, Some).unwrap_err().field, "page_token");
        }
    }
}
