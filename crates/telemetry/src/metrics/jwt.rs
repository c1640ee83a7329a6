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
    pub cached: Gauge,
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
                "Rejected JWTs: the log states the reason and the caller",
                Counter::default(),
            ),
            cached: add(registry, "jwt_cache_entries", "Verified JWTs in the cache", Gauge::default()),
            reloads: add(
                registry,
                "jwt_reloads_total",
                "Changed issuer keys and JWT configurations that were loaded: shows whether a rotation has reached \
                    this instance",
                Counter::default(),
            ),
            reload_failures: add(
                registry,
                "jwt_reload_failures_total",
                "Issuer keys and JWT configurations that could not be read or used: the previous ones stay in force; \
                    the log states the reason",
                Counter::default(),
            ),
        }
    }
}
