//! List of tokens. The API has no call for tokens, so this module defines their JSON.

use prost_types::Timestamp;
use serde_json::{Value, json};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use rm_store::token::ListedToken;

use super::super::{
    error::CommandFailure,
    output::{
        Format, Printer,
        table::{Column, TableRow, cells},
        text,
    },
};

const COLUMNS: &[Column] = &[
    Column::text("ID").key(),
    Column::name("NAME").key(),
    Column::text("ROLES").key(),
    Column::text("STATE").key(),
    Column::number("EXPIRES"),
    Column::number("LAST USED"),
    Column::name("OWNER"),
    Column::text("EMS"),
    Column::text("USERS"),
    Column::name("CREATED BY"),
    Column::text("REVOKED"),
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
    let revoked = |at: &OffsetDateTime| format!("{} by {}", time(at), token.revoked_by.as_deref().unwrap_or("?"));
    let at = |time: &OffsetDateTime| Timestamp { seconds: time.unix_timestamp(), nanos: 0 };
    let list = |names: &[String]| text::or_nothing(&names.join(","));
    cells![
        token.token_id.to_string(),
        text::name(&token.name),
        list(&token.roles),
        state(token),
        Some(&at(&token.expire_time)),
        token.last_used_time.as_ref().map(at).as_ref(),
        text::name(&token.owner),
        list(&token.ems),
        token.users.as_deref().map_or_else(|| "*".to_owned(), list),
        text::name(&token.created_by),
        token.revoke_time.as_ref().map_or_else(|| text::NOTHING.to_owned(), revoked),
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
