//! Metrics of JWT authentication and of the reload of its keys and configuration. Callers: the authenticator and its
//! tasks.

use prometheus_client::metrics::gauge::Gauge;

use super::Counter;

metrics! {
    /// Metrics of JWTs.
    pub struct JwtMetrics {
        pub refused: Counter = "jwt_refused_total",
            "Rejected JWTs: the log states the reason and the caller";
        pub cached: Gauge = "jwt_cache_entries",
            "Verified JWTs in the cache";
        pub reloads: Counter = "jwt_reloads_total",
            "Changed issuer keys and JWT configurations that were loaded: shows whether a rotation has reached this \
                instance";
        pub reload_failures: Counter = "jwt_reload_failures_total",
            "Issuer keys and JWT configurations that could not be read or used: the previous ones stay in force; the log \
                states the reason";
    }
}
