//! Room for connections among the files that the process may have open.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::Bounds;

/// How many files are kept for everything but callers: the database, logs, libraries.
const RESERVE: u64 = 128;

/// Raises the number of files that this process may have open to what `bounds` need; if that is not allowed, lowers the bound, so
/// that callers never take the files that the database is reached by.
pub fn make_room(bounds: Bounds) -> Bounds {
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
    Bounds { connections, ..bounds }
}
