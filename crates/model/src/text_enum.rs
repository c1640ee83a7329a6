//! The macro for an enumeration with a fixed text for each variant.
//!
//! Tables, messages, metrics and settings contain these texts, so a text never changes its meaning. Callers: the
//! enumerations of this crate and of the other crates.

/// Declares an enumeration with the text of each variant. `ALL` has the variants in the order of their declaration,
/// `as_str` returns the text, and `parse` reads it.
#[macro_export]
macro_rules! text_enum {
    (
        $(#[$attribute:meta])*
        $visibility:vis enum $name:ident {
            $($(#[$variant_attribute:meta])* $variant:ident = $text:literal,)+
        }
    ) => {
        $(#[$attribute])*
        $visibility enum $name {
            $($(#[$variant_attribute])* $variant,)+
        }

        impl $name {
            /// All variants, in the order of their declaration.
            $visibility const ALL: [Self; [$($text),+].len()] = [$(Self::$variant),+];

            /// Returns the text of the variant.
            #[must_use]
            $visibility const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)+
                }
            }

            /// Returns the variant of a text; `None` for any other text.
            #[must_use]
            $visibility fn parse(text: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|known| known.as_str() == text)
            }
        }
    };
}
