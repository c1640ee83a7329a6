//! Pages: how many entries one has, and the tokens by which the next one is asked for. A token is of its call and of that call's
//! filters: with others it would begin at a place that means nothing there.

use prost::Message;
use sha2::{Digest as _, Sha256};

use crate::domain::name::FieldError;

/// How many entries a page has if the caller does not say.
pub const PAGE_SIZE: i64 = 100;

/// How many entries a page has at most.
pub const PAGE_SIZE_MAX: i64 = 1000;

/// How many bytes of a hash tell a call and its filters from all others.
const BINDING_BYTES: usize = 8;

/// What stands between them and the key.
const SEPARATOR: char = '.';

/// The page that a call asks for.
#[derive(Debug)]
pub struct Page {
    /// How many entries it has at most.
    pub size: i64,
    binding: String,
}

impl Page {
    /// A page of `asked` entries, of what the call `method` lists with `filters`: its message, without the page.
    ///
    /// # Errors
    /// A size below zero. One that is too large is the largest.
    pub fn new(method: &str, asked: i32, filters: &impl Message) -> Result<Self, FieldError> {
        let size = match asked {
            ..0 => {
                let problem =
                    format!("must not be negative; 0 is for {PAGE_SIZE}, and at most {PAGE_SIZE_MAX} are told");
                return Err(FieldError::new("page_size", problem));
            }
            0 => PAGE_SIZE,
            _ => i64::from(asked).min(PAGE_SIZE_MAX),
        };
        // The name of a method has no zero byte.
        let hash =
            Sha256::new().chain_update(method).chain_update([0_u8]).chain_update(filters.encode_to_vec()).finalize();
        Ok(Self { size, binding: hex(hash.iter().take(BINDING_BYTES)) })
    }

    /// The token of the page behind the entry with this key.
    pub fn token(&self, key: &str) -> String {
        format!("{}{SEPARATOR}{key}", self.binding)
    }

    /// The key of the entry behind which the page begins; `None` for the first page.
    ///
    /// # Errors
    /// A token that no call like this one was answered with.
    pub fn key<'t>(&self, token: &'t str) -> Result<Option<&'t str>, FieldError> {
        if token.is_empty() {
            return Ok(None);
        }
        let (binding, key) = token.split_once(SEPARATOR).ok_or_else(bad_token)?;
        if binding == self.binding { Ok(Some(key)) } else { Err(bad_token()) }
    }

    /// [`Page::size`], for what is in memory.
    pub fn entries_max(&self) -> usize {
        usize::try_from(self.size).unwrap_or(usize::MAX)
    }

    /// Cuts what was read, one entry more than the page has, to the page; true if there is more behind it.
    pub fn cut<T>(&self, entries: &mut Vec<T>) -> bool {
        let size = self.entries_max();
        let more = entries.len() > size;
        entries.truncate(size);
        more
    }
}

/// A token that means nothing here.
pub fn bad_token() -> FieldError {
    let problem = "is none that this call gave with these filters; repeat the call as it was, or leave the token empty for the first \
                   page";
    FieldError::new("page_token", problem)
}

/// As hexadecimal digits.
pub fn hex<'b>(bytes: impl IntoIterator<Item = &'b u8>) -> String {
    bytes.into_iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The reverse of [`hex`].
pub fn parse_hex(text: &str) -> Option<Vec<u8>> {
    let is_hex = text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let byte = |at| u8::from_str_radix(text.get(at..at + 2)?, 16).ok();
    if is_hex { (0..text.len()).step_by(2).map(byte).collect() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_bounded_and_a_token_is_of_its_call_and_filters() {
        let page = |asked| Page::new("ListEms", asked, &());
        assert_eq!([0, 1, 1000, 1001, i32::MAX].map(|asked| page(asked).unwrap().size), [100, 1, 1000, 1000, 1000]);
        assert_eq!(page(-1).unwrap_err().field, "page_size");
        let token = page(1).unwrap().token("a.b");
        assert_eq!(page(7).unwrap().key(&token), Ok(Some("a.b")), "of any size");
        assert_eq!(page(7).unwrap().key(""), Ok(None));
        let filtered = Page::new("ListEms", 1, &"x".to_owned()).unwrap();
        let other = Page::new("ListScopes", 1, &()).unwrap();
        for (page, token) in [(&filtered, token.as_str()), (&other, &token), (&other, "a"), (&other, ".a")] {
            assert_eq!(page.key(token).unwrap_err().field, "page_token");
        }
    }
}
