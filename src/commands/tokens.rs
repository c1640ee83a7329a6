//! `linkis-rm token`: creates, lists and revokes tokens directly in the database.
//!
//! A new token is printed once and only its hash is stored. Each change records the user and machine of the command in the
//! history. Never: calls a service, so that the first token needs none. Submodule `listed`: the list of tokens.

use std::{
    collections::BTreeSet,
    io::{self, Write as _},
    process::ExitCode,
};

use clap::{Args, Subcommand};
use secrecy::{ExposeSecret as _, SecretString};
use sqlx::Connection as _;
use uuid::Uuid;

use crate::config::{DatabaseArguments, parse_duration};
use rm_model::{
    access::{EmPattern, Rights, Role, USERS_MAX},
    name::{FieldError, Name},
    principal::{Actor, Principal},
    token,
};
use rm_store::{
    StoreError, history_partition, schema,
    token::{self as table, NewToken, TOKENS_MAX, TokenSelection},
};

use super::{
    consent::Consent,
    database::{ConnectError, DatabaseConnection},
    error::{self, EXIT_NO, EXIT_NO_ANSWER, EXIT_USAGE},
    help::examples,
    output::{OutputArguments, text::clean_lines},
};

mod listed;

/// Number of random bytes for a token; more than four fifths of 256 bytes are usable.
const RANDOM_BYTES: usize = 256;

/// Verbs of `token`.
#[derive(Debug, Clone, Subcommand)]
pub enum TokenCommand {
    /// Create a token and print it once. To replace a token, create another for the same name, then revoke the old one by its id.
    #[command(after_help = examples(&["token create --name alice --role admin --owner alice"]))]
    Create(Box<CreateTokenCommand>),
    /// List all tokens, without their secrets.
    #[command(after_help = examples(&["token list"]))]
    List(ListTokensCommand),
    /// Revoke a token, or all tokens of a name, forever. All instances apply it within 5 s.
    #[command(after_help = examples(&["token revoke --name alice --reason left --yes"]))]
    Revoke(RevokeTokensCommand),
}

/// Arguments of `token create`.
#[derive(Debug, Clone, Args)]
pub struct CreateTokenCommand {
    #[command(flatten)]
    database: DatabaseArguments,

    /// Name of the holder, for the history.
    #[arg(long)]
    name: String,

    /// Role of the holder: ecm, manager, viewer, operator or admin. Several, separated by commas.
    #[arg(long, value_delimiter = ',', required = true)]
    role: Vec<String>,

    /// EM of the role ecm: HOST, APPLICATION/HOST or "APPLICATION/*". Repeatable.
    #[arg(long)]
    em: Vec<String>,

    /// User of a manager or viewer [default: all users]. Repeatable.
    #[arg(long)]
    user: Vec<String>,

    /// Person responsible for the token.
    #[arg(long)]
    owner: String,

    /// Lifetime, at most 366d.
    #[arg(long, default_value = "90d", value_name = "DURATION")]
    lifetime: String,
}

/// Arguments of `token list`.
#[derive(Debug, Clone, Args)]
pub struct ListTokensCommand {
    #[command(flatten)]
    database: DatabaseArguments,

    #[command(flatten)]
    output: OutputArguments,
}

/// Arguments of `token revoke`.
#[derive(Debug, Clone, Args)]
pub struct RevokeTokensCommand {
    #[command(flatten)]
    database: DatabaseArguments,

    /// Id of the token, as listed.
    #[arg(long, required_unless_present = "name", conflicts_with = "name")]
    id: Option<Uuid>,

    /// All tokens of this name.
    #[arg(long)]
    name: Option<String>,

    #[command(flatten)]
    consent: Consent,
}

/// Reason why a command failed.
#[derive(Debug, thiserror::Error)]
enum TokensFailure {
    #[error("{0}")]
    Usage(String),
    #[error("the database cannot be used")]
    Store(#[from] StoreError),
    #[error(transparent)]
    Open(#[from] ConnectError),
    #[error("there are {TOKENS_MAX} tokens, the maximum; revoke some: they are deleted 90 days later")]
    TooMany,
    #[error("the system returns no random bytes")]
    Random,
    #[error("the token cannot be written and is lost; revoke it: linkis-rm token revoke --id {id}")]
    Unwritten { id: Uuid, source: io::Error },
    #[error(transparent)]
    Common(#[from] error::CommandFailure),
}

impl From<FieldError> for TokensFailure {
    fn from(error: FieldError) -> Self {
        Self::Usage(error.to_string())
    }
}

impl From<sqlx::Error> for TokensFailure {
    fn from(error: sqlx::Error) -> Self {
        Self::Store(error.into())
    }
}

impl TokenCommand {
    /// Runs the subcommand, prints its result, and returns the exit code.
    pub async fn run(self) -> ExitCode {
        match self.carry_out().await {
            Ok((text, exit)) => {
                // The action is complete: a closed output still gets the exit code.
                let _ = write(&text);
                exit
            }
            Err(failure) => {
                eprintln!("linkis-rm: {}", clean_lines(&rm_telemetry::with_causes(&failure)));
                match failure {
                    TokensFailure::Common(failure) => failure.exit_code(),
                    TokensFailure::Usage(_) | TokensFailure::Open(ConnectError::Usage(_)) => ExitCode::from(EXIT_USAGE),
                    _ => ExitCode::from(EXIT_NO_ANSWER),
                }
            }
        }
    }

    async fn carry_out(self) -> Result<(String, ExitCode), TokensFailure> {
        match self {
            Self::Create(create) => {
                let (token, new) = create.token()?;
                let mut database = open(&create.database).await?;
                let mut transaction = database.connection.begin().await?;
                if !table::insert(&mut transaction, &new, &person()?).await? {
                    return Err(TokensFailure::TooMany);
                }
                transaction.commit().await?;
                database.describe().await?;
                database.close().await;
                eprintln!("token {} of {}; it is shown only once:", new.id, new.name);
                write(&format!("{}\n", token.expose_secret()))
                    .map_err(|source| TokensFailure::Unwritten { id: new.id, source })?;
                Ok((String::new(), ExitCode::SUCCESS))
            }
            Self::List(list) => {
                let mut database = open(&list.database).await?;
                let tokens = table::list(&mut database.connection).await?;
                database.describe().await?;
                database.close().await;
                listed::print(&tokens, &mut list.output.printer())?;
                Ok((String::new(), ExitCode::SUCCESS))
            }
            Self::Revoke(revoke) => {
                let which = revoke.which()?;
                let reason = revoke.consent.confirm(&match &which {
                    TokenSelection::Id(id) => format!("This revokes the token {id}. Revoke it?"),
                    TokenSelection::Name(name) => format!("This revokes every token of {name}. Revoke them?"),
                })?;
                let by = Actor { reason: Some(Name::parse("--reason", &reason)?), ..person()? };
                let mut database = open(&revoke.database).await?;
                let mut transaction = database.connection.begin().await?;
                let revoked = table::revoke(&mut transaction, &which, &by).await?;
                transaction.commit().await?;
                database.describe().await?;
                database.close().await;
                let text: String = revoked.iter().map(|id| format!("revoked {id}\n")).collect();
                if revoked.is_empty() {
                    return Ok(("nothing to revoke\n".to_owned(), ExitCode::from(EXIT_NO)));
                }
                Ok((text, ExitCode::SUCCESS))
            }
        }
    }
}

impl CreateTokenCommand {
    fn token(&self) -> Result<(SecretString, NewToken), TokensFailure> {
        let name = Name::parse_new("--name", &self.name)?;
        if Principal::parse("--name", name.as_str())? != Principal::Named(name.clone()) {
            return Err(TokensFailure::Usage(format!("--name: {name} is reserved for the service")));
        }
        let role = |text: &String| {
            let names = Role::ALL.map(Role::as_str).join(", ");
            Role::parse(text).ok_or_else(|| TokensFailure::Usage(format!("--role: {text:?} must be one of {names}")))
        };
        let roles: BTreeSet<Role> = self.role.iter().map(role).collect::<Result<_, _>>()?;
        let ems: Vec<_> = self.em.iter().map(|em| EmPattern::parse("--em", em)).collect::<Result<_, _>>()?;
        let users: BTreeSet<_> = self.user.iter().map(|user| Name::parse("--user", user)).collect::<Result<_, _>>()?;
        let has_users = roles.contains(&Role::Manager) || roles.contains(&Role::Viewer);
        if roles.contains(&Role::Ecm) == ems.is_empty() {
            return Err(TokensFailure::Usage(
                "--em: is required for the role ecm, and not allowed for other roles".into(),
            ));
        }
        if !users.is_empty() && !has_users {
            return Err(TokensFailure::Usage("--user: is only for managers and viewers".into()));
        }
        if users.len().max(ems.len()) > USERS_MAX {
            return Err(TokensFailure::Usage(format!(
                "--user, --em: at most {USERS_MAX} of each; create several tokens"
            )));
        }
        let lifetime = parse_duration("--lifetime", &self.lifetime, "1s", "366d").map_err(TokensFailure::Usage)?;
        let mut random = [0; RANDOM_BYTES];
        getrandom::fill(&mut random).map_err(|_| TokensFailure::Random)?;
        let (token, hash) = token::make(random).ok_or(TokensFailure::Random)?;
        let rights = Rights { roles, ems, users: Some(users).filter(|users| !users.is_empty()) };
        let owner = Name::parse_new("--owner", &self.owner)?;
        Ok((token, NewToken { id: Uuid::now_v7(), hash, name, rights, owner, lifetime }))
    }
}

impl RevokeTokensCommand {
    fn which(&self) -> Result<TokenSelection, TokensFailure> {
        match (self.id, &self.name) {
            (Some(id), _) => Ok(TokenSelection::Id(id)),
            (None, name) => Ok(TokenSelection::Name(Name::parse("--name", name.as_deref().unwrap_or_default())?)),
        }
    }
}

fn write(text: &str) -> io::Result<()> {
    let mut to = io::stdout();
    to.write_all(text.as_bytes())?;
    to.flush()
}

/// Returns the actor of the command: the user by the system's account database, and the machine.
fn person() -> Result<Actor, FieldError> {
    let uid = rustix::process::getuid().as_raw();
    let who = rm_devpg::user_name(uid).map_or_else(|| format!("uid {uid}"), |name| format!("{name} (uid {uid})"));
    let machine = rustix::system::uname().nodename().to_string_lossy().into_owned();
    Ok(Actor { principal: Principal::Named(Name::parse("user", &who)?), address: Some(machine.into()), reason: None })
}

/// Opens the database and migrates it to this release.
async fn open(database: &DatabaseArguments) -> Result<DatabaseConnection, TokensFailure> {
    let mut opened = DatabaseConnection::new(database).await?;
    schema::migrate(&mut opened.connection).await.map_err(StoreError::or_denied)?;
    history_partition::make_first(&mut opened.connection).await.map_err(StoreError::or_denied)?;
    opened.go_to_tables().await?;
    Ok(opened)
}
