//! Metrics of JWT authentication and of the reload of its keys and configuration. Callers: the authenticator and its
//! tasks.

use prometheus_client::{metrics::gauge::Gauge, registry::Registry};

use super::{Counter, add};

/// Metrics of JWTs.
#[derive(Debug)]
pub struct JwtMetrics {
    /// Number of rejected JWTs.
    pub refused: Counter,
    /// Number of cached JWTs, whose signatures need no further check.
    pub known: Gauge,
    /// Number of applied changes of keys and configurations.
    pub reloads: Counter,
    /// Number of failed reloads of keys and configurations.
    pub reload_failures: Counter,
}

impl JwtMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        Self {
            refused: add(
                registry,
                "jwt_refused_total",
                "JWTs that were not believed: the log says why, and who shows them",
                Counter::default(),
            ),
            known: add(
                registry,
                "jwt_known",
                "JWTs that are known to be good until their time is over",
                Gauge::default(),
            ),
            reloads: add(
                registry,
                "jwt_reloads_total",
                "Keys of issuers, and configurations of JWTs, that changed and were taken up: whether a rotation has reached this instance",
                Counter::default(),
            ),
            reload_failures: add(
                registry,
                "jwt_reload_failures_total",
                "Keys of issuers, and configurations of JWTs, that could not be had or used: those before stay in force; the log says why",
                Counter::default(),
            ),
        }
    }
}
