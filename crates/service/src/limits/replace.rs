//! Replacement of all rules at once, with its changes and the scopes that are above the new limits.
//!
//! Callers: `rm_edge::limit`, and the server, which applies the limits file.

use std::collections::BTreeMap;

use async_recursion::async_recursion as boxed;
use sqlx::PgConnection;
use tokio::time::Instant;

use crate::error::Error;
use rm_model::{
    limit::{
        GuaranteeExcess, LimitChanges, LimitExcess, LimitReplacement, Limits, RuleChanges, RuleReplacement, ScopeUsage,
    },
    principal::Actor,
};
use rm_store::{em_resource, label_resource, session::within_timeout};
use rm_telemetry::cause;

use super::{FencedChange, LOOKED_AT_MAX, LimitService, OVER_MAX, PAGE};

impl LimitService {
    /// Replaces all rules of the kinds that `new` has. Rules with new labels decide when all tickets are counted.
    ///
    /// # Errors
    /// [`Error::LockTimeout`] if the fence could not be closed by `deadline`; [`Error::CommitUnknown`].
    #[boxed]
    pub async fn replace(&self, by: &Actor, new: LimitReplacement, deadline: Instant) -> Result<LimitChanges, Error> {
        Ok(self.change(by, deadline, &FencedChange::Replace(new)).await?.changes)
    }

    /// Replaces all rules as [`LimitService::replace`] does, and waits until all of them decide.
    ///
    /// # Errors
    /// As of [`LimitService::replace`].
    #[boxed]
    pub async fn replace_and_wait(
        &self,
        by: &Actor,
        new: LimitReplacement,
        deadline: Instant,
    ) -> Result<RuleReplacement, Error> {
        let has_rules = new.rules.is_some();
        let changes = self.replace(by, new, deadline).await?;
        let standing = async {
            if has_rules {
                self.until_counted(deadline).await?;
            }
            let mut connection = self.store.operators().acquire().await?;
            let limits = within_timeout(self.current(&mut connection)).await?;
            effect(&mut connection, &limits, changes.clone()).await
        };
        // The rules are stored from here on: no error may state that they are not.
        let unknown = || RuleReplacement {
            changes: changes.clone(),
            over: LimitExcess::unknown(),
            guarantees: vec![],
            decides: false,
        };
        Ok(match tokio::time::timeout_at(deadline, standing).await {
            Ok(Ok(standing)) => standing,
            Ok(Err(error)) => {
                tracing::warn!(error = cause(&error), "limits were replaced, but the reply cannot be read");
                unknown()
            }
            Err(_) => unknown(),
        })
    }

    /// Returns the result that [`LimitService::replace_and_wait`] would have, and changes nothing.
    ///
    /// # Errors
    /// Database errors.
    #[boxed]
    pub async fn replace_dry_run(&self, new: LimitReplacement) -> Result<RuleReplacement, Error> {
        let LimitReplacement { rules, queue } = new;
        let mut connection = self.store.operators().acquire().await?;
        let limits = within_timeout(self.current(&mut connection)).await?;
        let mut changes = LimitChanges { queue: limits.queue_rules().changes_to(&queue), ..LimitChanges::default() };
        let limits = match rules {
            Some(rules) => {
                changes.rules = RuleChanges::between(limits.rules().map(|(rule, _)| rule.clone()), &rules);
                limits.with_rules(rules).into()
            }
            None => limits,
        };
        effect(&mut connection, &limits, changes).await
    }
}

/// Returns the effect of `limits`, which `changes` have made.
async fn effect(
    connection: &mut PgConnection,
    limits: &Limits,
    changes: LimitChanges,
) -> Result<RuleReplacement, Error> {
    let over = over_any(&mut *connection, limits).await?;
    let capacity = match limits.rules().any(|(rule, _)| !rule.guarantee.is_empty()) {
        true => within_timeout(em_resource::capacity(connection)).await?,
        false => BTreeMap::new(),
    };
    let guarantees = GuaranteeExcess::of(limits.rules().map(|(rule, _)| rule), &capacity);
    Ok(RuleReplacement { changes, over, guarantees, decides: limits.rules().all(|(_, decides)| decides) })
}

/// Returns the scopes above `limits`, among the first [`LOOKED_AT_MAX`].
async fn over_any(connection: &mut PgConnection, limits: &Limits) -> Result<LimitExcess, Error> {
    let (mut over, mut after) = (LimitExcess::default(), Vec::new());
    over.is_partial = limits.rules().any(|(_, decides)| !decides);
    for _ in 0..LOOKED_AT_MAX / PAGE {
        let page = within_timeout(label_resource::list(&mut *connection, &after, PAGE)).await?;
        for (_, counter, usage) in page.scopes {
            let scope = ScopeUsage::new(limits.of_counter(counter), usage);
            if scope.is_over() {
                over.count += 1;
                over.first.extend((over.count <= OVER_MAX).then_some(scope));
            }
        }
        match page.last {
            Some(place) => after = place,
            None => return Ok(over),
        }
    }
    over.is_partial = true;
    Ok(over)
}
