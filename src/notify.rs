//! State notifications for systemd (`Type=notify`).
//!
//! The watchdog is not used: it would restart a process that waits for its database, and a process with a defect ends
//! anyway. Caller: the server's start and shutdown. Never: fails the service.

use sd_notify::NotifyState;

/// Sends a state to `NOTIFY_SOCKET`, if set. A failure is only logged.
pub fn notify(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "NOTIFY_SOCKET does not accept the state");
    }
}
