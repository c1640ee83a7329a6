//! `linkis_resource_limit_change`: log of rule changes by limits version, so that instances need not read all rules
//! again.
//!
//! Each row links the version before and after a change. Caller: [`super::limit`].

use sqlx::{PgConnection, PgExecutor};
use uuid::Uuid;

use rm_model::{
    limit::{LabelPattern, Rule},
    limit_mode::LimitMode,
};

use super::{
    StoreError, limit,
    rows::{TableName, TableRow},
};

/// Maximum number of changed rules that one change records individually.
const RECORDED_MAX: usize = 1000;

/// Number of rows kept, and maximum number of rows to apply: above it, reading all rules is cheaper.
const KEPT: i64 = 10_000;
const FOLLOWED_MAX: usize = 2000;

/// Records the rules that a change modified. `before` is the version before the change.
pub async fn insert(
    connection: &mut PgConnection,
    before: Uuid,
    changed: &[(&LabelPattern, Option<&Rule>)],
) -> Result<(), StoreError> {
    let is_whole = changed.len() > RECORDED_MAX;
    let recorded = if is_whole { &[] } else { changed };
    let mut patterns: Vec<_> = recorded.iter().map(|(pattern, _)| Some(limit::pattern_json(pattern))).collect();
    let mut maxima: Vec<_> = recorded.iter().map(|(_, rule)| rule.map(|rule| limit::amounts_json(&rule.max))).collect();
    let mut guarantees: Vec<_> =
        recorded.iter().map(|(_, rule)| rule.map(|rule| limit::amounts_json(&rule.guarantee))).collect();
    let mut modes: Vec<_> = recorded.iter().map(|(_, rule)| rule.map(|rule| rule.mode.as_str())).collect();
    if recorded.is_empty() {
        (patterns, maxima, modes, guarantees) = (vec![None], vec![None], vec![None], vec![None]);
    }
    sqlx::query(
        "-- limit_change::insert
        WITH old AS (
            DELETE FROM linkis_resource_limit_change
            WHERE number <= (SELECT max(number) FROM linkis_resource_limit_change) - $5
        )
        INSERT INTO linkis_resource_limit_change (before, version, pattern, max_resource, is_whole, mode, guarantee)
        SELECT $1, v.version, d.pattern::jsonb, d.max::jsonb, $4, d.mode, d.guarantee::jsonb
        FROM linkis_resource_limit_version v
        CROSS JOIN unnest($2::text[], $3::text[], $6::text[], $7::text[]) AS d (pattern, max, mode, guarantee)
        WHERE v.only_row",
    )
    .bind(before)
    .bind(patterns)
    .bind(maxima)
    .bind(is_whole)
    .bind(KEPT)
    .bind(modes)
    .bind(guarantees)
    .execute(connection)
    .await?;
    Ok(())
}

/// Patterns with their rules in the order of the changes; `None` for a deleted rule.
type RuleChangeLog = Vec<(LabelPattern, Option<Rule>)>;

struct ChangeRow {
    before: Uuid,
    version: Uuid,
    pattern: Option<String>,
    max_resource: Option<String>,
    /// `None` in rows of an earlier release, which enforces every limit.
    mode: Option<String>,
    /// `None` for a deleted rule, and in rows of an earlier release, which leaves the guarantee of the rule as it is.
    guarantee: Option<String>,
    is_whole: bool,
}

/// Returns the rule changes between two versions; `None` if the log does not cover them or has too many rows.
pub async fn between(executor: impl PgExecutor<'_>, from: Uuid, to: Uuid) -> Result<Option<RuleChangeLog>, StoreError> {
    let rows = sqlx::query(
        "-- limit_change::between
        SELECT before, version, pattern::text, max_resource::text, mode, guarantee::text, is_whole
        FROM linkis_resource_limit_change
        WHERE number > (SELECT max(number) FROM linkis_resource_limit_change WHERE version = $1)
        ORDER BY number LIMIT $2",
    )
    .bind(from)
    .bind(i64::try_from(FOLLOWED_MAX).unwrap_or(i64::MAX))
    .fetch_all(executor)
    .await?;
    let change = |row: TableRow<'_>| {
        Ok(ChangeRow {
            before: row.get("before")?,
            version: row.get("version")?,
            pattern: row.get("pattern")?,
            max_resource: row.get("max_resource")?,
            mode: row.get("mode")?,
            guarantee: row.get("guarantee")?,
            is_whole: row.get("is_whole")?,
        })
    };
    follow(TableName("linkis_resource_limit_change").parse(&rows, change)?, from, to)
}

/// Follows the chain of versions. Each change must begin at the version where the previous one ended; a gap means that
/// the log misses a change.
fn follow(rows: Vec<ChangeRow>, from: Uuid, to: Uuid) -> Result<Option<RuleChangeLog>, StoreError> {
    let may_be_cut = rows.len() >= FOLLOWED_MAX;
    let (mut at, mut changes) = (from, Vec::new());
    for row in rows {
        if row.version != at {
            if at == to {
                return Ok(Some(changes));
            }
            if row.before != at {
                return Ok(None);
            }
            at = row.version;
        }
        if row.is_whole {
            return Ok(None);
        }
        if let Some(pattern) = &row.pattern {
            let mode = row.mode.as_deref().unwrap_or(LimitMode::Enforced.as_str());
            let rule = match (&row.max_resource, &row.guarantee) {
                (Some(max), Some(guarantee)) => Some(limit::rule(pattern, mode, (max, guarantee))?),
                (Some(_), None) => return Ok(None),
                (None, _) => None,
            };
            changes.push((limit::pattern(pattern)?, rule));
        }
    }
    Ok(Some(changes).filter(|_| at == to && !may_be_cut))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(before: u128, version: u128, user: Option<&str>, max: Option<i64>) -> ChangeRow {
        ChangeRow {
            before: Uuid::from_u128(before),
            version: Uuid::from_u128(version),
            pattern: user.map(|user| format!(r#"{{"user": "{user}"}}"#)),
            max_resource: max.map(|max| format!(r#"{{"instances": {max}}}"#)),
            mode: None,
            guarantee: max.map(|_| "{}".to_owned()),
            is_whole: false,
        }
    }

    fn followed(rows: Vec<ChangeRow>, from: u128, to: u128) -> Option<Vec<(String, bool)>> {
        let changes = follow(rows, Uuid::from_u128(from), Uuid::from_u128(to)).unwrap()?;
        Some(changes.into_iter().map(|(pattern, rule)| (pattern.to_string(), rule.is_some())).collect())
    }

    #[test]
    fn limit_changes_between_two_versions_are_returned() {
        let rows = || {
            vec![
                row(1, 2, Some("a"), Some(1)),
                row(1, 2, Some("b"), None),
                row(2, 3, None, None),
                row(3, 4, Some("c"), Some(2)),
            ]
        };
        let (a, b, c) = (("user=a".to_owned(), true), ("user=b".to_owned(), false), ("user=c".to_owned(), true));
        assert_eq!(followed(rows(), 1, 4), Some(vec![a.clone(), b.clone(), c]));
        assert_eq!(followed(rows(), 1, 3), Some(vec![a, b]));
        assert_eq!(followed(rows(), 9, 4), None, "no change leads to the first version");
        assert_eq!(followed(rows(), 1, 5), None, "no change leads to the last version");
    }

    #[test]
    fn limit_changes_with_gap_or_whole_change_return_none() {
        assert_eq!(followed(vec![row(1, 2, None, None), row(3, 4, None, None)], 1, 4), None);
        let whole = ChangeRow { is_whole: true, ..row(1, 2, None, None) };
        assert_eq!(followed(vec![whole], 1, 2), None);
        let of_earlier_release = ChangeRow { guarantee: None, ..row(1, 2, Some("a"), Some(1)) };
        assert_eq!(followed(vec![of_earlier_release], 1, 2), None);
        assert_eq!(followed(vec![], 1, 2), None);
    }
}
