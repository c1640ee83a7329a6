//! What no log, error or debugger may show.

use std::fmt;

/// A text that is told to nobody who does not ask for it: passwords, tokens.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Keeps `text` from being shown.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text, for whoever has to show or send it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

/// For settings.
impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_does_not_show_itself() {
        let told = format!("{:?} {:#?}", Secret::new("hunter2"), Some(Secret::new("hunter2")));
        assert!(!told.contains("hunter2"), "{told}");
    }
}
