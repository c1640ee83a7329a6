//! Tasks of an instance: spawned here, joined at shutdown. A panic in one of them stops the instance.
//!
//! Callers: all modules that spawn; the server waits for the tasks at shutdown.

use std::{future::Future, io, pin::Pin, thread};

use async_recursion::async_recursion as boxed;
use tokio::runtime::{self, Handle};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use rm_store::{primary::Primary, session};

/// The tasks of an instance. Clones share them.
#[derive(Clone, Debug)]
pub struct InstanceTasks {
    runtime: Handle,
    tracker: TaskTracker,
    defect: CancellationToken,
    /// Database hosts. Waits of the tasks on a host end when another host becomes primary.
    primary: Option<Primary>,
}

impl InstanceTasks {
    /// Creates an empty set of tasks on the current runtime.
    ///
    /// # Panics
    /// Outside a runtime.
    pub fn here() -> Self {
        Self {
            runtime: Handle::current(),
            tracker: TaskTracker::new(),
            defect: CancellationToken::new(),
            primary: None,
        }
    }

    /// Returns tasks whose database waits end when another host becomes primary.
    pub fn leaving(self, primary: Primary) -> Self {
        Self { primary: Some(primary), ..self }
    }

    /// Spawns a task.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tracker.spawn_on(self.alarming(Box::pin(task)), &self.runtime);
    }

    /// Spawns a task on its own thread, where it never waits for other tasks.
    ///
    /// # Errors
    /// If a thread cannot be spawned.
    pub fn spawn_on_thread(&self, name: &str, task: impl Future<Output = ()> + Send + 'static) -> io::Result<()> {
        let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
        let task = self.tracker.track_future(self.alarming(Box::pin(task)));
        thread::Builder::new().name(name.to_owned()).spawn(move || runtime.block_on(task))?;
        Ok(())
    }

    /// Returns the task with an alarm for its panic. Boxed, so that the code of a spawn is compiled once and not for each task.
    fn alarming(&self, task: Pin<Box<dyn Future<Output = ()> + Send>>) -> impl Future<Output = ()> + Send + use<> {
        let (alarm, primary) = (PanicAlarm(self.defect.clone()), self.primary.clone());
        async move {
            match primary {
                Some(primary) => session::leaving(primary, task).await,
                None => task.await,
            }
            drop(alarm);
        }
    }

    /// Returns the token that is cancelled when a task panics.
    pub fn defect(&self) -> CancellationToken {
        self.defect.clone()
    }

    /// Closes the set: [`InstanceTasks::wait`] can then return.
    pub fn close(&self) {
        self.tracker.close();
    }

    /// Waits until all tasks have ended.
    #[boxed]
    pub async fn wait(&self) {
        self.tracker.wait().await;
    }
}

/// Signals a panic when it is dropped by one.
struct PanicAlarm(CancellationToken);

impl Drop for PanicAlarm {
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
    async fn task_panic_is_a_defect_and_task_end_is_not() {
        let tasks = InstanceTasks::here();
        tasks.spawn(async {});
        tasks.spawn_on_thread("calm", async {}).unwrap();
        tasks.close();
        tasks.wait().await;
        assert!(!tasks.defect().is_cancelled());
        tasks.spawn(async { panic!("on purpose") });
        tasks.wait().await;
        assert!(tasks.defect().is_cancelled());
    }

    #[tokio::test]
    async fn thread_panic_is_a_defect() {
        let tasks = InstanceTasks::here();
        tasks.spawn_on_thread("panicking", async { panic!("on purpose") }).unwrap();
        tasks.close();
        tasks.wait().await;
        assert!(tasks.defect().is_cancelled());
    }

    #[tokio::test]
    async fn task_of_ended_thread_continues() {
        let tasks = InstanceTasks::here();
        let (started, mut seen) = tokio::sync::mpsc::channel(1);
        let starter = tasks.clone();
        let later = async move {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            started.send(()).await.unwrap();
        };
        tasks.spawn_on_thread("short", async move { starter.spawn(later) }).unwrap();
        assert_eq!(seen.recv().await, Some(()));
    }
}
