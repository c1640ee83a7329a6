//! List of tokens. The API has no call for tokens, so this module defines their JSON.

use serde_json::{Value, json};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use rm_store::token::ListedToken;

use super::super::{
    error::CommandFailure,
    output::{
        Format, Printer,
        table::{Column, TableRow},
        text,
    },
};

const COLUMNS: &[Column] = &[
    Column::id("ID"),
    Column::text("NAME"),
    Column::text("ROLES"),
    Column::text("EMS"),
    Column::text("USERS"),
    Column::text("OWNER"),
    Column::text("STATE"),
    Column::text("EXPIRES"),
    Column::text("LAST USED"),
    Column::text("CREATED BY"),
];

/// Prints the tokens.
///
/// # Errors
/// As [`Printer::print`].
pub fn print(tokens: &[ListedToken], printer: &mut Printer) -> Result<(), CommandFailure> {
    match printer.format() {
        Format::Table | Format::Wide => printer.rows(COLUMNS, &tokens.iter().map(row).collect::<Vec<_>>()),
        Format::Json => {
            let all: Vec<Value> = tokens.iter().map(object).collect();
            printer.print(&format!("{:#}\n", json!({ "tokens": all })))
        }
        Format::Jsonl => printer.print(&tokens.iter().map(|token| format!("{}\n", object(token))).collect::<String>()),
    }
}

/// Returns "good", "expired" or "revoked".
fn state(token: &ListedToken) -> &'static str {
    match (&token.revoke_time, token.is_over) {
        (Some(_), _) => "revoked",
        (None, true) => "expired",
        (None, false) => "good",
    }
}

fn row(token: &ListedToken) -> TableRow {
    let state = match &token.revoke_time {
        Some(at) => format!("revoked {} by {}", time(at), token.revoked_by.as_deref().unwrap_or("?")),
        None => state(token).to_owned(),
    };
    let list = |names: &[String]| text::or_nothing(&names.join(","));
    vec![
        token.token_id.to_string(),
        token.name.clone(),
        list(&token.roles),
        list(&token.ems),
        token.users.as_deref().map_or_else(|| "*".to_owned(), list),
        token.owner.clone(),
        state,
        time(&token.expire_time),
        token.last_used_time.as_ref().map_or_else(|| text::NOTHING.to_owned(), time),
        token.created_by.clone(),
    ]
}

/// Returns a token as JSON. Inapplicable fields are null; `users` is null for a token for all users.
fn object(token: &ListedToken) -> Value {
    let ListedToken { token_id, name, roles, ems, users, owner, created_by, revoked_by, .. } = token;
    json!({
        "token_id": token_id.to_string(),
        "name": name,
        "roles": roles,
        "ems": ems,
        "users": users,
        "owner": owner,
        "state": state(token),
        "create_time": time(&token.create_time),
        "created_by": created_by,
        "expire_time": time(&token.expire_time),
        "last_used_time": token.last_used_time.as_ref().map(time),
        "revoke_time": token.revoke_time.as_ref().map(time),
        "revoked_by": revoked_by,
    })
}

fn time(time: &OffsetDateTime) -> String {
    time.replace_nanosecond(0).unwrap_or(*time).format(&Rfc3339).unwrap_or_default()
}
