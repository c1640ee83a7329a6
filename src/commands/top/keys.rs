//! Parser of terminal input into keys.

use super::state::KeyPress;

/// Returns the keys of these bytes; unknown ones are dropped.
pub fn keys(bytes: &[u8]) -> Vec<KeyPress> {
    let text = String::from_utf8_lossy(bytes);
    let mut rest = text.as_ref();
    let mut keys = Vec::new();
    while let Some(first) = rest.chars().next() {
        let (key, len) = match first {
            '\x1b' => sequence(rest),
            '\r' | '\n' => (Some(KeyPress::Enter), 1),
            '\x7f' | '\x08' => (Some(KeyPress::Backspace), 1),
            '\x03' => (Some(KeyPress::Interrupt), 1),
            c if c.is_control() => (None, c.len_utf8()),
            c => (Some(KeyPress::Char(c)), c.len_utf8()),
        };
        keys.extend(key);
        rest = rest.get(len..).unwrap_or_default();
    }
    keys
}

/// Parses an escape: the key alone or a sequence, with its length.
fn sequence(text: &str) -> (Option<KeyPress>, usize) {
    let body = match text.get(1..2) {
        Some("[" | "O") => text.get(2..).unwrap_or_default(),
        _ => return (Some(KeyPress::Escape), 1),
    };
    let Some(end) = body.find(|c: char| ('\x40'..='\x7e').contains(&c)) else { return (None, text.len()) };
    let key = match body.get(..=end).unwrap_or_default() {
        "A" => Some(KeyPress::Move(-1)),
        "B" => Some(KeyPress::Move(1)),
        "5~" => Some(KeyPress::Page(-1)),
        "6~" => Some(KeyPress::Page(1)),
        "H" | "1~" => Some(KeyPress::Home),
        _ => None,
    };
    (key, 2 + end + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_as_terminals_send_them() {
        for (bytes, expected) in [
            (&b"q"[..], &[KeyPress::Char('q')][..]),
            (b"\x1b[A\x1b[B\x1bOA", &[KeyPress::Move(-1), KeyPress::Move(1), KeyPress::Move(-1)]),
            (b"\x1b[5~\x1b[6~x", &[KeyPress::Page(-1), KeyPress::Page(1), KeyPress::Char('x')]),
            (b"\x1b", &[KeyPress::Escape]),
            (b"\x1b[1;5C\x1b[", &[]),
            (b"\r\x7f\x03", &[KeyPress::Enter, KeyPress::Backspace, KeyPress::Interrupt]),
            ("é\u{1}".as_bytes(), &[KeyPress::Char('é')]),
        ] {
            assert_eq!(keys(bytes), expected, "{bytes:?}");
        }
    }
}
