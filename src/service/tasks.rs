//! The tasks of an instance: all are waited for when it stops, and if one panics, the instance does not go on without it.

use std::future::Future;

use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// The tasks of an instance.
#[derive(Clone, Debug, Default)]
pub struct Tasks {
    tracker: TaskTracker,
    defect: CancellationToken,
}

impl Tasks {
    /// Starts a task.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let alarm = Alarm(self.defect.clone());
        self.tracker.spawn(async move {
            task.await;
            drop(alarm);
        });
    }

    /// Cancelled when a task has panicked.
    pub fn defect(&self) -> CancellationToken {
        self.defect.clone()
    }

    /// No task is started from outside any more.
    pub fn close(&self) {
        self.tracker.close();
    }

    /// Waits until all tasks have ended.
    pub async fn wait(&self) {
        self.tracker.wait().await;
    }
}

/// Goes off if it is dropped by a panic.
struct Alarm(CancellationToken);

impl Drop for Alarm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.cancel();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_a_panic_is_a_defect() {
        let tasks = Tasks::default();
        tasks.spawn(async {});
        tasks.close();
        tasks.wait().await;
        assert!(!tasks.defect().is_cancelled());
        tasks.spawn(async { panic!("on purpose") });
        tasks.wait().await;
        assert!(tasks.defect().is_cancelled());
    }
}
