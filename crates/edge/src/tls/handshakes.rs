//! Handshake permits: bounds how many TLS handshakes are computed at the same time.
//!
//! Half of the processor cores compute handshakes, so that connected clients get the others. A few handshakes of one
//! address compete for a core at a time, so a crowd does not delay other addresses. A handshake holds no permit while
//! it waits for its peer. Caller: `Tls`.

use std::{
    collections::HashMap,
    future::poll_fn,
    io,
    net::IpAddr,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::sync::PollSemaphore;

/// Maximum number of handshakes of one address that compete for a core.
const OF_ADDRESS: usize = 4;

/// Semaphores of the handshakes of an instance.
#[derive(Debug)]
pub struct HandshakePermits {
    /// One permit for each handshake that is being computed.
    processor: Arc<Semaphore>,
    addresses: Mutex<HashMap<Option<IpAddr>, AddressQueue>>,
}

/// Handshakes of one address.
#[derive(Debug)]
struct AddressQueue {
    places: Arc<Semaphore>,
    handshakes: usize,
}

impl Default for HandshakePermits {
    /// Permits for half of the processor's cores, at least one.
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self::of((cores / 2).max(1))
    }
}

impl HandshakePermits {
    fn of(processors: usize) -> Self {
        Self { processor: Arc::new(Semaphore::new(processors)), addresses: Mutex::default() }
    }

    /// Performs the handshake of a connection from `address`.
    ///
    /// # Errors
    /// A failed handshake.
    pub async fn handshake<S>(
        &self,
        acceptor: &TlsAcceptor,
        stream: S,
        address: Option<IpAddr>,
    ) -> io::Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        self.compute(acceptor.accept(stream), address).await
    }

    /// Polls `work` whenever a permit is available.
    async fn compute<F: Future + Unpin>(&self, mut work: F, address: Option<IpAddr>) -> F::Output {
        let mut turn = HandshakePermit::begin(self, address);
        poll_fn(|cx| turn.poll(cx, &mut work)).await
    }

    fn addresses(&self) -> MutexGuard<'_, HashMap<Option<IpAddr>, AddressQueue>> {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One handshake, until it is dropped.
struct HandshakePermit<'a> {
    turns: &'a HandshakePermits,
    address: Option<IpAddr>,
    gate: PollSemaphore,
    processor: PollSemaphore,
    /// Permit of the address, held until the next step is computed.
    place: Option<OwnedSemaphorePermit>,
}

impl<'a> HandshakePermit<'a> {
    fn begin(turns: &'a HandshakePermits, address: Option<IpAddr>) -> Self {
        let gate = {
            let mut addresses = turns.addresses();
            let none = || AddressQueue { places: Arc::new(Semaphore::new(OF_ADDRESS)), handshakes: 0 };
            let gate = addresses.entry(address).or_insert_with(none);
            gate.handshakes += 1;
            PollSemaphore::new(gate.places.clone())
        };
        Self { turns, address, gate, processor: PollSemaphore::new(turns.processor.clone()), place: None }
    }

    /// Computes one step of the handshake. Each step acquires its own permits, so that no handshake holds one while it
    /// waits for its peer.
    fn poll<F: Future + Unpin>(&mut self, cx: &mut Context<'_>, work: &mut F) -> Poll<F::Output> {
        if self.place.is_none() {
            self.place = ready!(self.gate.poll_acquire(cx));
        }
        let processor = ready!(self.processor.poll_acquire(cx));
        let polled = Pin::new(work).poll(cx);
        (self.place, _) = (None, processor);
        polled
    }
}

impl Drop for HandshakePermit<'_> {
    fn drop(&mut self) {
        let mut addresses = self.turns.addresses();
        if let Some(gate) = addresses.get_mut(&self.address) {
            gate.handshakes -= 1;
            if gate.handshakes == 0 {
                addresses.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::task::JoinSet;

    use super::*;

    /// Future that completes after a number of polls.
    struct HandshakeSteps {
        left: usize,
        computed: Arc<AtomicUsize>,
    }

    impl Future for HandshakeSteps {
        type Output = usize;

        fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<usize> {
            let before = self.computed.fetch_add(1, Ordering::Relaxed);
            if self.left == 0 {
                return Poll::Ready(before);
            }
            self.left -= 1;
            cx.waker().wake_by_ref();
            Poll::Pending
        }
    }

    fn address(number: u8) -> Option<IpAddr> {
        Some([127, 0, 0, number].into())
    }

    #[tokio::test]
    async fn handshake_of_quiet_address_is_not_delayed_by_crowd() {
        let (turns, computed) = (Arc::new(HandshakePermits::of(1)), Arc::<AtomicUsize>::default());
        let mut crowd = JoinSet::new();
        let begin = |number: u8, crowd: &mut JoinSet<usize>| {
            let (turns, work) = (turns.clone(), HandshakeSteps { left: 2, computed: computed.clone() });
            crowd.spawn(async move { turns.compute(work, address(number)).await });
        };
        // No step is computed before all handshakes are registered.
        let processor = turns.processor.clone().acquire_owned().await.unwrap();
        (0..1000).for_each(|_| begin(1, &mut crowd));
        while turns.addresses().get(&address(1)).is_none_or(|gate| gate.handshakes < 1000) {
            tokio::task::yield_now().await;
        }
        let mut other = JoinSet::new();
        begin(2, &mut other);
        tokio::task::yield_now().await;
        drop(processor);
        let before = other.join_next().await.unwrap().unwrap();
        // Each of its three steps waits for the steps of the other address that competed then.
        assert!(before <= 3 * (OF_ADDRESS + 1), "{before} steps were computed before its last");
        assert_eq!(crowd.join_all().await.len(), 1000);
        assert_eq!(computed.load(Ordering::Relaxed), 3 * 1001, "and no address is skipped");
        assert!(turns.addresses().is_empty());
    }

    #[tokio::test]
    async fn handshake_cancellation_frees_permit() {
        let turns = Arc::new(HandshakePermits::of(1));
        let processor = turns.processor.clone().acquire_owned().await.unwrap();
        let mut crowd = JoinSet::new();
        for number in [1, 1, 1, 1, 1, 1, 2] {
            let (turns, work) = (turns.clone(), HandshakeSteps { left: 0, computed: Arc::default() });
            crowd.spawn(async move { turns.compute(work, address(number)).await });
        }
        while turns.addresses().values().map(|gate| gate.handshakes).sum::<usize>() < 7 {
            tokio::task::yield_now().await;
        }
        crowd.shutdown().await;
        drop(processor);
        assert!(turns.addresses().is_empty());
        assert_eq!(turns.compute(HandshakeSteps { left: 0, computed: Arc::default() }, address(1)).await, 0);
    }
}
