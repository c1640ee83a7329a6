//! Parsing on a background thread of low priority, for large responses. Callers: the fetches of the cluster types.

use std::thread;

use tokio::sync::oneshot;

use super::http::HttpFailure;

/// Niceness of the thread, which gets about a tenth of the share of a normal thread, and so finishes in time under
/// load.
const NICE: i32 = 10;

/// Runs `work` on a new thread of low priority. A response of a cluster with a thousand queues has megabytes, and
/// requests must not wait for its parsing.
///
/// # Errors
/// [`HttpFailure::Stopping`] if the thread cannot start or `work` panics.
pub(super) async fn patiently<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, HttpFailure> {
    let (done, result) = oneshot::channel();
    let begun = thread::Builder::new().name("patient".to_owned()).spawn(move || {
        // The priority applies to this thread only. If it cannot be lowered, the work runs at normal priority.
        let _ = rustix::process::setpriority_process(None, NICE);
        // The receiver may have been dropped.
        let _ = done.send(work());
    });
    begun.map_err(|_| HttpFailure::Stopping)?;
    result.await.map_err(|_| HttpFailure::Stopping)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn background_parse_lowers_only_its_own_priority() {
        let nice = || rustix::process::getpriority_process(None).unwrap();
        let before = nice();
        assert_eq!(patiently(nice).await, Ok(NICE));
        assert_eq!(nice(), before);
    }

    #[tokio::test]
    async fn background_parse_panic_is_an_error() {
        let panics = || panic!("as it happens");
        assert_eq!(patiently::<()>(panics).await, Err(HttpFailure::Stopping));
    }
}
