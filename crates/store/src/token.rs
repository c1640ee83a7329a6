//! `linkis_rm_token`: access tokens, stored as hashes, with their rights.
//!
//! Every change increments a version, by which instances notice that they must read the tokens again. Each change also
//! writes the history. The module never stores or returns a token itself. Callers: authentication, and token commands
//! and calls.

use std::{collections::BTreeSet, time::Duration};

use async_recursion::async_recursion as boxed;
use sqlx::{PgConnection, PgExecutor};
use time::OffsetDateTime;
use uuid::Uuid;

use rm_model::{
    access::{EmPattern, Rights, Role},
    action::Action,
    name::Name,
    principal::Actor,
    recorded_state::RecordedState,
    token::TokenHash,
};

use super::{
    StoreError,
    action_record::{self, OtherAct},
    expect_rows,
    rows::{TableName, TableRow},
};

const TABLE: TableName = TableName("linkis_rm_token");

/// Maximum number of tokens. Every instance keeps all of them in memory.
pub const TOKENS_MAX: i64 = 10_000;

/// Retention of a revoked or expired token.
const REMEMBERED: Duration = Duration::from_secs(90 * 24 * 60 * 60);

/// Input of [`insert`].
#[derive(Debug)]
pub struct NewToken {
    /// Token id.
    pub id: Uuid,
    /// Hash of the token.
    pub hash: TokenHash,
    /// Principal that presents the token.
    pub name: Name,
    /// Rights of the holder.
    pub rights: Rights,
    /// Contact for questions about the token.
    pub owner: Name,
    /// Validity from now on.
    pub lifetime: Duration,
}

/// A token as the authenticator needs it.
#[derive(Debug)]
pub struct StoredToken {
    /// Token id.
    pub id: Uuid,
    /// Hash of the token.
    pub hash: TokenHash,
    /// Principal that presents the token.
    pub name: Name,
    /// Rights of the holder.
    pub rights: Rights,
    /// Remaining validity, by the clock of the database; zero if expired.
    pub left: Duration,
    /// Whether the token is revoked.
    pub is_revoked: bool,
}

/// A token as administrators list it.
#[derive(Debug)]
pub struct ListedToken {
    /// Token id.
    pub token_id: Uuid,
    /// Principal that presents the token.
    pub name: String,
    /// Roles of the holder.
    pub roles: Vec<String>,
    /// EM patterns that the rights cover.
    pub ems: Vec<String>,
    /// Users that the rights cover; `None` for all.
    pub users: Option<Vec<String>>,
    /// Contact for questions about the token.
    pub owner: String,
    /// Principal that created the token.
    pub created_by: String,
    /// Time of creation.
    pub create_time: OffsetDateTime,
    /// Time of expiry.
    pub expire_time: OffsetDateTime,
    /// Whether the token is expired.
    pub is_over: bool,
    /// Time of revocation; `None` if not revoked.
    pub revoke_time: Option<OffsetDateTime>,
    /// Principal that revoked the token.
    pub revoked_by: Option<String>,
    /// Time of the last use, accurate to about a minute; `None` if never used.
    pub last_used_time: Option<OffsetDateTime>,
}

/// Tokens to revoke.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenSelection {
    /// The token with this id.
    Id(Uuid),
    /// All tokens of a principal.
    Name(Name),
}

fn rights(row: TableRow<'_>) -> Result<Rights, StoreError> {
    let token_id: Uuid = row.get("token_id")?;
    let wrong = |what: &str| row.wrong(format!("token {token_id}: its {what}"));
    let (roles, ems): (Vec<String>, Vec<String>) = (row.get("roles")?, row.get("ems")?);
    let users: Option<Vec<String>> = row.get("users")?;
    let roles = roles.iter().map(|role| Role::parse(role).ok_or_else(|| wrong("roles")));
    let ems = ems.iter().map(|em| EmPattern::parse("ems", em).map_err(|_| wrong("EMs")));
    let users = users.map(|users| users.iter().map(|user| TABLE.name("users", user)).collect());
    Ok(Rights {
        roles: roles.collect::<Result<_, _>>()?,
        ems: ems.collect::<Result<_, _>>()?,
        users: users.transpose()?,
    })
}

fn stored(row: TableRow<'_>) -> Result<StoredToken, StoreError> {
    let id: Uuid = row.get("token_id")?;
    Ok(StoredToken {
        id,
        hash: TokenHash::from_bytes(row.get("token_hash")?)
            .ok_or_else(|| row.wrong(format!("token {id}: its hash")))?,
        name: row.name("name")?,
        rights: rights(row)?,
        left: Duration::try_from_secs_f64(row.get("seconds_left")?).unwrap_or_default(),
        is_revoked: row.get("is_revoked")?,
    })
}

/// Returns the version of the tokens. Every change increments it.
pub async fn version(executor: impl PgExecutor<'_>) -> Result<i64, StoreError> {
    Ok(sqlx::query_scalar(
        "-- token::version
        SELECT version FROM linkis_rm_token_version WHERE only_row",
    )
    .fetch_one(executor)
    .await?)
}

/// Returns all tokens, including retained revoked and expired ones. An unparsable row becomes an error and
/// authenticates no caller.
pub async fn read(executor: impl PgExecutor<'_>) -> Result<Vec<Result<StoredToken, StoreError>>, StoreError> {
    let rows = sqlx::query(
        "-- token::read
        SELECT token_id, token_hash, name, roles, ems, users, revoke_time IS NOT NULL AS is_revoked,
            extract(epoch FROM expire_time - clock_timestamp())::float8 AS seconds_left
        FROM linkis_rm_token ORDER BY token_id DESC LIMIT $1",
    )
    .bind(TOKENS_MAX)
    .fetch_all(executor)
    .await?;
    Ok(rows.iter().map(|row| stored(TABLE.row(row))).collect())
}

/// Records the present time as the last use of tokens.
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

/// Inserts a token for `by`, writes the history, and deletes tokens past their retention. Returns false at
/// `TOKENS_MAX`.
#[boxed]
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
    let after = Some(RecordedState::of_token(rights, token.owner.as_str(), expire_time, None));
    let object = object(token.id, token.name.as_str());
    let line = OtherAct { action: Action::TokenCreated, object, before: None, after };
    action_record::insert_others(connection, &[line], by).await?;
    Ok(true)
}

/// Returns the name of a token in the history.
fn object(token_id: Uuid, name: &str) -> String {
    format!("token {token_id} of {name}")
}

/// Returns the id of a revoked token, and the history line. A row with invalid rights can also be revoked; its history
/// line has no states.
fn revoked(row: TableRow<'_>) -> Result<(Uuid, OtherAct), StoreError> {
    let (id, name, owner): (Uuid, &str, &str) = (row.get("token_id")?, row.get("name")?, row.get("owner")?);
    let (expire_time, revoke_time) = (row.get("expire_time")?, row.get("revoke_time")?);
    let rights = rights(row).ok();
    let state = |revoked| Some(RecordedState::of_token(rights.as_ref()?, owner, expire_time, revoked));
    let (before, after) = (state(None), state(Some(revoke_time)));
    Ok((id, OtherAct { action: Action::TokenRevoked, object: object(id, name), before, after }))
}

/// Revokes the selected tokens that are not revoked, and writes the history. Returns the ids of the revoked tokens.
#[boxed]
pub async fn revoke(
    connection: &mut PgConnection,
    which: &TokenSelection,
    by: &Actor,
) -> Result<Vec<Uuid>, StoreError> {
    turn(&mut *connection).await?;
    let (id, name) = match which {
        TokenSelection::Id(id) => (Some(*id), None),
        TokenSelection::Name(name) => (None, Some(name.as_str())),
    };
    let rows = sqlx::query(
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
    let (ids, lines): (Vec<Uuid>, Vec<OtherAct>) = TABLE.parse::<_, Vec<_>>(&rows, revoked)?.into_iter().unzip();
    if !lines.is_empty() {
        action_record::insert_others(connection, &lines, by).await?;
    }
    Ok(ids)
}

/// Returns all tokens, newest first.
#[boxed]
pub async fn list(connection: &mut PgConnection) -> Result<Vec<ListedToken>, StoreError> {
    let rows = sqlx::query(
        "-- token::list
        SELECT token_id, name, roles, ems, users, owner, created_by, create_time, expire_time,
            expire_time <= clock_timestamp() AS is_over, revoke_time, revoked_by, last_used_time
        FROM linkis_rm_token ORDER BY token_id DESC LIMIT $1",
    )
    .bind(TOKENS_MAX)
    .fetch_all(connection)
    .await?;
    let listed = |row: TableRow<'_>| {
        Ok(ListedToken {
            token_id: row.get("token_id")?,
            name: row.get("name")?,
            roles: row.get("roles")?,
            ems: row.get("ems")?,
            users: row.get("users")?,
            owner: row.get("owner")?,
            created_by: row.get("created_by")?,
            create_time: row.get("create_time")?,
            expire_time: row.get("expire_time")?,
            is_over: row.get("is_over")?,
            revoke_time: row.get("revoke_time")?,
            revoked_by: row.get("revoked_by")?,
            last_used_time: row.get("last_used_time")?,
        })
    };
    TABLE.parse(&rows, listed)
}

/// Increments the version, so that every instance reads the tokens again after the commit. Excludes other changes until
/// then.
async fn turn(connection: &mut PgConnection) -> Result<(), StoreError> {
    let done = sqlx::query(
        "-- token::turn
        UPDATE linkis_rm_token_version SET version = version + 1 WHERE only_row",
    )
    .execute(connection)
    .await?;
    expect_rows("linkis_rm_token_version", 1, done.rows_affected())
}
