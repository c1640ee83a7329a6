//! Work that nobody waits for within milliseconds, in a thread that lets all others go first.

use std::thread;

use tokio::sync::oneshot;

use super::http::Failure;

/// How little of a processor it gets that somebody else wants: a tenth of what each of them gets, so that it is done in time even where
/// many do.
const NICE: i32 = 10;

/// Does something that takes a while, in a thread of its own: what a cluster of a thousand queues says is megabytes, and who asks for
/// resources meanwhile does not wait for it to be read.
///
/// # Errors
/// [`Failure::Stopping`], if it could not be done to its end.
pub(super) async fn patiently<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Failure> {
    let (done, result) = oneshot::channel();
    let begun = thread::Builder::new().name("patient".to_owned()).spawn(move || {
        // It concerns this thread alone, which nobody else uses. Where it is not allowed, the work is done all the same.
        let _ = rustix::process::setpriority_process(None, NICE);
        // Whoever asked may have given up.
        let _ = done.send(work());
    });
    begun.map_err(|_| Failure::Stopping)?;
    result.await.map_err(|_| Failure::Stopping)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn it_lets_others_go_first_and_these_stay_as_they_are() {
        let nice = || rustix::process::getpriority_process(None).unwrap();
        let before = nice();
        assert_eq!(patiently(nice).await, Ok(NICE));
        assert_eq!(nice(), before);
    }

    #[tokio::test]
    async fn work_that_panics_is_an_error() {
        let panics = || panic!("as it happens");
        assert_eq!(patiently::<()>(panics).await, Err(Failure::Stopping));
    }
}
