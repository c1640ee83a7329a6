//! The connections with all instances, and which of them takes the next call.
//!
//! Each address has a keeper, a task that connects with it, listens to what the instance says of its health, and connects again when that
//! ends. What the keepers know stands in one place, `states`; a call takes the next address in turn that serves. Only where none does, it
//! waits for what the keepers find out.

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
    address::Address,
    connection::{self, CONNECT_TIMEOUT, Open, Sender},
    health::{self, Word},
    random,
};

/// How long an address is left alone after it failed: so long at least, and so long at most while no call asks for it.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// A connection that lasted so long was none that fails at once: less than any that is closed because it has become old.
const LASTED: Duration = Duration::from_millis(500);

/// How it is with an address.
#[derive(Clone, Debug)]
enum State {
    /// It will be known soon: a connection is being made.
    Connecting,
    /// It takes calls.
    Serving(Sender),
    /// It is there and says that it serves nobody: it stops, or its database is away.
    NotServing(Sender),
    /// It cannot be reached, and until then nobody tries.
    Down { until: Instant, why: Arc<str> },
}

/// Which address takes a call.
#[derive(Debug)]
enum Choice {
    /// This one.
    Take(usize, Sender),
    /// That will be known soon.
    Wait,
    /// None, but it is time to try again.
    TryAgain,
    /// None.
    Nobody(Arc<str>),
}

/// The addresses in turn, and how it is with each; a call that failed `on` one goes to another, if it can.
fn choose(states: &[State], turn: usize, on: Option<usize>, now: Instant) -> Choice {
    let in_turn =
        || (0..states.len()).map(|n| turn.wrapping_add(n) % states.len()).filter_map(|at| Some((at, states.get(at)?)));
    let serving = |other: bool| {
        in_turn().find_map(|(at, state)| match state {
            State::Serving(sender) if !sender.is_closed() && (on != Some(at)) == other => Some((at, sender.clone())),
            _ => None,
        })
    };
    if let Some((at, sender)) = serving(true).or_else(|| serving(false)) {
        return Choice::Take(at, sender);
    }
    let (mut not_serving, mut is_time, mut down) = (None, false, None);
    for (at, state) in in_turn() {
        match state {
            // One that serves and is closed is about to be connected again.
            State::Connecting | State::Serving(_) => return Choice::Wait,
            State::NotServing(sender) if sender.is_closed() => return Choice::Wait,
            // It tells why it does not, and when to ask again.
            State::NotServing(sender) => not_serving = not_serving.or_else(|| Some((at, sender.clone()))),
            State::Down { until, why } => {
                is_time |= *until <= now;
                down = down.or_else(|| Some(why.clone()));
            }
        }
    }
    match (not_serving, down) {
        (Some((at, sender)), _) => Choice::Take(at, sender),
        (None, _) if is_time => Choice::TryAgain,
        (None, why) => Choice::Nobody(why.unwrap_or_default()),
    }
}

/// The connections with all instances.
#[derive(Debug)]
pub(super) struct Pool {
    shared: Arc<Shared>,
    /// They end with the pool; there are none before the first call.
    keepers: OnceLock<JoinSet<()>>,
    turn: AtomicUsize,
}

#[derive(Debug)]
struct Shared {
    nodes: Box<[Node]>,
    states: watch::Sender<Box<[State]>>,
    tls: Option<Tls>,
    authorization: Option<MetadataValue<Ascii>>,
}

#[derive(Debug)]
struct Node {
    address: Address,
    /// A call asks for it to be tried again.
    wanted: Notify,
}

/// How connections are encrypted. A connector cannot be shown.
pub(super) struct Tls {
    /// What encrypts them.
    pub connector: TlsConnector,
    /// Whom the certificate has to be for; `None` for the host of the address.
    pub name: Option<ServerName<'static>>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

impl Pool {
    /// Nobody connects before the first call.
    pub fn new(addresses: Vec<Address>, tls: Option<Tls>, authorization: Option<MetadataValue<Ascii>>) -> Self {
        let states = watch::Sender::new(addresses.iter().map(|_| State::Connecting).collect());
        let nodes = addresses.into_iter().map(|address| Node { address, wanted: Notify::new() }).collect();
        let shared = Shared { nodes, states, tls, authorization };
        // So that not all clients begin with the same one.
        let turn = AtomicUsize::new(usize::from(u16::from_be_bytes(random())));
        Self { shared: Arc::new(shared), keepers: OnceLock::new(), turn }
    }

    /// What says who calls.
    pub fn authorization(&self) -> Option<&MetadataValue<Ascii>> {
        self.shared.authorization.as_ref()
    }

    /// What stands before the path of each call to an address.
    pub fn origin(&self, at: usize) -> Uri {
        self.shared.nodes.get(at).map(|node| node.address.origin.clone()).unwrap_or_default()
    }

    /// Which address takes the next call of somebody whose last one failed `on` that one; waits while it is not known whether one can.
    ///
    /// # Errors
    /// None can be reached.
    pub async fn next(&self, on: Option<usize>) -> Result<(usize, Sender), Status> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        if let Choice::Take(at, sender) = choose(&self.shared.states.borrow(), turn, on, Instant::now()) {
            return Ok((at, sender));
        }
        self.keepers.get_or_init(|| (0..self.shared.nodes.len()).map(|at| keep(self.shared.clone(), at)).collect());
        let mut states = self.shared.states.subscribe();
        loop {
            let choice = choose(&states.borrow_and_update(), turn, on, Instant::now());
            match choice {
                Choice::Take(at, sender) => return Ok((at, sender)),
                Choice::Nobody(why) => return Err(Status::unavailable(&*why)),
                Choice::TryAgain => self.shared.try_again(),
                // The sender lives as long as the pool.
                Choice::Wait => drop(states.changed().await),
            }
        }
    }

    /// Whether another address than this one serves.
    pub fn another_serves(&self, on: Option<usize>) -> bool {
        let states = self.shared.states.borrow();
        let mut others = states.iter().enumerate().filter(|(at, _)| on != Some(*at));
        others.any(|(_, state)| state.takes_calls())
    }

    /// Waits until one serves, and no longer than `longest`.
    pub async fn someone_serves(&self, longest: Duration) {
        let mut states = self.shared.states.subscribe();
        // Either way the next try is due.
        let _ = timeout(longest, states.wait_for(|states| states.iter().any(State::takes_calls))).await;
    }
}

impl State {
    fn takes_calls(&self) -> bool {
        matches!(self, Self::Serving(sender) if !sender.is_closed())
    }
}

impl Shared {
    /// Has all addresses tried again whose time has come.
    fn try_again(&self) {
        let now = Instant::now();
        self.states.send_if_modified(|states| {
            let mut any = false;
            for (state, node) in states.iter_mut().zip(&self.nodes) {
                if matches!(state, State::Down { until, .. } if *until <= now) {
                    *state = State::Connecting;
                    node.wanted.notify_one();
                    any = true;
                }
            }
            any
        });
    }

    fn is_up(&self, at: usize) -> bool {
        matches!(self.states.borrow().get(at), Some(State::Serving(_) | State::NotServing(_)))
    }

    fn set(&self, at: usize, state: State) {
        self.states.send_modify(|states| {
            if let Some(place) = states.get_mut(at) {
                *place = state;
            }
        });
    }

    /// One connection with an address, from its first try to its end; answers why it ended.
    async fn connect(&self, at: usize, node: &Node) -> String {
        let address = &node.address.text;
        let opened = timeout(CONNECT_TIMEOUT, connection::open(&node.address, self.tls.as_ref())).await;
        let Open { sender, ended } = match opened {
            Ok(Ok(open)) => open,
            Ok(Err(error)) => return format!("cannot connect with {address}: {error}"),
            Err(_) => return format!("cannot connect with {address}: it does not answer within {CONNECT_TIMEOUT:?}"),
        };
        let listening = async {
            // Who is alone is asked in any case.
            if self.nodes.len() == 1 {
                self.set(at, State::Serving(sender));
                return std::future::pending().await;
            }
            let heard = |word| {
                tracing::debug!(address, ?word, "an instance says how it is");
                let sender = sender.clone();
                self.set(at, if word == Word::Serves { State::Serving(sender) } else { State::NotServing(sender) });
            };
            health::listen(sender.clone(), node.address.origin.clone(), self.authorization.as_ref(), heard).await
        };
        tokio::select! {
            why = listening => format!("{address} {why}"),
            ended = ended => match ended {
                Ok(Err(error)) => format!("the connection with {address} broke: {error}"),
                _ => format!("{address} closed the connection"),
            },
        }
    }
}

/// Keeps up the connection with one address.
async fn keep(shared: Arc<Shared>, at: usize) {
    let Some(node) = shared.nodes.get(at) else { return };
    let mut failures = 0_u32;
    loop {
        shared.set(at, State::Connecting);
        let begin = Instant::now();
        let why = shared.connect(at, node).await;
        if shared.is_up(at) && begin.elapsed() >= LASTED {
            tracing::info!("{why}");
            failures = 0;
            continue;
        }
        failures = failures.saturating_add(1);
        // Of an address that stays away, once.
        if failures == 1 {
            tracing::warn!("{why}");
        }
        let doubled = PAUSE_MIN.saturating_mul(1 << failures.min(16)).min(PAUSE_MAX);
        let [byte] = random();
        let (now, pause) = (Instant::now(), doubled.mul_f64(0.5 + f64::from(byte) / 512.0));
        let until = now + PAUSE_MIN;
        shared.set(at, State::Down { until, why: why.into() });
        sleep_until(until).await;
        // With one address alone, nobody has to know sooner than a call.
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

    fn down(until: Instant) -> State {
        State::Down { until, why: "refused".into() }
    }

    #[tokio::test]
    async fn who_is_down_is_tried_when_it_is_time_and_waited_for_meanwhile() {
        let now = Instant::now();
        let (past, later) = (now - Duration::from_millis(1), now + Duration::from_secs(1));
        assert!(matches!(choose(&[down(later), down(later)], 1, None, now), Choice::Nobody(why) if &*why == "refused"));
        assert!(matches!(choose(&[down(later), down(past)], 0, None, now), Choice::TryAgain));
        assert!(matches!(choose(&[down(past), State::Connecting], 0, None, now), Choice::Wait));
        assert!(matches!(choose(&[], 7, None, now), Choice::Nobody(_)));
    }
}
