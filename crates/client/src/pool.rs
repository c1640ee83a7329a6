//! Connection pool: the connections to all instances, and the selection of one for each call.
//!
//! Each address has a task that connects, watches the health of the instance, and reconnects after a failure. A call takes
//! the next serving address in turn. It waits only while no address serves and one of them may serve soon.
//!
//! Never: repeats a call. Caller: `call`.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use http::Uri;
use tokio::{
    sync::{Notify, watch},
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_rustls::{TlsConnector, rustls::pki_types::ServerName};
use tonic::{
    Status,
    metadata::{Ascii, MetadataValue},
};

use super::{
    address::InstanceAddress,
    connection::{self, CONNECT_TIMEOUT, OpenConnection, Sender},
    health::{self, InstanceStatus},
    random,
};

/// Minimum and maximum back-off of an address after a failure. The maximum applies while no call requests an attempt.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Minimum lifetime of a connection that does not count as failed. Shorter than the age at which a server closes
/// connections.
const LASTED: Duration = Duration::from_millis(500);

/// State of an address.
#[derive(Clone, Debug)]
enum EndpointState {
    /// A connection is being opened.
    Connecting,
    /// Accepts calls.
    Serving(Sender),
    /// Connected, but reports that it does not serve: it is stopping, or its database is unavailable.
    NotServing(Sender),
    /// Not reachable; no attempt before `until`.
    Down { until: Instant, why: Arc<str> },
}

/// Result of the selection for a call.
#[derive(Debug)]
enum EndpointChoice {
    /// Use this address.
    Take(usize, Sender),
    /// Wait: a state is about to change.
    Wait,
    /// No address serves, but the back-off of one has ended.
    TryAgain,
    /// No address serves.
    Unavailable(Arc<str>),
}

/// Selects the next serving address in turn. A call that failed `on` an address prefers another one.
fn choose(states: &[EndpointState], turn: usize, on: Option<usize>, now: Instant) -> EndpointChoice {
    let in_turn =
        || (0..states.len()).map(|n| turn.wrapping_add(n) % states.len()).filter_map(|at| Some((at, states.get(at)?)));
    let serving = |other: bool| {
        in_turn().find_map(|(at, state)| match state {
            EndpointState::Serving(sender) if !sender.is_closed() && (on != Some(at)) == other => {
                Some((at, sender.clone()))
            }
            _ => None,
        })
    };
    if let Some((at, sender)) = serving(true).or_else(|| serving(false)) {
        return EndpointChoice::Take(at, sender);
    }
    let (mut not_serving, mut is_time, mut down) = (None, false, None);
    for (at, state) in in_turn() {
        match state {
            // A serving address with a closed connection is about to reconnect.
            EndpointState::Connecting | EndpointState::Serving(_) => return EndpointChoice::Wait,
            EndpointState::NotServing(sender) if sender.is_closed() => return EndpointChoice::Wait,
            // The instance replies with the reason and the time of the next attempt.
            EndpointState::NotServing(sender) => not_serving = not_serving.or_else(|| Some((at, sender.clone()))),
            EndpointState::Down { until, why } => {
                is_time |= *until <= now;
                down = down.or_else(|| Some(why.clone()));
            }
        }
    }
    match (not_serving, down) {
        (Some((at, sender)), _) => EndpointChoice::Take(at, sender),
        (None, _) if is_time => EndpointChoice::TryAgain,
        (None, why) => EndpointChoice::Unavailable(why.unwrap_or_default()),
    }
}

/// The connections to all instances.
#[derive(Debug)]
pub(super) struct ConnectionPool {
    shared: Arc<PoolInner>,
    /// Tasks of the addresses. Started by the first call; they end with the pool.
    keepers: OnceLock<JoinSet<()>>,
    turn: AtomicUsize,
}

#[derive(Debug)]
struct PoolInner {
    nodes: Box<[PooledEndpoint]>,
    states: watch::Sender<Box<[EndpointState]>>,
    tls: Option<PoolTls>,
    authorization: Option<MetadataValue<Ascii>>,
}

#[derive(Debug)]
struct PooledEndpoint {
    address: InstanceAddress,
    /// Signal for an immediate attempt.
    wanted: Notify,
}

/// TLS of the connections. The connector has no `Debug` output.
pub(super) struct PoolTls {
    /// TLS connector.
    pub connector: TlsConnector,
    /// Required name of the certificate; `None` for the host of the address.
    pub name: Option<ServerName<'static>>,
}

impl std::fmt::Debug for PoolTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

impl ConnectionPool {
    /// Creates the pool; the first call starts the connections.
    pub fn new(
        addresses: Vec<InstanceAddress>,
        tls: Option<PoolTls>,
        authorization: Option<MetadataValue<Ascii>>,
    ) -> Self {
        let states = watch::Sender::new(addresses.iter().map(|_| EndpointState::Connecting).collect());
        let nodes = addresses.into_iter().map(|address| PooledEndpoint { address, wanted: Notify::new() }).collect();
        let shared = PoolInner { nodes, states, tls, authorization };
        // A random start spreads clients over the instances.
        let turn = AtomicUsize::new(usize::from(u16::from_be_bytes(random())));
        Self { shared: Arc::new(shared), keepers: OnceLock::new(), turn }
    }

    /// Returns the credential of the calls.
    pub fn authorization(&self) -> Option<&MetadataValue<Ascii>> {
        self.shared.authorization.as_ref()
    }

    /// Returns the URI in front of the path of each call to an address.
    pub fn origin(&self, at: usize) -> Uri {
        self.shared.nodes.get(at).map(|node| node.address.origin.clone()).unwrap_or_default()
    }

    /// Selects the address of the next call, for a call that failed `on` an address. Waits while a state is about to
    /// change.
    ///
    /// # Errors
    /// UNAVAILABLE if no address is reachable.
    pub async fn next(&self, on: Option<usize>) -> Result<(usize, Sender), Status> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        if let EndpointChoice::Take(at, sender) = choose(&self.shared.states.borrow(), turn, on, Instant::now()) {
            return Ok((at, sender));
        }
        self.keepers.get_or_init(|| (0..self.shared.nodes.len()).map(|at| keep(self.shared.clone(), at)).collect());
        let mut states = self.shared.states.subscribe();
        loop {
            let choice = choose(&states.borrow_and_update(), turn, on, Instant::now());
            match choice {
                EndpointChoice::Take(at, sender) => return Ok((at, sender)),
                EndpointChoice::Unavailable(why) => return Err(Status::unavailable(&*why)),
                EndpointChoice::TryAgain => self.shared.try_again(),
                // The sender lives as long as the pool.
                EndpointChoice::Wait => drop(states.changed().await),
            }
        }
    }

    /// Returns whether an address other than `on` serves.
    pub fn another_serves(&self, on: Option<usize>) -> bool {
        let states = self.shared.states.borrow();
        let mut others = states.iter().enumerate().filter(|(at, _)| on != Some(*at));
        others.any(|(_, state)| state.takes_calls())
    }

    /// Waits until an address serves, at most `longest`.
    pub async fn someone_serves(&self, longest: Duration) {
        let mut states = self.shared.states.subscribe();
        // The next attempt is due in both cases.
        let _ = timeout(longest, states.wait_for(|states| states.iter().any(EndpointState::takes_calls))).await;
    }
}

impl EndpointState {
    fn takes_calls(&self) -> bool {
        matches!(self, Self::Serving(sender) if !sender.is_closed())
    }
}

impl PoolInner {
    /// Requests an attempt at all addresses whose back-off has ended.
    fn try_again(&self) {
        let now = Instant::now();
        self.states.send_if_modified(|states| {
            let mut any = false;
            for (state, node) in states.iter_mut().zip(&self.nodes) {
                if matches!(state, EndpointState::Down { until, .. } if *until <= now) {
                    *state = EndpointState::Connecting;
                    node.wanted.notify_one();
                    any = true;
                }
            }
            any
        });
    }

    fn is_up(&self, at: usize) -> bool {
        matches!(self.states.borrow().get(at), Some(EndpointState::Serving(_) | EndpointState::NotServing(_)))
    }

    fn set(&self, at: usize, state: EndpointState) {
        self.states.send_modify(|states| {
            if let Some(place) = states.get_mut(at) {
                *place = state;
            }
        });
    }

    /// Runs one connection of an address until it ends; returns the reason.
    async fn connect(&self, at: usize, node: &PooledEndpoint) -> String {
        let address = &node.address.text;
        let opened = timeout(CONNECT_TIMEOUT, connection::open(&node.address, self.tls.as_ref())).await;
        let OpenConnection { sender, ended } = match opened {
            Ok(Ok(open)) => open,
            Ok(Err(error)) => return format!("cannot connect to {address}: {error}"),
            Err(_) => return format!("cannot connect to {address}: no reply within {CONNECT_TIMEOUT:?}"),
        };
        let listening = async {
            // A single address gets calls regardless of its health.
            if self.nodes.len() == 1 {
                self.set(at, EndpointState::Serving(sender));
                return std::future::pending().await;
            }
            let heard = |word| {
                tracing::debug!(address, ?word, "an instance reports its health");
                let sender = sender.clone();
                self.set(
                    at,
                    if word == InstanceStatus::Serves {
                        EndpointState::Serving(sender)
                    } else {
                        EndpointState::NotServing(sender)
                    },
                );
            };
            health::listen(sender.clone(), node.address.origin.clone(), self.authorization.as_ref(), heard).await
        };
        tokio::select! {
            why = listening => format!("{address} {why}"),
            ended = ended => match ended {
                Ok(Err(error)) => format!("the connection to {address} broke: {error}"),
                _ => format!("{address} closed the connection"),
            },
        }
    }
}

/// Maintains the connection of one address.
async fn keep(shared: Arc<PoolInner>, at: usize) {
    let Some(node) = shared.nodes.get(at) else { return };
    let mut failures = 0_u32;
    loop {
        shared.set(at, EndpointState::Connecting);
        let begin = Instant::now();
        let why = shared.connect(at, node).await;
        if shared.is_up(at) && begin.elapsed() >= LASTED {
            tracing::info!("{why}");
            failures = 0;
            continue;
        }
        failures = failures.saturating_add(1);
        // Logs an unreachable address once.
        if failures == 1 {
            tracing::warn!("{why}");
        }
        let doubled = PAUSE_MIN.saturating_mul(1 << failures.min(16)).min(PAUSE_MAX);
        let [byte] = random();
        let (now, pause) = (Instant::now(), doubled.mul_f64(0.5 + f64::from(byte) / 512.0));
        let until = now + PAUSE_MIN;
        shared.set(at, EndpointState::Down { until, why: why.into() });
        sleep_until(until).await;
        // With a single address, only a call triggers the next attempt.
        let is_alone = shared.nodes.len() == 1;
        tokio::select! {
            () = node.wanted.notified() => {}
            () = sleep(pause), if !is_alone => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn down(until: Instant) -> EndpointState {
        EndpointState::Down { until, why: "refused".into() }
    }

    #[tokio::test]
    async fn endpoint_down_is_retried_after_its_pause() {
        let now = Instant::now();
        let (past, later) = (now - Duration::from_millis(1), now + Duration::from_secs(1));
        assert!(
            matches!(choose(&[down(later), down(later)], 1, None, now), EndpointChoice::Unavailable(why) if &*why == "refused")
        );
        assert!(matches!(choose(&[down(later), down(past)], 0, None, now), EndpointChoice::TryAgain));
        assert!(matches!(choose(&[down(past), EndpointState::Connecting], 0, None, now), EndpointChoice::Wait));
        assert!(matches!(choose(&[], 7, None, now), EndpointChoice::Unavailable(_)));
    }
}
