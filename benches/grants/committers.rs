//! Several committers per instance: each has its own EMs and shares the limited scopes with the others.

use rm_proto::v1::{self as proto, limit_service_client::LimitServiceClient};

use crate::{Failure, plan::ENOUGH};

/// Numbers of committers of an instance. Each database has one instance of each number.
pub(crate) const COMMITTERS: [usize; 3] = [1, 2, 4];

/// Numbers of callers of a measurement.
pub(crate) const CALLERS: [usize; 3] = [1, ENOUGH, crate::plan::MANY];

/// Counters that the batches of several committers share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SharedScope {
    /// No counter: no limit exists.
    Nothing,
    /// Counters of a thousand users, each with a limit.
    Users,
    /// The counter of one creator that all requests have.
    Creator,
}

impl SharedScope {
    pub const ALL: [Self; 3] = [Self::Nothing, Self::Users, Self::Creator];

    pub fn database(self) -> &'static str {
        match self {
            Self::Nothing => "sharing_nothing",
            Self::Users => "sharing_users",
            Self::Creator => "sharing_a_creator",
        }
    }

    /// Returns the name for a heading.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nothing => "",
            Self::Users => ", users",
            Self::Creator => ", creator",
        }
    }

    /// Returns the labels whose values have a limit each.
    pub fn limits(self) -> &'static [&'static [&'static str]] {
        match self {
            Self::Nothing => &[],
            Self::Users => &[&["user"]],
            Self::Creator => &[&["creator"]],
        }
    }
}

/// Sets a limit for every value, or combination of values, of these labels. The maximum is so high that nothing is
/// refused.
pub(crate) async fn set_limits(url: &str, labels: &[&[&str]]) -> Result<(), Failure> {
    let mut client = LimitServiceClient::connect(url.to_owned()).await?;
    for each in labels {
        let limit = proto::Limit {
            each: each.iter().map(ToString::to_string).collect(),
            max: ["memory", "cores", "instances"].map(|dimension| (dimension.to_owned(), i64::MAX)).into(),
            ..Default::default()
        };
        client.set_limit(proto::SetLimitRequest { limit: Some(limit), ..Default::default() }).await?;
    }
    Ok(())
}
