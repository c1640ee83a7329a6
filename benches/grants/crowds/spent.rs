//! Processor time of the service and of PostgreSQL during a phase of a crowd.

use std::time::{Duration, Instant};

use crate::{
    Failure,
    meter::{Cost, Meter, UsageSample},
};

use super::stage::Stage;

/// A meter reading that later readings are compared with.
pub(crate) struct CostMeasurement {
    meter: Meter,
    before: UsageSample,
    begun: Instant,
}

impl CostMeasurement {
    pub async fn begin(stage: &Stage) -> Result<Self, Failure> {
        let mut meter = Meter::new(stage.database(), vec![stage.process_id()]).await?;
        let before = meter.read().await?;
        Ok(Self { meter, before, begun: Instant::now() })
    }

    /// Returns the cost per operation since the first reading, and the time since then.
    pub async fn each(mut self, operations: u64) -> Result<(Cost, Duration), Failure> {
        let cost = self.meter.read().await?.since(self.before, operations);
        Ok((cost, self.begun.elapsed()))
    }

    /// Returns the processor time of the service and of PostgreSQL since the first reading, in percent of one core.
    pub async fn percent(self) -> Result<[f64; 2], Failure> {
        let (cost, elapsed) = self.each(1).await?;
        Ok([cost.server, cost.postgresql].map(|micros| micros / 1e4 / elapsed.as_secs_f64()))
    }
}
