//! The RM client: the service's calls with the types of the domain, for ECMs, LinkisManager and engines written in Rust.
//!
//! A client knows one address or several, separated by commas: `http://host:port`, `https://host:port`, `host:port` or `unix:/path`. It
//! spreads calls over all instances that serve. One that cannot be reached, or says that it does not serve (it is being stopped, or its
//! database is away), gets no calls until it does again; they go to the others at once. A call that fails on the way, or of which the
//! service says that trying again helps, is tried again if that is safe: a few times, with pauses that grow, within its time.
//!
//! ```no_run
//! # use std::time::Duration;
//! # use linkis_rm::{client::*, domain::{em::EmInstance, name::Name, resource::Resource}};
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
//! - `manager`, `limits`, `usage`, `admin`: the calls, a file for each service;
//! - [`calls`]: their table, and which are safe to repeat; [`RmClient::make`] makes any of them with the API's own messages;
//! - `follow`: [`Follower`], the history as it goes on, over whatever connections;
//! - `call`: one call, with its tries; `retry`: whether there is another, and when;
//! - `pool`: which address is next; `connection`, `health`: one of them, of which [`check_health`] asks how it is;
//! - `address`, `settings`, `error`: what goes in, and what goes wrong.

use std::{sync::Arc, time::Duration};

use prost::Message;
use uuid::Uuid;

use crate::domain::name::FieldError;

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

pub use call::Call;
pub use error::ClientError;
pub use follow::Follower;
pub use health::check_health;
pub use manager::{Heartbeat, ResourceRequest, ResultResource};
pub use settings::{ClientSettings, Identity, Tls};
pub use tonic::Code;

use address::Address;
use call::Patience;
use pool::Pool;

type Result<T> = std::result::Result<T, ClientError>;

/// How many elements of a list are asked for at once.
const PAGE_SIZE: i32 = 1000;

/// Calls the service; clones share its connections.
#[derive(Clone, Debug)]
pub struct RmClient {
    pool: Arc<Pool>,
    patience: Patience,
}

impl RmClient {
    /// A client of the service at these addresses (see [the module](self)), with which it connects when the first call needs it. No call
    /// takes longer than `timeout`, and what its request is ready to wait in line.
    ///
    /// # Errors
    /// [`ClientError::Address`], [`ClientError::TooManyAddresses`].
    pub fn new(addresses: &str, timeout: Duration) -> Result<Self> {
        Self::with(addresses, &ClientSettings::new(timeout))
    }

    /// The same, with all that can be set.
    ///
    /// # Errors
    /// As of [`RmClient::new`]; and [`ClientError::Secret`] for certificates, keys and tokens that cannot be used.
    pub fn with(addresses: &str, settings: &ClientSettings) -> Result<Self> {
        let addresses = Address::parse_all(addresses)?;
        let tls = settings.encryption(&addresses)?;
        let pool = Arc::new(Pool::new(addresses, tls, settings.authorization()?));
        Ok(Self { pool, patience: Patience { timeout: settings.timeout, attempts: settings.attempts } })
    }

    /// Makes a call with the API's own messages.
    ///
    /// # Errors
    /// [`ClientError::Status`] if the service answered with one, or could not be reached.
    pub async fn make<Q: Message, A: Message + Default + 'static>(&self, call: &Call<Q, A>, message: &Q) -> Result<A> {
        call.make(&self.pool, message, self.patience).await
    }

    /// All elements of a list, page by page: what `ask` asks for behind a page, and what is `read` of the `elements` that are answered.
    async fn list<Q, A, E, T>(
        &self,
        call: &Call<Q, A>,
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

/// Some random bytes, at most 6.
fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    for (byte, random) in bytes.iter_mut().zip(Uuid::new_v4().into_bytes()) {
        *byte = random;
    }
    bytes
}
