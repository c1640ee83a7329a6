//! Permits of calls, by the purpose of a call.
//!
//! Requests for resources are rejected first when permits are scarce. A call that frees capacity is never rejected.
//! Permits are fair between callers (invariant 15 of ARCHITECTURE.md). Caller: `service`.

use std::sync::Arc;

use crate::authenticator::AdmittedCaller;
use rm_model::principal::Principal;
use rm_service::{
    error::Error,
    fair_semaphore::{FairPermit, FairSemaphore},
};

use super::EdgeBounds;

/// Maximum number of operator calls at the same time. The bound is separate from that of requests, so that neither
/// excludes the other. Expensive reads and audits have further bounds of their own.
const OPERATOR_CALLS_MAX: usize = 256;

/// Permit of a request that is being decided. A request releases its permit when it enters a wait queue.
pub type ActiveCallPermit = Arc<FairPermit>;

/// Semaphores of calls by purpose.
#[derive(Debug)]
pub(super) struct CallPermits {
    requests: Arc<FairSemaphore>,
    operators: Arc<FairSemaphore>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CallPurpose {
    /// Requests resources.
    Asks,
    /// Provides capacity. It gets any free permit, so that requests do not keep EMs from registering.
    Provides,
    /// Frees capacity, reports state, or checks health. Rejecting it would cost as much as serving it.
    Frees,
    /// Any other call: of operators and administrators.
    Operates,
}

impl CallPurpose {
    fn of(path: &str) -> Self {
        match path.strip_prefix("/linkis.rm.v1.ResourceManagerService/") {
            Some("RequestResource") => Self::Asks,
            Some("Register") => Self::Provides,
            Some("ResourceReleased" | "ResourceInited" | "ResourceReported" | "Heartbeat" | "Unregister") => {
                Self::Frees
            }
            // Adopts a running engine. Thousands of such calls come after the loss of a database.
            _ if path == "/linkis.rm.v1.AdminService/AdoptTicket" => Self::Frees,
            _ if path.starts_with("/grpc.health.") => Self::Frees,
            // Reflection has a bound of its own.
            _ if path.starts_with("/grpc.reflection.") => Self::Frees,
            _ => Self::Operates,
        }
    }
}

impl CallPermits {
    /// Creates the semaphores with the bounds of the edge.
    pub fn new(bounds: &EdgeBounds) -> Self {
        Self { requests: FairSemaphore::of(bounds.calls), operators: FairSemaphore::of(OPERATOR_CALLS_MAX) }
    }

    /// Acquires the permit of a call at `path`, until its response or an earlier release. Returns `None` if it needs
    /// none.
    ///
    /// # Errors
    /// [`Error::Overloaded`] if no permit is available for its caller.
    pub fn acquire(&self, path: &str, admitted: Option<&AdmittedCaller>) -> Result<Option<ActiveCallPermit>, Error> {
        let by = admitted.map_or(&Principal::Anonymous, |admitted| &admitted.caller.principal);
        let place = match CallPurpose::of(path) {
            CallPurpose::Frees => return Ok(None),
            CallPurpose::Asks => self.requests.acquire(by),
            CallPurpose::Provides => self.requests.take_any(by),
            CallPurpose::Operates => self.operators.acquire(by),
        };
        Ok(Some(Arc::new(place.ok_or(Error::Overloaded)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releasing_calls_have_reserved_permits() {
        let places = CallPermits::new(&EdgeBounds { calls: 0, ..EdgeBounds::DEFAULT });
        for (path, admitted) in [
            ("/linkis.rm.v1.ResourceManagerService/RequestResource", false),
            ("/linkis.rm.v1.ResourceManagerService/Register", false),
            ("/linkis.rm.v1.ResourceManagerService/ResourceReleased", true),
            ("/linkis.rm.v1.ResourceManagerService/ResourceInited", true),
            ("/linkis.rm.v1.ResourceManagerService/ResourceReported", true),
            ("/linkis.rm.v1.ResourceManagerService/Heartbeat", true),
            ("/linkis.rm.v1.ResourceManagerService/Unregister", true),
            ("/linkis.rm.v1.UsageService/ListEms", true),
            ("/linkis.rm.v1.AdminService/ForceRelease", true),
            ("/grpc.health.v1.Health/Check", true),
            ("/unknown/Call", true),
        ] {
            assert_eq!(places.acquire(path, None).is_ok(), admitted, "{path}");
        }
        assert_eq!(places.operators.count(), 0, "the calls have ended");
    }
}
