//! `linkis_resource_action_record`: the history, one row per change; also what a late or repeated call is answered by.

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use sqlx::{FromRow, PgConnection, PgExecutor, Postgres, postgres::PgArguments, query::QueryAs};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::domain::{
    action::{Action, ActionRecord, TicketDetail},
    audit::{Difference, Subject},
    em::{Em, EmInstance},
    ledger::{Deltas, DrainDelta, EndedDelta},
    limit::{Pattern, Rule},
    limit_mode::LimitMode,
    name::Name,
    policy::Policy,
    principal::{Actor, Principal},
    resource::{Resource, ResourceType},
    scope::Scope,
    state::State,
    ticket::{End, EndedTicket, Ticket, TicketState},
};

use super::{
    StoreError, expect_rows, limit,
    rows::{Table, labels_json},
};

mod by_key;

pub use by_key::{Key, list_by_key};

const TABLE: Table = Table("linkis_resource_action_record");

#[derive(FromRow)]
struct EndedRow {
    ticket_id: Uuid,
    action: String,
    user: String,
    em_application_name: String,
    em_instance: String,
    action_time: OffsetDateTime,
}

impl TryFrom<EndedRow> for EndedTicket {
    type Error = StoreError;

    fn try_from(row: EndedRow) -> Result<Self, StoreError> {
        Ok(Self {
            id: row.ticket_id,
            user: TABLE.name("user", &row.user)?,
            em: TABLE.em(&row.em_application_name, &row.em_instance)?,
            end: End::parse(&row.action).ok_or_else(|| StoreError::inconsistent(TABLE.0, &row.action))?,
            at: row.action_time,
        })
    }
}

/// How those among `ticket_ids` that are remembered ended.
pub async fn read(
    executor: impl PgExecutor<'_>,
    ticket_ids: &[Uuid],
) -> Result<HashMap<Uuid, EndedTicket>, StoreError> {
    let rows: Vec<EndedRow> = sqlx::query_as(
        r#"-- action_record::read
        SELECT ticket_id, action, "user", em_application_name, em_instance, action_time
        FROM linkis_resource_action_record
        WHERE ticket_id = ANY ($1) AND action IN ('released', 'forced', 'expired', 'unregistered', 'lost')"#,
    )
    .bind(ticket_ids)
    .fetch_all(executor)
    .await?;
    rows.into_iter().map(|row| EndedTicket::try_from(row).map(|ended| (ended.id, ended))).collect()
}

/// With what use those among `ticket_ids` were adopted of which that is remembered.
pub async fn adopted(
    executor: impl PgExecutor<'_>,
    ticket_ids: &[Uuid],
) -> Result<HashMap<Uuid, Resource>, StoreError> {
    let rows: Vec<(Uuid, String, String)> = sqlx::query_as(
        "-- action_record::adopted
        SELECT ticket_id, resource_type, resource::text FROM linkis_resource_action_record
        WHERE ticket_id = ANY ($1) AND action = $2",
    )
    .bind(ticket_ids)
    .bind(Action::Adopted.as_str())
    .fetch_all(executor)
    .await?;
    let used = |(id, resource_type, json): (Uuid, String, String)| {
        Ok((id, TABLE.resource("resource", TABLE.resource_type(&resource_type)?, &json)?))
    };
    rows.into_iter().map(used).collect()
}

/// Whether it is remembered that something was reported of a ticket in use, in the batch of this moment.
pub async fn was_reported(
    executor: impl PgExecutor<'_>,
    ticket_id: Uuid,
    at: OffsetDateTime,
) -> Result<bool, StoreError> {
    let was_reported = sqlx::query_scalar(
        "-- action_record::was_reported
        SELECT EXISTS (SELECT FROM linkis_resource_action_record
            WHERE ticket_id = $1 AND action = $2 AND action_time = $3)",
    )
    .bind(ticket_id)
    .bind(Action::Reported.as_str())
    .bind(at)
    .fetch_one(executor)
    .await?;
    Ok(was_reported)
}

/// What a record says.
struct Record<'a> {
    action: Action,
    ticket: Option<&'a Ticket>,
    em: &'a EmInstance,
    resource: &'a Resource,
    actor: &'a str,
    reason: Option<&'a Name>,
    /// Of an end, when the ticket was granted.
    held_since: Option<OffsetDateTime>,
    address: Option<&'a str>,
    before: Option<State>,
    after: Option<State>,
}

impl<'a> Record<'a> {
    fn new(action: Action, em: &'a EmInstance, resource: &'a Resource, actor: &'a str) -> Self {
        let (ticket, reason, held_since, address, before, after) = (None, None, None, None, None, None);
        Self { action, ticket, em, resource, actor, reason, held_since, address, before, after }
    }

    fn of_em(action: Action, em: &'a Em, by: Option<&'a Principal>) -> Self {
        let by = by.unwrap_or(&Principal::Service);
        Self::new(action, &em.instance, &em.total, by.as_str())
    }

    fn of_ticket(action: Action, ticket: &'a Ticket, by: &'a Principal) -> Self {
        Self { ticket: Some(ticket), ..Self::new(action, &ticket.em, ticket.resource(), by.as_str()) }
    }

    fn of_end(ended: &'a EndedDelta) -> Self {
        let of_ticket = Self::of_ticket(Action::Ended(ended.end), &ended.ticket, &ended.by.principal);
        let before = (ended.end == End::Forced).then(|| State::of_ticket(&ended.ticket));
        Self {
            reason: ended.reason.as_ref(),
            held_since: Some(ended.ticket.locked_time),
            address: ended.by.address(),
            before,
            ..of_ticket
        }
    }

    fn of_adopted((ticket, by): &'a (Ticket, Actor)) -> Self {
        let after = Some(State::of_ticket(ticket));
        Self { address: by.address(), after, ..Self::of_ticket(Action::Adopted, ticket, &by.principal) }
    }

    fn of_drain(line: &'a DrainDelta) -> Self {
        let action = if line.after.is_some() { Action::Drained } else { Action::Resumed };
        let state = |drain: &Option<_>| drain.as_deref().map(State::of_drain);
        Self {
            reason: line.reason.as_ref(),
            address: line.by.address(),
            before: state(&line.before),
            after: state(&line.after),
            ..Self::new(action, &line.em, &line.total, line.by.as_str())
        }
    }
}

/// The columns of what a batch does, but for the tickets that were granted and live, which say it themselves: what stands before
/// them, and what behind.
#[derive(Default)]
pub(super) struct Columns<'a> {
    pub action: Vec<&'static str>,
    pub ticket_id: Vec<Option<Uuid>>,
    pub user: Vec<Option<&'a str>>,
    pub creator: Vec<Option<&'a str>>,
    pub engine_type: Vec<Option<&'a str>>,
    pub labels: Vec<Option<String>>,
    pub engine_application_name: Vec<Option<&'a str>>,
    pub engine_instance: Vec<Option<&'a str>>,
    pub em_application_name: Vec<&'a str>,
    pub em_instance: Vec<&'a str>,
    pub resource_type: Vec<&'static str>,
    pub resource: Vec<String>,
    pub actor: Vec<&'a str>,
    pub reason: Vec<Option<&'a str>>,
    pub held_since: Vec<Option<OffsetDateTime>>,
    /// Of what operators and administrators do; empty if the batch has nothing of it, so that others pay nothing for it.
    pub acts: ActColumns<'a>,
}

/// From where something was done, and how what it was done to stood before and after it.
#[derive(Default)]
pub(super) struct ActColumns<'a> {
    pub address: Vec<Option<&'a str>>,
    pub before: Vec<Option<String>>,
    pub after: Vec<Option<String>>,
}

impl<'a> ActColumns<'a> {
    /// Of the record at `nth`; those before it that are not there are of nothing.
    fn push(&mut self, nth: usize, address: Option<&'a str>, before: Option<State>, after: Option<State>) {
        self.address.resize(nth, None);
        self.before.resize(nth, None);
        self.after.resize(nth, None);
        self.address.push(address);
        self.before.push(before.map(State::into_string));
        self.after.push(after.map(State::into_string));
    }
}

impl<'a> Columns<'a> {
    /// What is told before the grants of the batch, for which it gave back; and behind them, the EMs that went: who was granted
    /// something there was before.
    pub fn of(deltas: &'a Deltas) -> (Self, Self) {
        let registered_by = |em: &Em| deltas.registered_by.get(&em.instance);
        let registered = deltas.ems_updated.iter().chain(&deltas.ems_inserted);
        // A ticket that ended in the batch in which it was granted was granted all the same. One that was in use was adopted.
        let granted_and_ended = deltas.ended.iter().filter(|ended| !ended.stored && ended.ticket.is_locked());
        let granted_and_ended = granted_and_ended.map(|ended| &ended.ticket);
        let told = |action| move |(ticket, by): &'a (Ticket, Principal)| Record::of_ticket(action, ticket, by);
        // One that registers again in the same batch went before that.
        let registers_again = |gone: &Em| {
            let mut registered = registered.clone().chain(&deltas.ems_resized);
            registered.any(|em| em.instance == gone.instance && em.epoch > gone.epoch)
        };
        let gone = |(em, end, by): &'a (Em, End, Principal)| Record::of_em(Action::Ended(*end), em, Some(by));
        let (before, behind): (Vec<_>, Vec<_>) = deltas.ems_gone.iter().partition(|(em, ..)| registers_again(em));
        // On an EM that was drained and not resumed again, what was granted was granted before.
        let is_resumed = |(number, line): (usize, &DrainDelta)| {
            let mut later = deltas.drain_lines.iter().skip(number);
            later.any(|later| later.em == line.em && later.after.is_none())
        };
        let (drains_before, drains_behind): (Vec<_>, Vec<_>) =
            deltas.drain_lines.iter().enumerate().partition(|line| is_resumed(*line));
        let records = before
            .into_iter()
            .map(gone)
            .chain(registered.map(|em| Record::of_em(Action::Registered, em, registered_by(em))))
            .chain(deltas.ems_resized.iter().map(|em| Record::of_em(Action::Resized, em, registered_by(em))))
            .chain(granted_and_ended.map(|ticket| Record::of_ticket(Action::Granted, ticket, &ticket.principal)))
            .chain(deltas.adopted.iter().map(Record::of_adopted))
            .chain(deltas.inited.iter().map(told(Action::Inited)))
            .chain(deltas.reported.iter().map(told(Action::Reported)))
            .chain(deltas.ended.iter().map(Record::of_end))
            .chain(drains_before.into_iter().map(|(_, line)| Record::of_drain(line)));
        let behind =
            behind.into_iter().map(gone).chain(drains_behind.into_iter().map(|(_, line)| Record::of_drain(line)));
        (Self::from_records(records), Self::from_records(behind))
    }

    fn from_records(records: impl Iterator<Item = Record<'a>>) -> Self {
        let mut columns = Self::default();
        for (nth, record) in records.enumerate() {
            columns.push(&record);
            let Record { address, before, after, .. } = record;
            if !columns.acts.address.is_empty() || address.is_some() || before.is_some() || after.is_some() {
                columns.acts.push(nth, address, before, after);
            }
        }
        columns
    }

    fn push(&mut self, record: &Record<'a>) {
        let engine = record.ticket.and_then(|ticket| match &ticket.state {
            TicketState::Used { engine, .. } => Some(engine),
            TicketState::Locked { .. } => None,
        });
        self.action.push(record.action.as_str());
        self.ticket_id.push(record.ticket.map(|ticket| ticket.id));
        self.user.push(record.ticket.map(|ticket| ticket.user.as_str()));
        self.creator.push(record.ticket.map(|ticket| ticket.creator.as_str()));
        self.engine_type.push(record.ticket.map(|ticket| ticket.engine_type.as_str()));
        self.labels.push(record.ticket.map(|ticket| labels_json(&ticket.labels)));
        self.engine_application_name.push(engine.map(|engine| engine.application_name.as_str()));
        self.engine_instance.push(engine.map(|engine| engine.instance.as_str()));
        self.em_application_name.push(record.em.application_name.as_str());
        self.em_instance.push(record.em.instance.as_str());
        self.resource_type.push(record.resource.resource_type().as_str());
        self.resource.push(record.resource.to_json());
        self.actor.push(record.actor);
        self.reason.push(record.reason.map(Name::as_str));
        self.held_since.push(record.held_since);
    }
}

/// A change of what limits there are.
#[derive(Debug, Clone)]
pub enum LimitLine {
    /// A rule is new, or has another maximum; with the one before it, if there was one.
    Set(Rule, Option<Rule>),
    /// A rule is gone.
    Deleted(Rule),
    /// A kind of EMs, by its application name, has another policy; with the one before it, if there was one.
    Policy(Name, Policy, Option<Policy>),
    /// All tickets of a label set are counted: its rules decide from here on.
    InForce(BTreeSet<String>),
}

impl LimitLine {
    fn action(&self) -> Action {
        match self {
            Self::Set(..) => Action::LimitSet,
            Self::Deleted(_) => Action::LimitDeleted,
            Self::Policy(..) => Action::PolicySet,
            Self::InForce(_) => Action::LimitsInForce,
        }
    }

    fn em_kind(&self) -> Option<&str> {
        match self {
            Self::Policy(kind, ..) => Some(kind.as_str()),
            Self::Set(..) | Self::Deleted(_) | Self::InForce(_) => None,
        }
    }

    /// The service itself has label sets decide, whoever wanted it.
    fn actor<'a>(&self, by: &'a Actor) -> (&'a str, Option<&'a str>) {
        match self {
            Self::Set(..) | Self::Deleted(_) | Self::Policy(..) => (by.as_str(), by.address()),
            Self::InForce(_) => (Principal::Service.as_str(), None),
        }
    }

    fn states(&self) -> (Option<String>, Option<String>) {
        let (before, after) = match self {
            Self::Set(rule, before) => (before.as_ref().map(State::of_rule), Some(State::of_rule(rule))),
            Self::Deleted(rule) => (Some(State::of_rule(rule)), None),
            Self::Policy(_, policy, before) => (before.as_ref().map(State::of_policy), Some(State::of_policy(policy))),
            Self::InForce(_) => (None, None),
        };
        (before.map(State::into_string), after.map(State::into_string))
    }

    /// The pattern of a rule, or of each label of a label set; what a policy checks.
    fn scope(&self) -> String {
        match self {
            Self::Set(rule, _) | Self::Deleted(rule) => limit::pattern_json(&rule.pattern),
            Self::Policy(_, policy, _) => {
                serde_json::json!(policy.to_string().split(',').collect::<Vec<_>>()).to_string()
            }
            Self::InForce(keys) => {
                limit::pattern_json(&Pattern::new(keys.iter().map(|key| (key.clone(), None)).collect()))
            }
        }
    }

    /// What a rule does.
    fn mode(&self) -> Option<&'static str> {
        match self {
            Self::Set(rule, _) | Self::Deleted(rule) => Some(rule.mode.as_str()),
            Self::Policy(..) | Self::InForce(_) => None,
        }
    }

    /// The maximum of a rule: nothing, if it is more than a resource may have.
    fn max(&self) -> String {
        let max = match self {
            Self::Set(rule, _) | Self::Deleted(rule) => {
                Resource::special(rule.max.iter().map(|(dimension, max)| (dimension.key(), *max)).collect()).ok()
            }
            Self::Policy(..) | Self::InForce(_) => None,
        };
        max.unwrap_or_else(|| Resource::zero(ResourceType::Special)).to_json()
    }
}

/// Remembers what limits have changed, and who changed them; inside the fence, so that the numbers of the lines tell who was judged by
/// them.
pub async fn insert_limits(connection: &mut PgConnection, lines: &[LimitLine], by: &Actor) -> Result<(), StoreError> {
    if lines.is_empty() {
        return Ok(());
    }
    let (actors, addresses): (Vec<_>, Vec<_>) = lines.iter().map(|line| line.actor(by)).unzip();
    let (before, after): (Vec<_>, Vec<_>) = lines.iter().map(LimitLine::states).unzip();
    let done = sqlx::query(
        "-- action_record::insert_limits
        INSERT INTO linkis_resource_action_record (action, em_application_name, scope, resource_type, resource, actor,
            action_time, limit_mode, address, before, after)
        SELECT action, em_kind, scope::jsonb, $6, max::jsonb, actor, clock_timestamp(), mode, address, before, after
        FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $7::text[], $8::text[], $9::text[], $10::text[])
            AS d (action, em_kind, scope, max, actor, mode, address, before, after)",
    )
    .bind(lines.iter().map(|line| line.action().as_str()).collect::<Vec<_>>())
    .bind(lines.iter().map(LimitLine::em_kind).collect::<Vec<_>>())
    .bind(lines.iter().map(LimitLine::scope).collect::<Vec<_>>())
    .bind(lines.iter().map(LimitLine::max).collect::<Vec<_>>())
    .bind(actors)
    .bind(ResourceType::Special.as_str())
    .bind(lines.iter().map(LimitLine::mode).collect::<Vec<_>>())
    .bind(addresses)
    .bind(before)
    .bind(after)
    .execute(connection)
    .await?;
    expect_rows(TABLE.0, lines.len(), done.rows_affected())
}

/// That the counters of an EM or a scope were repaired.
#[derive(Debug)]
pub struct Repair {
    /// Whose.
    pub subject: Subject,
    /// What its tickets hold together.
    pub held: Resource,
    /// What differed.
    pub differences: Vec<Difference>,
}

/// Remembers what was repaired at `now`, and by whom.
pub async fn insert_repairs(
    connection: &mut PgConnection,
    repairs: &[Repair],
    now: OffsetDateTime,
    by: &Actor,
) -> Result<(), StoreError> {
    let ems = repairs.iter().map(|repair| match &repair.subject {
        Subject::Em(em) => Some((em.application_name.as_str(), em.instance.as_str())),
        Subject::Scope(_) | Subject::Rule(_) | Subject::Policy(_) | Subject::Other(_) => None,
    });
    let (application_names, instances): (Vec<_>, Vec<_>) = ems.map(Option::unzip).unzip();
    let scopes = repairs.iter().map(|repair| match &repair.subject {
        Subject::Em(_) | Subject::Rule(_) | Subject::Policy(_) | Subject::Other(_) => None,
        Subject::Scope(scope) => Some(serde_json::json!(scope.labels()).to_string()),
    });
    let states = repairs.iter().map(|repair| State::of_repair(&repair.differences));
    let states = states.map(|(before, after)| (before.into_string(), after.into_string()));
    let (before, after): (Vec<_>, Vec<_>) = states.unzip();
    let done = sqlx::query(
        "-- action_record::insert_repairs
        INSERT INTO linkis_resource_action_record (action, em_application_name, em_instance, scope, resource_type,
            resource, actor, action_time, address, before, after)
        SELECT $1, em_application_name, em_instance, scope::jsonb, resource_type, resource::jsonb, $8, $7, $9, before, after
        FROM unnest($2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $10::text[], $11::text[])
            AS d (em_application_name, em_instance, scope, resource_type, resource, before, after)",
    )
    .bind(Action::Repaired.as_str())
    .bind(application_names)
    .bind(instances)
    .bind(scopes.collect::<Vec<_>>())
    .bind(repairs.iter().map(|repair| repair.held.resource_type().as_str()).collect::<Vec<_>>())
    .bind(repairs.iter().map(|repair| repair.held.to_json()).collect::<Vec<_>>())
    .bind(now)
    .bind(by.as_str())
    .bind(by.address())
    .bind(before)
    .bind(after)
    .execute(connection)
    .await?;
    expect_rows(TABLE.0, repairs.len(), done.rows_affected())
}

/// Something that was done to what no other column names: a token, or a provider.
#[derive(Debug)]
pub struct OtherLine {
    /// What was done.
    pub action: Action,
    /// To what, for people.
    pub object: String,
    /// How it stood before.
    pub before: Option<State>,
    /// How it stands now.
    pub after: Option<State>,
}

/// Remembers what was done to such things, and by whom: in the transaction in which it is done.
pub async fn insert_others(connection: &mut PgConnection, lines: &[OtherLine], by: &Actor) -> Result<(), StoreError> {
    let done = sqlx::query(
        "-- action_record::insert_others
        INSERT INTO linkis_resource_action_record (action, object, before, after, resource_type, resource, actor, address,
            action_time)
        SELECT action, object, before, after, $5, $6::jsonb, $7, $8, clock_timestamp()
        FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]) AS d (action, object, before, after)",
    )
    .bind(lines.iter().map(|line| line.action.as_str()).collect::<Vec<_>>())
    .bind(lines.iter().map(|line| line.object.as_str()).collect::<Vec<_>>())
    .bind(lines.iter().map(|line| line.before.as_ref().map(State::as_str)).collect::<Vec<_>>())
    .bind(lines.iter().map(|line| line.after.as_ref().map(State::as_str)).collect::<Vec<_>>())
    .bind(ResourceType::Special.as_str())
    .bind(Resource::zero(ResourceType::Special).to_json())
    .bind(by.as_str())
    .bind(by.address())
    .execute(connection)
    .await?;
    expect_rows(TABLE.0, lines.len(), done.rows_affected())
}

#[derive(FromRow)]
struct ActionRow {
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

impl ActionRow {
    /// What else is known of its ticket.
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
                Ok(Subject::Rule(Pattern::new(labels)))
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

/// Up to `limit` records, oldest first, from behind number `after`; of one ticket, or of all.
pub async fn list(
    executor: impl PgExecutor<'_>,
    ticket_id: Option<Uuid>,
    after: i64,
    limit: i64,
) -> Result<Vec<ActionRecord>, StoreError> {
    // One text each, so that each is planned for its own index.
    let sql = if ticket_id.is_some() {
        r#"-- action_record::list, of a ticket
        SELECT id, action, ticket_id, "user", em_application_name, em_instance, scope::text, resource_type, resource::text,
            actor, action_time, limit_mode, reason, object, address, before, after, creator, engine_type, labels::text,
            engine_application_name, engine_instance
        FROM linkis_resource_action_record WHERE ticket_id = $3 AND id > $1 ORDER BY id LIMIT $2"#
    } else {
        r#"-- action_record::list, all
        SELECT id, action, ticket_id, "user", em_application_name, em_instance, scope::text, resource_type, resource::text,
            actor, action_time, limit_mode, reason, object, address, before, after, creator, engine_type, labels::text,
            engine_application_name, engine_instance
        FROM linkis_resource_action_record WHERE id > $1 AND $3::uuid IS NULL ORDER BY id LIMIT $2"#
    };
    let rows: Vec<ActionRow> = sqlx::query_as(sql).bind(after).bind(limit).bind(ticket_id).fetch_all(executor).await?;
    rows.into_iter().map(ActionRecord::try_from).collect()
}

/// Which lines of the history to list.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// Only the life of this ticket.
    pub ticket_id: Option<Uuid>,
    /// Only what was done to tickets of these users.
    pub users: Option<BTreeSet<Name>>,
    /// Only what was done to this EM, or to tickets on it.
    pub em: Option<EmInstance>,
    /// Only these actions; none for all.
    pub actions: BTreeSet<&'static str>,
    /// Only what this one did.
    pub actor: Option<Name>,
    /// Only what was done at this time or later.
    pub from: Option<OffsetDateTime>,
    /// Only what was done before this time.
    pub to: Option<OffsetDateTime>,
    /// Also what was done to tokens and providers, of which only those know who run the cluster.
    pub objects: bool,
}

impl Filter {
    /// Whether it leaves nothing out but by the ticket.
    pub fn is_of_ticket_alone(&self) -> bool {
        let Self { ticket_id, users, em, actions, actor, from, to, objects } = self;
        let leaves_out = !objects && ticket_id.is_none();
        !leaves_out
            && users.is_none()
            && em.is_none()
            && actions.is_empty()
            && actor.is_none()
            && from.is_none()
            && to.is_none()
    }
}

/// Numbers of lines: behind the first, up to the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Numbers {
    /// Behind which.
    pub after: i64,
    /// Up to which.
    pub last: i64,
}

/// Lines that are `$of` somebody and match, among these numbers, `$order` by number.
macro_rules! select_matching {
    ($of:literal, $order:literal) => {
        concat!(
            r#"SELECT id, action, ticket_id, "user", em_application_name, em_instance, scope::text, resource_type, resource::text,
            actor, action_time, limit_mode, reason, object, address, before, after, creator, engine_type, labels::text,
            engine_application_name, engine_instance
        FROM linkis_resource_action_record WHERE "#,
            $of,
            r#" AND id > $1 AND id <= $2 AND ($5::text[] IS NULL OR "user" = ANY ($5))
            AND ($6::text IS NULL OR (em_application_name = $6 AND em_instance = $7))
            AND (cardinality($8::text[]) = 0 OR action = ANY ($8)) AND ($9::text IS NULL OR actor = $9)
            AND ($10::timestamptz IS NULL OR action_time >= $10) AND ($11::timestamptz IS NULL OR action_time < $11)
            AND ($12 OR object IS NULL)
        ORDER BY id "#,
            $order,
            " LIMIT $3"
        )
    };
}
use select_matching;

macro_rules! matching {
    ($name:literal, $of:literal, $order:literal) => {
        concat!("-- action_record::list_matching, ", $name, "\n        ", select_matching!($of, $order))
    };
}

impl Filter {
    /// Binds what matches, from the fifth parameter on.
    fn bind<'q, O>(&'q self, query: QueryAs<'q, Postgres, O, PgArguments>) -> QueryAs<'q, Postgres, O, PgArguments> {
        let em = self.em.as_ref();
        query
            .bind(self.users.as_ref().map(|users| users.iter().map(Name::as_str).collect::<Vec<_>>()))
            .bind(em.map(|em| em.application_name.as_str()))
            .bind(em.map(|em| em.instance.as_str()))
            .bind(self.actions.iter().copied().collect::<Vec<_>>())
            .bind(self.actor.as_ref().map(Name::as_str))
            .bind(self.from)
            .bind(self.to)
            .bind(self.objects)
    }
}

/// Up to `limit` records among these numbers that match, oldest first or newest first. It looks through all of them but for those of a
/// ticket, which it finds.
pub async fn list_matching(
    executor: impl PgExecutor<'_>,
    filter: &Filter,
    numbers: Numbers,
    newest_first: bool,
    limit: i64,
) -> Result<Vec<ActionRecord>, StoreError> {
    // One text each, so that each is planned for its own index.
    let sql = match (filter.ticket_id.is_some(), newest_first) {
        (true, false) => matching!("of a ticket", "ticket_id = $4", "ASC"),
        (true, true) => matching!("of a ticket, newest first", "ticket_id = $4", "DESC"),
        (false, false) => matching!("all", "$4::uuid IS NULL", "ASC"),
        (false, true) => matching!("all, newest first", "$4::uuid IS NULL", "DESC"),
    };
    let rows = sqlx::query_as(sql).bind(numbers.after).bind(numbers.last).bind(limit).bind(filter.ticket_id);
    let rows: Vec<ActionRow> = filter.bind(rows).fetch_all(executor).await?;
    rows.into_iter().map(ActionRecord::try_from).collect()
}

impl Numbers {
    /// Those up to `edge`, from the beginning or from the end; all of them, if it is not there.
    fn cut_at(self, edge: Option<i64>, newest_first: bool) -> Self {
        match (edge, newest_first) {
            (None, _) => self,
            (Some(edge), false) => Self { last: edge, ..self },
            (Some(edge), true) => Self { after: edge - 1, ..self },
        }
    }
}

/// The first so many of these numbers that lines have, from their beginning or from their end; all of them if there are not so many.
pub async fn cut(
    executor: impl PgExecutor<'_>,
    numbers: Numbers,
    newest_first: bool,
    many: i64,
) -> Result<Numbers, StoreError> {
    let sql = if newest_first {
        "-- action_record::cut, newest first
        SELECT id FROM linkis_resource_action_record WHERE id > $1 AND id <= $2 ORDER BY id DESC OFFSET $3 - 1 LIMIT 1"
    } else {
        "-- action_record::cut
        SELECT id FROM linkis_resource_action_record WHERE id > $1 AND id <= $2 ORDER BY id OFFSET $3 - 1 LIMIT 1"
    };
    let edge: Option<i64> =
        sqlx::query_scalar(sql).bind(numbers.after).bind(numbers.last).bind(many).fetch_optional(executor).await?;
    Ok(numbers.cut_at(edge, newest_first))
}

/// The number before the first line that was written at `time` or later, give or take what was written at nearly the same time: lines take
/// their numbers in the order of time, so that it is found by halves.
pub async fn number_before(executor: impl PgExecutor<'_>, time: OffsetDateTime) -> Result<i64, StoreError> {
    let number = sqlx::query_scalar(
        "-- action_record::number_before
        WITH RECURSIVE search (low, high) AS (
            SELECT coalesce((SELECT id FROM linkis_resource_action_record ORDER BY id LIMIT 1), 1),
                coalesce((SELECT id FROM linkis_resource_action_record ORDER BY id DESC LIMIT 1), 0) + 1
            UNION ALL
            SELECT CASE WHEN f.id IS NOT NULL THEN f.id + 1 ELSE s.low END,
                CASE WHEN f.id IS NOT NULL THEN s.high ELSE s.middle END
            FROM (SELECT low, high, (low + high) / 2 AS middle FROM search WHERE low < high) s
            LEFT JOIN LATERAL (
                SELECT id FROM (
                    SELECT id, action_time FROM linkis_resource_action_record WHERE id >= s.middle ORDER BY id LIMIT 1) first
                WHERE first.action_time < $1) f ON true)
        SELECT min(low) - 1 FROM search WHERE low >= high",
    )
    .bind(time)
    .fetch_one(executor)
    .await?;
    Ok(number)
}

/// Removes up to `limit` records older than `history` that are in no part of their own; true if there may be more.
pub async fn forget_rest(executor: impl PgExecutor<'_>, history: Duration, limit: i64) -> Result<bool, StoreError> {
    let forgotten: i64 = sqlx::query_scalar(
        "-- action_record::forget_rest
        WITH gone AS (
            DELETE FROM linkis_resource_action_record_rest WHERE (id, action_time) IN (
                SELECT id, action_time FROM linkis_resource_action_record_rest ORDER BY id LIMIT $2)
                AND action_time < now() - make_interval(secs => $1)
            RETURNING id),
        -- In the same transaction: see history_horizon.
        raised AS (
            UPDATE linkis_resource_action_horizon SET forgotten = greatest(forgotten, (SELECT max(id) FROM gone))
            WHERE EXISTS (SELECT FROM gone))
        SELECT count(*) FROM gone",
    )
    .bind(history.as_secs_f64())
    .bind(limit)
    .fetch_one(executor)
    .await?;
    Ok(forgotten == limit)
}
