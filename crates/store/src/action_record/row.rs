//! A history line as read, and its conversion to the model.

use time::OffsetDateTime;
use uuid::Uuid;

use rm_model::{
    action::{Action, ActionRecord, TicketDetail},
    audit::Subject,
    limit::LabelPattern,
    limit_mode::LimitMode,
    scope::Scope,
};

use crate::StoreError;

use super::TABLE;

from_row! {
    pub(super) struct ActionRow {
        id: i64,
        action: String,
        ticket_id: Option<Uuid>,
        user: Option<String>,
        em_application_name: Option<String>,
        em_instance: Option<String>,
        scope: Option<String>,
        resource_type: String,
        resource: String,
        actor: String,
        action_time: OffsetDateTime,
        limit_mode: Option<String>,
        reason: Option<String>,
        object: Option<String>,
        address: Option<String>,
        before: Option<String>,
        after: Option<String>,
        creator: Option<String>,
        engine_type: Option<String>,
        labels: Option<String>,
        engine_application_name: Option<String>,
        engine_instance: Option<String>,
    }
}

impl ActionRow {
    /// Returns the ticket's creator, engine type, labels and engine, if the line has them.
    fn detail(&self) -> Result<Option<Box<TicketDetail>>, StoreError> {
        let (Some(creator), Some(engine_type), Some(labels)) = (&self.creator, &self.engine_type, &self.labels) else {
            return Ok(None);
        };
        let engine = match (&self.engine_application_name, &self.engine_instance) {
            (Some(application_name), Some(instance)) => Some(TABLE.engine(application_name, instance)?),
            _ => None,
        };
        let (creator, engine_type, labels) = (creator.clone(), engine_type.clone(), TABLE.labels(labels)?);
        Ok(Some(Box::new(TicketDetail { creator, engine_type, labels, engine })))
    }

    fn subject(&self, action: Action) -> Result<Subject, StoreError> {
        if let Some(object) = &self.object {
            return Ok(Subject::Other(object.clone()));
        }
        match (&self.em_application_name, &self.em_instance, &self.scope) {
            (Some(kind), None, Some(_)) => Ok(Subject::Policy(TABLE.name("em_application_name", kind)?)),
            (None, None, Some(pattern)) if action.is_of_rules() => {
                let labels = serde_json::from_str(pattern).map_err(|error| StoreError::inconsistent(TABLE.0, error))?;
                Ok(Subject::Rule(LabelPattern::new(labels)))
            }
            (Some(application_name), Some(instance), None) => Ok(Subject::Em(TABLE.em(application_name, instance)?)),
            (None, None, Some(scope)) => {
                let labels = serde_json::from_str(scope).map_err(|error| StoreError::inconsistent(TABLE.0, error))?;
                Ok(Subject::Scope(Scope::new(labels)))
            }
            _ => Err(StoreError::inconsistent(TABLE.0, format!("line {}: neither an EM nor a scope", self.id))),
        }
    }
}

impl TryFrom<ActionRow> for ActionRecord {
    type Error = StoreError;

    fn try_from(row: ActionRow) -> Result<Self, StoreError> {
        let resource_type = TABLE.resource_type(&row.resource_type)?;
        let action = Action::parse(&row.action).ok_or_else(|| StoreError::inconsistent(TABLE.0, &row.action))?;
        let (subject, detail) = (row.subject(action)?, row.detail()?);
        let user = row.user.map(|user| TABLE.name("user", &user)).transpose()?;
        Ok(Self {
            number: row.id,
            action,
            ticket: row.ticket_id.zip(user),
            detail,
            subject,
            resource: TABLE.resource("resource", resource_type, &row.resource)?,
            limit_mode: row.limit_mode.as_deref().and_then(LimitMode::parse),
            reason: row.reason,
            address: row.address,
            before: row.before,
            after: row.after,
            actor: row.actor,
            at: row.action_time,
        })
    }
}
