//! Tokens with each role, and the choice of the token of a call.

use super::{Generator, Wanted};

/// Returns the tokens of a chapter, as arguments of `tokens create`.
pub fn tokens(chapter: &str) -> Vec<String> {
    let roles = [
        "--name root --role admin",
        "--name manager --role manager",
        "--name bound --role manager --user user1 --user user2",
        "--name ems --role ecm --em linkis-cg-engineconnmanager/*",
        "--name em3 --role ecm --em linkis-cg-engineconnmanager/em3:9102",
        "--name viewer --role viewer",
        "--name viewer0 --role viewer --user user0",
        "--name operator --role operator",
        "--name linkis --role manager,ecm --em linkis-cg-engineconnmanager/*",
        "--name revoked --role admin",
    ];
    let wanted = if chapter == "roles" { &roles[..] } else { &[] };
    wanted.iter().map(|role| format!("{role} --owner tests")).collect()
}

impl Generator {
    /// Returns the number of a token for a call: often one whose role permits the call, otherwise any, none or an unknown one.
    pub(super) fn token_for(&mut self, wanted: &Wanted) -> u32 {
        // A hold that is not released would delay all later calls. The first report of a registration states the load, without which
        // another EM could be equal, so that chance decides between them.
        let is_first = wanted.method == "Heartbeat" && wanted.body["sequence"] == 1;
        if self.calls == 0 || wanted.method == "ReleaseHold" || is_first {
            return 1;
        }
        if self.chance(45) {
            return self.random(12) as u32;
        }
        let fit: &[u32] = match (wanted.service, wanted.method) {
            ("ResourceManagerService", "Register" | "Unregister" | "Heartbeat") => &[4, 4, 5, 9],
            ("ResourceManagerService", _) => &[2, 3, 9],
            ("UsageService", _) => &[3, 6, 7, 8],
            _ => &[1, 8],
        };
        self.pick(fit).unwrap_or(1)
    }
}
