//! A history line as read, and its conversion to the model.

use rm_model::{
    action::{Action, ActionRecord, TicketDetail},
    audit::Subject,
    limit::LabelPattern,
    limit_mode::LimitMode,
    scope::Scope,
};

use crate::{StoreError, rows::TableRow};

use super::TABLE;

/// Returns the ticket's creator, engine type, labels and engine, if the line has them.
fn detail(row: TableRow<'_>) -> Result<Option<Box<TicketDetail>>, StoreError> {
    let Some(creator) = row.get("creator")? else { return Ok(None) };
    let engine: (Option<&str>, Option<&str>) = (row.get("engine_application_name")?, row.get("engine_instance")?);
    let engine = match engine {
        (Some(application_name), Some(instance)) => Some(TABLE.engine(application_name, instance)?),
        _ => None,
    };
    Ok(Some(Box::new(TicketDetail {
        creator,
        engine_type: row.get("engine_type")?,
        labels: row.labels("labels")?,
        engine,
    })))
}

fn subject(row: TableRow<'_>, action: Action) -> Result<Subject, StoreError> {
    if let Some(object) = row.get("object")? {
        return Ok(Subject::Other(object));
    }
    let columns: [Option<&str>; 3] = [row.get("em_application_name")?, row.get("em_instance")?, row.get("scope")?];
    match columns {
        [Some(kind), None, Some(_)] => Ok(Subject::Policy(TABLE.name("em_application_name", kind)?)),
        [None, None, Some(_)] if action.is_of_rules() => Ok(Subject::Rule(LabelPattern::new(row.json("scope")?))),
        [Some(application_name), Some(instance), None] => Ok(Subject::Em(TABLE.em(application_name, instance)?)),
        [None, None, Some(_)] => Ok(Subject::Scope(Scope::new(row.json("scope")?))),
        _ => Err(row.wrong(format!("line {}: neither an EM nor a scope", row.get::<i64>("id")?))),
    }
}

/// Returns the history line in a row.
pub(super) fn record(row: TableRow<'_>) -> Result<ActionRecord, StoreError> {
    let action = row.parse("action", Action::parse)?;
    let user: Option<&str> = row.get("user")?;
    let user = user.map(|user| TABLE.name("user", user)).transpose()?;
    Ok(ActionRecord {
        number: row.get("id")?,
        action,
        ticket: row.get::<Option<_>>("ticket_id")?.zip(user),
        detail: detail(row)?,
        subject: subject(row, action)?,
        resource: row.resource("resource", row.resource_type()?)?,
        limit_mode: row.get::<Option<&str>>("limit_mode")?.and_then(LimitMode::parse),
        reason: row.get("reason")?,
        address: row.get("address")?,
        before: row.get("before")?,
        after: row.get("after")?,
        actor: row.get("actor")?,
        at: row.get("action_time")?,
    })
}
