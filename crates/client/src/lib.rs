//! RM client: the calls of the service with the types of the model, for EMs, LinkisManager and engines written in Rust.
//!
//! A client has one or several addresses, separated by commas: `http://host:port`, `https://host:port`, `host:port` or
//! `unix:/path`. Calls are spread over all serving instances. An instance that is unreachable or reports that it does not
//! serve gets no calls until it serves again. A failed call is repeated if that is safe: a limited number of times, with
//! growing pauses, within its deadline.
//!
//! ```no_run
//! # use std::time::Duration;
//! # use rm_client::*;
//! # use rm_model::{em::EmInstance, name::Name, resource::Resource};
//! # async fn ask() -> Result<(), Box<dyn std::error::Error>> {
//! let client = RmClient::new("http://rm1:50051,http://rm2:50051", Duration::from_secs(10))?;
//! let em = EmInstance::parse("em", "linkis-cg-engineconnmanager", "host1:9102")?;
//! let (user, creator) = (Name::parse("user", "alice")?, Name::parse("creator", "IDE")?);
//! let request = ResourceRequest::new(Some(em), user, creator, Resource::load_instance(8 << 30, 4, 1)?);
//! match client.request_resource(&request).await? {
//!     ResultResource::Available(grant) => println!("ticket {}", grant.ticket_id),
//!     ResultResource::NotEnough(refusal) => println!("{}", refusal.reason),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! - `manager`, `limits`, `usage`, `admin`: the calls, one file per service;
//! - [`calls`]: table of all calls and their idempotency; [`RmClient::make`] makes any of them with the messages of the
//!   API;
//! - `follow`: [`Follower`], which follows the history across connections;
//! - `call`: one call with its attempts; `retry`: decisions about further attempts;
//! - `pool`: selection of an address; `connection`, `health`: one connection and its health, and [`check_health`];
//! - `address`, `settings`, `error`: input and errors.

#![warn(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::unreachable,
    clippy::print_stdout,
    clippy::too_many_lines
)]

use std::{sync::Arc, time::Duration};

use prost::Message;
use uuid::Uuid;

use rm_model::name::FieldError;

mod address;
mod admin;
mod call;
pub mod calls;
mod connection;
mod error;
mod follow;
mod health;
mod limits;
mod manager;
mod pool;
mod retry;
mod settings;
mod usage;

pub use call::ApiCall;
pub use error::ClientError;
pub use follow::Follower;
pub use health::check_health;
pub use manager::{HeartbeatReply, ResourceRequest, ResultResource};
pub use settings::{ClientIdentity, ClientSettings, TlsSettings};
pub use tonic::Code;

use address::InstanceAddress;
use call::RetryBudget;
use pool::ConnectionPool;

type Result<T> = std::result::Result<T, ClientError>;

/// Number of elements per page of a list.
const PAGE_SIZE: i32 = 1000;

/// Client of the service. Clones share its connections.
#[derive(Clone, Debug)]
pub struct RmClient {
    pool: Arc<ConnectionPool>,
    retry_budget: RetryBudget,
}

impl RmClient {
    /// Creates a client for these addresses (see [the module](self)). The first call connects. `timeout` bounds each call,
    /// in addition to the wait timeout of its request.
    ///
    /// # Errors
    /// [`ClientError::Address`], [`ClientError::TooManyAddresses`].
    pub fn new(addresses: &str, timeout: Duration) -> Result<Self> {
        Self::with(addresses, &ClientSettings::new(timeout))
    }

    /// As [`RmClient::new`], with all settings.
    ///
    /// # Errors
    /// As [`RmClient::new`]; and [`ClientError::Secret`] for unusable certificates, keys and tokens.
    pub fn with(addresses: &str, settings: &ClientSettings) -> Result<Self> {
        let addresses = InstanceAddress::parse_all(addresses)?;
        let tls = settings.encryption(&addresses)?;
        let pool = Arc::new(ConnectionPool::new(addresses, tls, settings.authorization()?));
        Ok(Self { pool, retry_budget: RetryBudget { timeout: settings.timeout, attempts: settings.attempts } })
    }

    /// Makes a call with the messages of the API.
    ///
    /// # Errors
    /// [`ClientError::Status`] for an error reply of the service, or if no instance is reachable.
    pub async fn make<Q: Message, A: Message + Default + 'static>(
        &self,
        call: &ApiCall<Q, A>,
        message: &Q,
    ) -> Result<A> {
        call.make(&self.pool, message, self.retry_budget).await
    }

    /// Returns all elements of a list. `ask` creates the request after a page token, `elements` splits a page, and `read`
    /// converts an element.
    async fn list<Q, A, E, T>(
        &self,
        call: &ApiCall<Q, A>,
        ask: impl Fn(String) -> Q,
        elements: impl Fn(A) -> (Vec<E>, String),
        read: impl Fn(E) -> std::result::Result<T, FieldError>,
    ) -> Result<Vec<T>>
    where
        Q: Message,
        A: Message + Default + 'static,
    {
        let (mut all, mut page_token) = (Vec::new(), String::new());
        loop {
            let (page, next) = elements(self.make(call, &ask(page_token)).await?);
            for element in page {
                all.push(read(element)?);
            }
            if next.is_empty() {
                return Ok(all);
            }
            page_token = next;
        }
    }
}

/// Returns random bytes, at most 6.
fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    for (byte, random) in bytes.iter_mut().zip(Uuid::new_v4().into_bytes()) {
        *byte = random;
    }
    bytes
}
