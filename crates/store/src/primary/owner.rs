//! Hosts of a cell, as the coordinator of Citus names them; the coordinator may move the cell.
//!
//! The alternative to hosts in a URL. Caller: the parent module.

use std::{sync::Arc, time::Duration};

use tokio::time::timeout;

use super::{
    super::{
        citus::{self, Cell},
        connect_target::place,
    },
    Primary, PrimaryInner,
    probe::{LOOK_INTERVAL, LOOK_PAUSE, SEARCH_INTERVAL},
};

/// Polls the coordinator for the owner of `cell`, at the rate of the probes. A missing reply leaves the last owner in
/// place.
pub(super) async fn follow(shared: Arc<PrimaryInner>, coordinator: Primary, cell: Cell) {
    let (mut asked, mut is_logged) = (shared.asked.subscribe(), false);
    let mut from = None;
    loop {
        let _ = asked.borrow_and_update();
        // The URL may have changed since, including its password.
        let url = coordinator.target().hosts();
        match citus::owner(&coordinator, &cell).await {
            Ok(hosts) => {
                let owner = hosts.options.first().map(place);
                let is_same = matches!(&from, Some((place, before)) if *place == owner && Arc::ptr_eq(before, &url));
                if !is_same {
                    from = Some((owner, url));
                    shared.show(hosts);
                }
                is_logged = false;
            }
            Err(error) if !is_logged => {
                is_logged = true;
                tracing::warn!(%cell, error = &error as &dyn std::error::Error, "the coordinator did not return the \
                    worker of the cell");
            }
            Err(_) => {}
        }
        tokio::time::sleep(LOOK_PAUSE).await;
        let _ = timeout(shared.rest(), asked.changed()).await;
    }
}

impl PrimaryInner {
    /// Returns the delay before the next probe.
    pub(super) fn rest(&self) -> Duration {
        let known = self.known.borrow();
        let is_well = known.usable().is_some() && !known.is_late;
        if is_well { LOOK_INTERVAL } else { SEARCH_INTERVAL }
    }
}
