//! How many calls there may be at once, by what they are for: those that ask for something are turned away first, and what frees
//! something never is.

use std::sync::Arc;

use crate::{
    domain::principal::Principal,
    error::Error,
    service::fair_share::{FairShare, Place},
    transport::identity::Admitted,
};

use super::Bounds;

/// How many calls of operators there may be at once, apart from those that ask for resources, so that neither keeps the others out. Those of
/// them that read much, or audit, wait for each other besides, and few of them do.
const OPERATOR_CALLS_MAX: usize = 256;

/// What a call that asks for resources holds while it is judged. Whoever waits in line instead gives it back.
pub type ActiveCall = Arc<Place>;

/// The places for calls.
#[derive(Debug)]
pub(super) struct Places {
    requests: Arc<FairShare>,
    operators: Arc<FairShare>,
}

/// What a call is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// It asks for resources.
    Asks,
    /// It provides some: it has a place as long as there is any, so that those who ask do not keep hosts from coming.
    Provides,
    /// It gives something back, or says that something lives; or asks how the service is: as cheap as it would be to turn it away.
    Frees,
    /// Everything else.
    Operates,
}

impl Purpose {
    fn of(path: &str) -> Self {
        match path.strip_prefix("/linkis.rm.v1.ResourceManagerService/") {
            Some("RequestResource") => Self::Asks,
            Some("Register") => Self::Provides,
            Some("ResourceReleased" | "ResourceInited" | "ResourceReported" | "Heartbeat" | "Unregister") => {
                Self::Frees
            }
            // Of an engine that runs: thousands come when a database was lost.
            _ if path == "/linkis.rm.v1.AdminService/AdoptTicket" => Self::Frees,
            _ if path.starts_with("/grpc.health.") => Self::Frees,
            // Reflection has room of its own.
            _ if path.starts_with("/grpc.reflection.") => Self::Frees,
            _ => Self::Operates,
        }
    }
}

impl Places {
    pub fn new(bounds: &Bounds) -> Self {
        Self { requests: FairShare::of(bounds.calls), operators: FairShare::of(OPERATOR_CALLS_MAX) }
    }

    /// The place that a call at `path` has until it is answered, or gives it back before; `None` for one that needs none.
    ///
    /// # Errors
    /// [`Error::Overloaded`] if there is none for its caller.
    pub fn admit(&self, path: &str, admitted: Option<&Admitted>) -> Result<Option<ActiveCall>, Error> {
        let by = admitted.map_or(&Principal::Anonymous, |admitted| &admitted.caller.principal);
        let place = match Purpose::of(path) {
            Purpose::Frees => return Ok(None),
            Purpose::Asks => self.requests.take(by),
            Purpose::Provides => self.requests.take_any(by),
            Purpose::Operates => self.operators.take(by),
        };
        Ok(Some(Arc::new(place.ok_or(Error::Overloaded)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_frees_something_has_a_place_in_any_case() {
        let places = Places::new(&Bounds { calls: 0, ..Bounds::DEFAULT });
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
            ("/nobody/Knows", true),
        ] {
            assert_eq!(places.admit(path, None).is_ok(), admitted, "{path}");
        }
        assert_eq!(places.operators.count(), 0, "the calls are over");
    }
}
