//! `linkis_rm_token`: who may call, by the hashes of what they show.

use std::{collections::BTreeSet, time::Duration};

use sqlx::{FromRow, PgConnection, PgExecutor};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::domain::{
    access::{EmPattern, Rights, Role},
    action::Action,
    name::Name,
    principal::Actor,
    state::State,
    token::TokenHash,
};

use super::{
    StoreError,
    action_record::{self, OtherLine},
    expect_rows,
    rows::Table,
};

const TABLE: Table = Table("linkis_rm_token");

/// How many tokens there may be: every instance keeps all of them.
pub const TOKENS_MAX: i64 = 10_000;

/// How long a token that is revoked or over is remembered.
const REMEMBERED: Duration = Duration::from_secs(90 * 24 * 60 * 60);

/// A token that is to be.
#[derive(Debug)]
pub struct NewToken {
    /// What names it.
    pub id: Uuid,
    /// What it is recognised by.
    pub hash: TokenHash,
    /// Who shows it.
    pub name: Name,
    /// What its holder may do.
    pub rights: Rights,
    /// Whom to ask about it.
    pub owner: Name,
    /// How long it is good for.
    pub lifetime: Duration,
}

/// What an instance has to know of a token.
#[derive(Debug)]
pub struct StoredToken {
    /// What names it.
    pub id: Uuid,
    /// What it is recognised by.
    pub hash: TokenHash,
    /// Who shows it.
    pub name: Name,
    /// What its holder may do.
    pub rights: Rights,
    /// For how long it is good from now on, by the database's clock; zero if it is over.
    pub left: Duration,
    /// Whether it was revoked.
    pub is_revoked: bool,
}

/// A token as an administrator sees it.
#[derive(Debug, FromRow)]
pub struct ListedToken {
    /// What names it.
    pub token_id: Uuid,
    /// Who shows it.
    pub name: String,
    /// What its holder may do.
    pub roles: Vec<String>,
    /// For which EMs.
    pub ems: Vec<String>,
    /// For which users; `None` for all.
    pub users: Option<Vec<String>>,
    /// Whom to ask about it.
    pub owner: String,
    /// Who made it.
    pub created_by: String,
    /// When.
    pub create_time: OffsetDateTime,
    /// Until when it is good.
    pub expire_time: OffsetDateTime,
    /// Whether that is past.
    pub is_over: bool,
    /// When it was revoked.
    pub revoke_time: Option<OffsetDateTime>,
    /// By whom.
    pub revoked_by: Option<String>,
    /// When it was last shown, give or take a minute.
    pub last_used_time: Option<OffsetDateTime>,
}

/// Which tokens are revoked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Which {
    /// This one.
    Id(Uuid),
    /// All of a name.
    Name(Name),
}

#[derive(FromRow)]
struct TokenRow {
    token_id: Uuid,
    token_hash: Vec<u8>,
    name: String,
    #[sqlx(flatten)]
    rights: RightsColumns,
    seconds_left: f64,
    is_revoked: bool,
}

/// What the holder of a token may do, of its columns.
#[derive(FromRow)]
struct RightsColumns {
    roles: Vec<String>,
    ems: Vec<String>,
    users: Option<Vec<String>>,
}

impl RightsColumns {
    fn rights(&self, token_id: Uuid) -> Result<Rights, StoreError> {
        let wrong = |what: &str| StoreError::inconsistent(TABLE.0, format!("token {token_id}: its {what}"));
        let roles = self.roles.iter().map(|role| Role::parse(role).ok_or_else(|| wrong("roles")));
        let ems = self.ems.iter().map(|em| EmPattern::parse("ems", em).map_err(|_| wrong("EMs")));
        let users = self.users.as_ref().map(|users| users.iter().map(|user| TABLE.name("users", user)).collect());
        Ok(Rights {
            roles: roles.collect::<Result<_, _>>()?,
            ems: ems.collect::<Result<_, _>>()?,
            users: users.transpose()?,
        })
    }
}

impl TryFrom<TokenRow> for StoredToken {
    type Error = StoreError;

    fn try_from(row: TokenRow) -> Result<Self, StoreError> {
        let wrong = |what: &str| StoreError::inconsistent(TABLE.0, format!("token {}: its {what}", row.token_id));
        Ok(Self {
            id: row.token_id,
            hash: TokenHash::from_bytes(&row.token_hash).ok_or_else(|| wrong("hash"))?,
            name: TABLE.name("name", &row.name)?,
            rights: row.rights.rights(row.token_id)?,
            left: Duration::try_from_secs_f64(row.seconds_left).unwrap_or_default(),
            is_revoked: row.is_revoked,
        })
    }
}

/// Grows with every change.
pub async fn version(executor: impl PgExecutor<'_>) -> Result<i64, StoreError> {
    Ok(sqlx::query_scalar(
        "-- token::version
        SELECT version FROM linkis_rm_token_version WHERE only_row",
    )
    .fetch_one(executor)
    .await?)
}

/// All tokens, those included that are remembered only. One that makes no sense is in their stead an error: it lets nobody in.
pub async fn read(executor: impl PgExecutor<'_>) -> Result<Vec<Result<StoredToken, StoreError>>, StoreError> {
    let rows: Vec<TokenRow> = sqlx::query_as(
        "-- token::read
        SELECT token_id, token_hash, name, roles, ems, users, revoke_time IS NOT NULL AS is_revoked,
            extract(epoch FROM expire_time - clock_timestamp())::float8 AS seconds_left
        FROM linkis_rm_token ORDER BY token_id DESC LIMIT $1",
    )
    .bind(TOKENS_MAX)
    .fetch_all(executor)
    .await?;
    Ok(rows.into_iter().map(StoredToken::try_from).collect())
}

/// Notes that tokens were shown just now.
pub async fn note_use(executor: impl PgExecutor<'_>, ids: &[Uuid]) -> Result<(), StoreError> {
    sqlx::query(
        "-- token::note_use
        UPDATE linkis_rm_token SET last_used_time = clock_timestamp() WHERE token_id IN (
            SELECT token_id FROM linkis_rm_token WHERE token_id = ANY ($1) ORDER BY token_id FOR NO KEY UPDATE SKIP LOCKED)",
    )
    .bind(ids)
    .execute(executor)
    .await?;
    Ok(())
}

/// Adds a token for `by`, tells of it in the history, and forgets those that have been over for long; false if there are too many.
pub async fn insert(connection: &mut PgConnection, token: &NewToken, by: &Actor) -> Result<bool, StoreError> {
    turn(&mut *connection).await?;
    sqlx::query(
        "-- token::insert, forget
        DELETE FROM linkis_rm_token
        WHERE coalesce(revoke_time, expire_time) < clock_timestamp() - make_interval(secs => $1)",
    )
    .bind(REMEMBERED.as_secs_f64())
    .execute(&mut *connection)
    .await?;
    let rights = &token.rights;
    let users = |users: &BTreeSet<Name>| users.iter().map(Name::to_string).collect::<Vec<_>>();
    let expire_time: Option<OffsetDateTime> = sqlx::query_scalar(
        "-- token::insert
        INSERT INTO linkis_rm_token (token_id, token_hash, name, roles, ems, users, owner, create_time, created_by, expire_time)
        SELECT $1, $2, $3, $4, $5, $6, $7, clock_timestamp(), $8, clock_timestamp() + make_interval(secs => $9)
        WHERE (SELECT count(*) FROM linkis_rm_token) < $10 RETURNING expire_time",
    )
    .bind(token.id)
    .bind(token.hash.as_bytes())
    .bind(token.name.as_str())
    .bind(rights.roles.iter().map(|role| role.as_str()).collect::<Vec<_>>())
    .bind(rights.ems.iter().map(EmPattern::to_string).collect::<Vec<_>>())
    .bind(rights.users.as_ref().map(users))
    .bind(token.owner.as_str())
    .bind(by.as_str())
    .bind(token.lifetime.as_secs_f64())
    .bind(TOKENS_MAX)
    .fetch_optional(&mut *connection)
    .await?;
    let Some(expire_time) = expire_time else { return Ok(false) };
    let after = Some(State::of_token(rights, token.owner.as_str(), expire_time, None));
    let object = object(token.id, token.name.as_str());
    let line = OtherLine { action: Action::TokenCreated, object, before: None, after };
    action_record::insert_others(connection, &[line], by).await?;
    Ok(true)
}

/// As the history names it.
fn object(token_id: Uuid, name: &str) -> String {
    format!("token {token_id} of {name}")
}

#[derive(FromRow)]
struct RevokedRow {
    token_id: Uuid,
    name: String,
    #[sqlx(flatten)]
    rights: RightsColumns,
    owner: String,
    expire_time: OffsetDateTime,
    revoke_time: OffsetDateTime,
}

impl RevokedRow {
    /// One that makes no sense is revoked all the same.
    fn line(&self) -> OtherLine {
        let rights = self.rights.rights(self.token_id).ok();
        let state = |revoked| Some(State::of_token(rights.as_ref()?, &self.owner, self.expire_time, revoked));
        OtherLine {
            action: Action::TokenRevoked,
            object: object(self.token_id, &self.name),
            before: state(None),
            after: state(Some(self.revoke_time)),
        }
    }
}

/// Revokes tokens that are not revoked yet, and tells of each in the history; answers which those were.
pub async fn revoke(connection: &mut PgConnection, which: &Which, by: &Actor) -> Result<Vec<Uuid>, StoreError> {
    turn(&mut *connection).await?;
    let (id, name) = match which {
        Which::Id(id) => (Some(*id), None),
        Which::Name(name) => (None, Some(name.as_str())),
    };
    let revoked: Vec<RevokedRow> = sqlx::query_as(
        "-- token::revoke
        UPDATE linkis_rm_token SET revoke_time = clock_timestamp(), revoked_by = $3
        WHERE (token_id = $1 OR name = $2) AND revoke_time IS NULL
        RETURNING token_id, name, roles, ems, users, owner, expire_time, revoke_time",
    )
    .bind(id)
    .bind(name)
    .bind(by.as_str())
    .fetch_all(&mut *connection)
    .await?;
    if !revoked.is_empty() {
        let lines: Vec<OtherLine> = revoked.iter().map(RevokedRow::line).collect();
        action_record::insert_others(connection, &lines, by).await?;
    }
    Ok(revoked.into_iter().map(|token| token.token_id).collect())
}

/// All tokens, the newest first.
pub async fn list(executor: impl PgExecutor<'_>) -> Result<Vec<ListedToken>, StoreError> {
    Ok(sqlx::query_as(
        "-- token::list
        SELECT token_id, name, roles, ems, users, owner, created_by, create_time, expire_time,
            expire_time <= clock_timestamp() AS is_over, revoke_time, revoked_by, last_used_time
        FROM linkis_rm_token ORDER BY token_id DESC LIMIT $1",
    )
    .bind(TOKENS_MAX)
    .fetch_all(executor)
    .await?)
}

/// Has everybody read the tokens again once this is committed; until then, nobody else changes them.
async fn turn(connection: &mut PgConnection) -> Result<(), StoreError> {
    let done = sqlx::query(
        "-- token::turn
        UPDATE linkis_rm_token_version SET version = version + 1 WHERE only_row",
    )
    .execute(connection)
    .await?;
    expect_rows("linkis_rm_token_version", 1, done.rows_affected())
}
