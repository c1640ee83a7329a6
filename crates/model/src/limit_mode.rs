//! Mode of a limit: the effect of a request above the maximum.
//!
//! Stored limits and history lines contain the names, so a name never changes its meaning.

text_enum! {
    /// Effect of a rule above its maximum. Configurations and tables contain the texts.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub enum LimitMode {
        /// The request is refused.
        #[default]
        Enforced = "enforced",
        /// The request is granted; the violation is returned and counted.
        Advisory = "advisory",
        /// The request is granted. The rule needs no maximum and only makes its label set counted.
        Off = "off",
    }
}
