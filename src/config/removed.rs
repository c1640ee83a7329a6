//! Removed settings: flags and environment variables of earlier versions, each with what to do instead.
//!
//! A removed setting is refused at the start. If it were ignored, the server would run otherwise than its administrator intended.
//! Callers: `config`.

/// A setting that no longer exists.
struct RemovedSetting {
    flag: &'static str,
    variable: &'static str,
    /// What to do instead: one sentence.
    instead: &'static str,
}

/// What to do instead of naming a standby.
const NO_STANDBY: &str =
    "remove the setting: the primary serves all reads; name all hosts of the database in DATABASE_URL for a failover";

const SETTINGS: [RemovedSetting; 3] = [
    RemovedSetting {
        flag: "--committers",
        variable: "LINKIS_RM_COMMITTERS",
        instead: "remove the setting: each instance has one committer, and more instances have more",
    },
    RemovedSetting { flag: "--standby-url", variable: "LINKIS_RM_STANDBY_URL", instead: NO_STANDBY },
    RemovedSetting { flag: "--standby-url-file", variable: "LINKIS_RM_STANDBY_URL_FILE", instead: NO_STANDBY },
];

/// Returns the mistake if `flag` is a removed one.
pub(super) fn flag(flag: &str) -> Option<String> {
    SETTINGS.iter().find(|setting| setting.flag == flag).map(RemovedSetting::mistake)
}

/// Returns the mistakes for the removed variables that `is_set`.
pub(super) fn variables(is_set: impl Fn(&str) -> bool) -> impl Iterator<Item = String> {
    SETTINGS.iter().filter(move |setting| is_set(setting.variable)).map(RemovedSetting::mistake)
}

impl RemovedSetting {
    fn mistake(&self) -> String {
        format!("{} ({}): is removed; {}", self.flag, self.variable, self.instead)
    }
}
