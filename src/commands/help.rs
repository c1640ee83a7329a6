//! Ends of help texts: an example, and the roles from the table of calls that the edge authorizes by.

use rm_client::ApiCall;
use rm_edge::access::{AccessTable, RequiredIdentity};
use rm_model::access::{Permission, Role};

/// Returns the end of a command's help: an example without the program's name, and the roles for its call.
pub fn end<Q, A>(example: &str, call: &ApiCall<Q, A>) -> String {
    format!("{}\n\n{} Global options: linkis-rm --help", examples(&[example]), needs(call))
}

/// Returns the examples of a help text, without the program's name.
pub fn examples(lines: &[&str]) -> String {
    let lines: Vec<String> = lines.iter().map(|line| format!("  linkis-rm {line}")).collect();
    format!("{}\n{}", if lines.len() > 1 { "Examples:" } else { "Example:" }, lines.join("\n"))
}

/// Returns the sentence about the roles for a call.
fn needs<Q, A>(call: &ApiCall<Q, A>) -> String {
    needs_by(call.path())
}

/// As [`needs`], for the call at a path.
fn needs_by(path: &str) -> String {
    let row = match AccessTable::default().needed(path) {
        Some(RequiredIdentity::Role(row)) => row,
        Some(RequiredIdentity::Nothing) => return "Needs no role.".to_owned(),
        // A service with the call, but without its roles, denies it to all callers.
        None => return "No role may do this.".to_owned(),
    };
    let with = |permission: Permission| {
        let roles = Role::ALL.into_iter().filter(|role| row.permission(*role) == permission);
        roles.map(Role::as_str).collect::<Vec<_>>()
    };
    let (all, own) = (with(Permission::All), with(Permission::Own));
    let own = match own.as_slice() {
        [] => String::new(),
        own => format!(", or {} for their own objects", own.join(" or ")),
    };
    format!("Needs the role {}{own}.", all.join(" or "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rm_client::calls;

    #[test]
    fn roles_are_those_of_the_table() {
        assert_eq!(needs(&calls::REPAIR), "Needs the role operator or admin.");
        assert_eq!(
            needs(&calls::LIST_TICKETS),
            "Needs the role operator or admin, or manager or viewer for their own objects."
        );
        assert_eq!(needs(&calls::DRAIN), "Needs the role operator or admin, or ecm for their own objects.");
    }
}
