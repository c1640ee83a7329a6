//! What several committers make of it: each has EMs of its own, and shares with the others what limits count.

use linkis_rm::transport::proto::{self, limit_service_client::LimitServiceClient};

use crate::{Failure, plan::ENOUGH};

/// How many committers an instance has; there is one of each on every database.
pub(crate) const COMMITTERS: [usize; 3] = [1, 2, 4];

/// By how many callers they are looked at.
pub(crate) const CALLERS: [usize; 3] = [1, ENOUGH, crate::plan::MANY];

/// What the batches of different committers share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// Nothing: there are no limits.
    Nothing,
    /// Users, a thousand of them, each with a limit.
    Users,
    /// The one creator that everybody comes from.
    Creator,
}

impl Sharing {
    pub const ALL: [Self; 3] = [Self::Nothing, Self::Users, Self::Creator];

    pub fn database(self) -> &'static str {
        match self {
            Self::Nothing => "sharing_nothing",
            Self::Users => "sharing_users",
            Self::Creator => "sharing_a_creator",
        }
    }

    /// For a heading.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nothing => "",
            Self::Users => ", users",
            Self::Creator => ", creator",
        }
    }

    /// Of what label each value has a limit of its own.
    pub fn limits(self) -> &'static [&'static [&'static str]] {
        match self {
            Self::Nothing => &[],
            Self::Users => &[&["user"]],
            Self::Creator => &[&["creator"]],
        }
    }
}

/// Limits every value, or combination of values, of these labels, so high that nothing is refused.
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
