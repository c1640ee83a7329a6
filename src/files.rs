//! Files that are reloaded while the service runs: database URLs, certificates and the JWT configuration.
//!
//! This module defines only the common interval; each owner reloads its own files.

use std::time::Duration;

/// Interval of reload checks. They compare contents, because Kubernetes replaces a symbolic link in the path.
pub const LOOK_INTERVAL: Duration = Duration::from_secs(3);
