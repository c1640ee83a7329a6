//! Amounts that entitled waiting requests are promised, in the scopes with guarantees.
//!
//! Requests of absent callers and of dead instances are not promised anything. Never: decides whether a request is entitled.
//! Callers: the committer and the admission check.

use std::collections::BTreeSet;

use sqlx::PgExecutor;
use uuid::Uuid;

use rm_model::{
    guarantee::{PromisedAmounts, Promises},
    scope::Scope,
};

use crate::StoreError;

use super::{OVERDUE, TABLE, scope_number};

/// Returns the promises in `scopes`: those of the requests `known` one by one, and the others by equal amounts. The caller has locked
/// the counters of the scopes, or only checks. The cost grows with the number of entitled requests: 10,000 of a scope are read in some 15 ms.
pub async fn promises(
    executor: impl PgExecutor<'_>,
    scopes: BTreeSet<Scope>,
    known: &[Uuid],
) -> Result<Promises, StoreError> {
    let scopes: Vec<Scope> = scopes.into_iter().collect();
    let rows = sqlx::query(
        "-- waiting::promises
        SELECT d.number, own.ticket_id, w.resource_type, w.resource::text, count(*) AS requests
        FROM unnest($1::bigint[]) WITH ORDINALITY AS d (scope, number)
        CROSS JOIN LATERAL (
            SELECT w.ticket_id, w.resource_type, w.resource FROM linkis_resource_waiting w
            WHERE w.guaranteed_scopes @> ARRAY[d.scope] AND w.class = 0 AND w.kept_until IS NULL
                AND w.wait_until > clock_timestamp() - make_interval(secs => $3)
                AND w.instance_id IN (
                    SELECT i.instance_id FROM linkis_rm_instance i WHERE i.alive_until > clock_timestamp())) w
        LEFT JOIN (SELECT DISTINCT unnest($2::uuid[]) AS ticket_id) own ON own.ticket_id = w.ticket_id
        GROUP BY d.number, own.ticket_id, w.resource_type, w.resource",
    )
    .bind(scopes.iter().map(scope_number).collect::<Vec<_>>())
    .bind(known)
    .bind(OVERDUE.as_secs_f64())
    .fetch_all(executor)
    .await?;
    let mut promises = Promises::default();
    for row in rows.iter().map(|row| TABLE.row(row)) {
        let number: i64 = row.get("number")?;
        let scope = usize::try_from(number - 1).ok().and_then(|at| scopes.get(at));
        let scope = scope.ok_or_else(|| row.wrong(format!("scope {number}")))?;
        let resource = row.resource("resource", row.resource_type()?)?;
        let promised = PromisedAmounts { ticket_id: row.get("ticket_id")?, resource, requests: row.get("requests")? };
        promises.add(scope.clone(), promised);
    }
    Ok(promises)
}
