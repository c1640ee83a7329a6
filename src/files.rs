//! Files that are read again while the service runs: URLs with passwords, certificates, and whose JWTs are believed.

use std::time::Duration;

/// How often they are looked at. By their content, because Kubernetes changes a link somewhere above them.
pub const LOOK_INTERVAL: Duration = Duration::from_secs(3);
