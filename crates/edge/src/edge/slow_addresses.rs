//! Slowed addresses: addresses of which a connection was ended for its frames.
//!
//! New connections of such an address are served one after another. The pause between them doubles with each ended
//! connection. Served connections and other addresses are not affected. The table is bounded. Caller: `listener`;
//! `connection` adds addresses.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// Maximum number of addresses. A further one replaces the address whose time ends first.
const ADDRESSES_MAX: usize = 4096;

/// Initial pause between two new connections of an address.
const PAUSE: Duration = Duration::from_millis(100);
/// Maximum pause.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Time for which an address is slowed, from the last of its ended connections.
const SLOWED_FOR: Duration = Duration::from_secs(60);

/// Maximum time that a new connection waits to be served. It also bounds the number of waiting connections of an
/// address.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// When a new connection is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// Immediately.
    Now,
    /// At this time.
    At(Instant),
    /// Never: too many connections of its address wait.
    Never,
}

/// The slowed addresses; `None` for a Unix socket. An IPv6 network of 64 bits counts as one address, because one
/// machine has all of it.
#[derive(Debug, Default)]
pub struct SlowAddresses(Mutex<HashMap<Option<IpAddr>, Slow>>);

#[derive(Debug)]
struct Slow {
    pause: Duration,
    until: Instant,
    /// Time at which the next new connection is served.
    next: Instant,
}

impl SlowAddresses {
    /// Locks the table. The table stays consistent if a holder panics.
    fn lock(&self) -> MutexGuard<'_, HashMap<Option<IpAddr>, Slow>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Slows `address`, of which a connection was ended.
    pub fn slow(&self, address: Option<IpAddr>, now: Instant) {
        let mut slow = self.lock();
        let (address, until) = (network(address), now + SLOWED_FOR);
        if let Some(slow) = slow.get_mut(&address) {
            slow.pause = (slow.pause * 2).min(PAUSE_MAX);
            slow.until = until;
            return;
        }
        if slow.len() >= ADDRESSES_MAX {
            slow.retain(|_, slow| slow.until > now);
        }
        if slow.len() >= ADDRESSES_MAX
            && let Some(first) = slow.iter().min_by_key(|(_, slow)| slow.until).map(|(address, _)| *address)
        {
            slow.remove(&first);
        }
        slow.insert(address, Slow { pause: PAUSE, until, next: now + PAUSE });
    }

    /// Returns when a new connection of `address` is served.
    pub fn turn(&self, address: Option<IpAddr>, now: Instant) -> Turn {
        let mut addresses = self.lock();
        let address = network(address);
        let Some(slow) = addresses.get_mut(&address) else { return Turn::Now };
        if slow.until <= now {
            addresses.remove(&address);
            return Turn::Now;
        }
        let at = slow.next.max(now);
        if at - now > WAIT_MAX {
            return Turn::Never;
        }
        slow.next = at + slow.pause;
        Turn::At(at)
    }
}

fn network(address: Option<IpAddr>) -> Option<IpAddr> {
    address.map(|address| match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX))),
        address => address,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(address: &str) -> Option<IpAddr> {
        Some(address.parse().unwrap())
    }

    #[test]
    fn slowed_address_gets_connections_one_after_another() {
        let (slow, now) = (SlowAddresses::default(), Instant::now());
        let (first, other) = (ip("192.0.2.1"), ip("192.0.2.2"));
        assert_eq!(slow.turn(first, now), Turn::Now);
        slow.slow(first, now);
        assert_eq!(slow.turn(first, now), Turn::At(now + PAUSE));
        assert_eq!(slow.turn(first, now), Turn::At(now + 2 * PAUSE));
        assert_eq!((slow.turn(other, now), slow.turn(None, now)), (Turn::Now, Turn::Now));
        for _ in 0..10 {
            slow.slow(first, now);
        }
        assert_eq!(slow.turn(first, now), Turn::At(now + 3 * PAUSE));
        assert_eq!(slow.turn(first, now), Turn::At(now + 3 * PAUSE + PAUSE_MAX));
        let waiting = (0..1000).take_while(|_| slow.turn(first, now) != Turn::Never).count();
        assert!(waiting <= 2, "{waiting} connections wait");
        let late = now + SLOWED_FOR;
        assert_eq!((slow.turn(first, late), slow.lock().len()), (Turn::Now, 0));
    }

    #[test]
    fn slowed_network_of_ipv6_is_one_address() {
        let (slow, now) = (SlowAddresses::default(), Instant::now());
        slow.slow(ip("2001:db8::1"), now);
        slow.slow(ip("::ffff:192.0.2.1"), now);
        for (address, is_slow) in
            [("2001:db8::ffff:0:0:1", true), ("2001:db8:0:1::1", false), ("192.0.2.1", true), ("192.0.2.2", false)]
        {
            assert_eq!(slow.turn(ip(address), now) != Turn::Now, is_slow, "{address}");
        }
    }

    #[test]
    fn slowed_addresses_are_bounded() {
        let (slow, now) = (SlowAddresses::default(), Instant::now());
        for n in 0..ADDRESSES_MAX + 100 {
            let address = IpAddr::from(u32::try_from(n).unwrap().to_be_bytes());
            slow.slow(Some(address), now + Duration::from_millis(u64::try_from(n).unwrap()));
        }
        assert_eq!(slow.lock().len(), ADDRESSES_MAX);
        assert_eq!(slow.turn(ip("0.0.0.1"), now), Turn::Now, "the first is removed first");
        assert_ne!(slow.turn(ip("0.0.16.99"), now), Turn::Now);
    }
}
