//! Limit of open files: fits the connection bound to what the process may open.
//!
//! The reserve keeps file descriptors for the database and the logs. Caller: the server of the root package, at its start.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::EdgeBounds;

/// Number of files that are reserved for everything but connections: the database, logs, libraries.
const RESERVE: u64 = 128;

/// Raises the limit of open files to what `bounds` need. If the system does not permit it, returns a lower connection
/// bound, so that connections never take the descriptors of the database.
pub fn make_room(bounds: EdgeBounds) -> EdgeBounds {
    let wanted = u64::try_from(bounds.connections).unwrap_or(u64::MAX).saturating_add(RESERVE);
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= wanted) {
        return bounds;
    }
    let raised = maximum.map_or(wanted, |maximum| maximum.min(wanted));
    let allowed = match setrlimit(Resource::Nofile, Rlimit { current: Some(raised), maximum }) {
        Ok(()) => raised,
        Err(_) => current.unwrap_or(raised),
    };
    if allowed >= wanted {
        return bounds;
    }
    let connections = usize::try_from(allowed.saturating_sub(RESERVE)).unwrap_or(usize::MAX).max(1);
    tracing::warn!(
        wanted = bounds.connections,
        connections,
        "fewer connections than --max-connections: only {allowed} files may be open (ulimit -n)"
    );
    EdgeBounds { connections, ..bounds }
}
