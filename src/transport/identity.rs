//! Who calls: the edge finds it out, and everything behind carries it along.

use tonic::Request;

use crate::domain::principal::Principal;

/// Who makes a call; anonymous if the edge has not found out.
pub fn of_call<M>(call: &Request<M>) -> Principal {
    call.extensions().get().cloned().unwrap_or(Principal::Anonymous)
}
