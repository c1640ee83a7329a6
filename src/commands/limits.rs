//! `limit`: list, comparison with a file, replacement and deletion of limits.
//!
//! A change is shown and confirmed before it is made; the service computes the differences. Without a terminal, consent is an
//! argument.
//! Submodules: `one`: commands for one limit; `counting`: progress of counting by new limits.

use std::{collections::BTreeMap, fmt::Write as _, path::PathBuf};

use clap::{Args, Subcommand};

use crate::{config, limits_file};
use rm_client::calls;
use rm_edge::convert;
use rm_model::{limit::LimitReplacement, order::QueueRuleReplacement, priority::Priorities, reclaim::ReclaimPolicies};
use rm_proto::v1::{
    GetOrderRequest, GuaranteeExcess, Limit, LimitState, ListLimitsRequest, ListLimitsResponse, ListPrioritiesRequest,
    ListReclaimPoliciesRequest, OrderChange, PriorityChange, ReclaimPolicyChange, ReplaceLimitsRequest,
    ReplaceLimitsResponse, ScopeUsage,
};

use super::{
    consent::Consent,
    error::{CommandFailure, CommandReply},
    help::end,
    list::{ListArguments, listed},
    order,
    output::{
        OutputArguments,
        table::{Column, TableRow, cells},
        text,
    },
    priorities, reclaim, scopes,
    service::{EndpointArguments, ServiceClient, TIMEOUT, TIMEOUT_LONG},
    service_arguments::ServiceArguments,
};

mod counting;
mod one;

pub(super) use one::labelled;
use one::{DeleteLimitCommand, GetLimitCommand, SetLimitCommand};

/// Verbs of `limit`.
#[derive(Debug, Clone, Subcommand)]
pub enum LimitCommand {
    /// List the limits, in the order in which they are checked.
    #[command(after_help = end("limit list", &calls::LIST_LIMITS))]
    List(ListLimitsCommand),
    /// Show a limit. Exit code 1 if there is none.
    #[command(after_help = end("limit get user=hadoop", &calls::LIST_LIMITS))]
    Get(GetLimitCommand),
    /// Set one limit: the most that tickets with these labels use together. Shows what it replaces, for a confirmation.
    #[command(after_help = end("limit set user=hadoop --max instances=2,memory=20g", &calls::SET_LIMIT))]
    Set(SetLimitCommand),
    /// Print the changes that a limits file would make. Exit code 0 without changes, 1 with changes.
    #[command(after_help = end("limit diff limits.toml", &calls::REPLACE_LIMITS))]
    Diff(DiffLimitsCommand),
    /// Replace the limits, the order, the priorities and the reclaim policies with those of a file. What the file lacks stays.
    #[command(after_help = end("limit apply limits.toml --reason \"as agreed\"", &calls::REPLACE_LIMITS))]
    Apply(ApplyLimitsCommand),
    /// Delete a limit. Exit code 1 if there is none.
    #[command(after_help = end("limit delete user=hadoop,creator=IDE", &calls::DELETE_LIMIT))]
    Delete(DeleteLimitCommand),
    /// Print all limits, the order, the priorities and the reclaim policies as a file for limit diff and limit apply.
    #[command(after_help = end("limit export > limits.toml", &calls::LIST_LIMITS))]
    Export(ExportLimitsCommand),
}

/// Arguments of `limit list`.
#[derive(Debug, Clone, Args)]
pub struct ListLimitsCommand {
    #[command(flatten)]
    list: ListArguments,
}

/// Arguments of `limit diff`.
#[derive(Debug, Clone, Args)]
pub struct DiffLimitsCommand {
    /// A TOML file with all limits, as limit export prints it and --limits of the server takes it.
    file: PathBuf,

    #[command(flatten)]
    arguments: ServiceArguments,
}

/// Arguments of `limit apply`.
#[derive(Debug, Clone, Args)]
pub struct ApplyLimitsCommand {
    /// A TOML file with all limits, as limit export prints it and --limits of the server takes it.
    file: PathBuf,

    #[command(flatten)]
    consent: Consent,

    #[command(flatten)]
    arguments: ServiceArguments,
}

/// Arguments of `limit export`.
#[derive(Debug, Clone, Args)]
pub struct ExportLimitsCommand {
    #[command(flatten)]
    service: EndpointArguments,
}

/// Number of limits per page.
const PAGE: i32 = 1000;

const COLUMNS: &[Column] = &[
    Column::name("LIMIT").key(),
    Column::text("MAX").key(),
    Column::text("MODE").key(),
    Column::text("STATE"),
    Column::number("SET"),
    Column::name("BY"),
    Column::text("ETAG").wide(),
];

listed!(LIST_LIMITS: ListLimitsRequest => ListLimitsResponse, limits: Limit, COLUMNS, |limit| vec![row(limit)]);

impl LimitCommand {
    /// Runs the subcommand.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        match self {
            Self::List(ListLimitsCommand { list }) => list.list(ListLimitsRequest::default()).await,
            Self::Get(get) => get.run().await,
            Self::Set(set) => set.run().await,
            Self::Export(export) => export.run().await,
            Self::Diff(diff) => diff.run().await,
            Self::Apply(apply) => apply.run().await,
            Self::Delete(delete) => delete.run().await,
        }
    }
}

impl DiffLimitsCommand {
    async fn run(self) -> Result<CommandReply, CommandFailure> {
        let new = read(self.file)?;
        let service = self.arguments.service(TIMEOUT_LONG)?;
        let changes = compare(&service, &new).await?;
        let mut printer = self.arguments.printer();
        printer.answer(&calls::REPLACE_LIMITS, &changes, || changes_text(&changes, "would be ") + kept_text(&new))?;
        Ok(CommandReply::yes_if(count(&changes) == 0))
    }
}

impl ApplyLimitsCommand {
    async fn run(self) -> Result<CommandReply, CommandFailure> {
        let new = read(self.file)?;
        let service = self.arguments.service(TIMEOUT_LONG)?;
        let mut printer = self.arguments.printer();
        let mut changes = compare(&service, &new).await?;
        let kept = kept_text(&new);
        if new.keep_limits && changes.removed_count > 0 {
            let problem = "an instance of an earlier release would delete the limits that the file does not have";
            return Err(CommandFailure::Refused(format!("{problem}; apply it when all instances are upgraded")));
        }
        if count(&changes) > 0 {
            // The user confirms the changes as compared. The reply contains them as applied.
            let reason =
                self.consent.confirm(&format!("{}Make these changes?", changes_text(&changes, "would be ")))?;
            if self.consent.is_interactive() && !is_same(&changes, &compare(&service, &new).await?) {
                return Err(CommandFailure::Changed);
            }
            changes = counting::replaced(&service, &ReplaceLimitsRequest { reason, ..new }).await?;
        }
        printer.answer(&calls::REPLACE_LIMITS, &changes, || changes_text(&changes, "") + kept)?;
        Ok(CommandReply::Yes)
    }
}

impl ExportLimitsCommand {
    async fn run(self) -> Result<CommandReply, CommandFailure> {
        let service = self.service.connect(TIMEOUT)?;
        let mut question = ListLimitsRequest { page_size: PAGE, ..Default::default() };
        let mut limits = Vec::new();
        loop {
            let page = service.make(&calls::LIST_LIMITS, &question).await?;
            limits.extend(page.limits);
            match page.next_page_token {
                end if end.is_empty() => break,
                token => question.page_token = token,
            }
        }
        let rules =
            limits.iter().map(|limit| convert::limit::rule("limit", Some(limit))).collect::<Result<Vec<_>, _>>()?;
        let order = service.make(&calls::GET_ORDER, &GetOrderRequest {}).await?.order;
        let priorities = service.make(&calls::LIST_PRIORITIES, &ListPrioritiesRequest {}).await?.priorities;
        let priorities = priorities.iter().map(|rule| convert::limit::priority("priority", Some(rule)));
        let policies = service.make(&calls::LIST_RECLAIM_POLICIES, &ListReclaimPoliciesRequest {}).await?.policies;
        let policies = policies.iter().map(|policy| convert::limit::reclaim_policy("policy", Some(policy)));
        let queue = QueueRuleReplacement {
            order: Some(convert::limit::order("order", order.as_ref())?),
            priorities: Some(Priorities::new(priorities.collect::<Result<Vec<_>, _>>()?)),
            reclaim: Some(ReclaimPolicies::new(policies.collect::<Result<Vec<_>, _>>()?)),
        };
        OutputArguments::default()
            .printer()
            .print(&limits_file::text(&LimitReplacement { rules: Some(rules), queue }))?;
        Ok(CommandReply::Yes)
    }
}

/// Returns the replacement by a file as a message of the API.
fn read(file: PathBuf) -> Result<ReplaceLimitsRequest, CommandFailure> {
    let new = config::read_limits("FILE", &file).map_err(CommandFailure::Usage)?;
    Ok(convert::limit::replacement_message(&new))
}

/// Returns the changes that a replacement would make.
async fn compare(service: &ServiceClient, new: &ReplaceLimitsRequest) -> Result<ReplaceLimitsResponse, CommandFailure> {
    let question = ReplaceLimitsRequest { dry_run: true, ..new.clone() };
    service.make_slowly("comparing the limits", &calls::REPLACE_LIMITS, &question).await
}

/// Returns whether two comparisons change the same limits and rules, regardless of the scopes above them.
fn is_same(a: &ReplaceLimitsResponse, b: &ReplaceLimitsResponse) -> bool {
    let limits = |changes: &ReplaceLimitsResponse| (changes.added_count, changes.changed_count, changes.removed_count);
    let rules = (&a.order, &a.priorities, &a.reclaim_policies) == (&b.order, &b.priorities, &b.reclaim_policies);
    rules && limits(a) == limits(b) && a.added == b.added && a.changed == b.changed && a.removed == b.removed
}

/// Returns the number of changed limits.
fn limit_count(changes: &ReplaceLimitsResponse) -> i64 {
    changes.added_count.saturating_add(changes.changed_count).saturating_add(changes.removed_count)
}

/// Returns the number of changes.
fn count(changes: &ReplaceLimitsResponse) -> i64 {
    let rules = usize::from(changes.order.is_some()) + changes.priorities.len() + changes.reclaim_policies.len();
    limit_count(changes).saturating_add(i64::try_from(rules).unwrap_or(i64::MAX))
}

fn maximum(limit: &Limit) -> String {
    match scopes::mode(limit) {
        "enforced" => maximum_and_guarantee(limit),
        mode => format!("{} {mode}", maximum_and_guarantee(limit)),
    }
}

/// Describes the amounts of a limit.
pub(super) fn maximum_and_guarantee(limit: &Limit) -> String {
    let max = text::amounts_by_key(&limit.max);
    if limit.guarantee.is_empty() { max } else { format!("{max} guarantee {}", text::amounts_by_key(&limit.guarantee)) }
}

pub(super) fn name(limit: &Limit) -> String {
    labels_name(&limit.labels, &limit.each, &limit.name)
}

/// Returns the name of a rule with these labels; `stored` if they are not valid.
pub(super) fn labels_name(labels: &BTreeMap<String, String>, each: &[String], stored: &str) -> String {
    let name = convert::limit::label_pattern("labels", labels, each)
        .map_or_else(|_| stored.to_owned(), |pattern| pattern.to_string());
    let mut words = labels.iter().flat_map(|(key, value)| [key, value]).chain(each);
    if words.all(|word| text::name(word) == *word) { name } else { text::name(&name) }
}

/// Describes the changes and the scopes above their limits; `would` precedes the participles.
fn changes_text(changes: &ReplaceLimitsResponse, would: &str) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    for limit in &changes.added {
        let _ = writeln!(text, "+ {}: {}", name(limit), maximum(limit));
    }
    for change in &changes.changed {
        let (before, after) = (change.before.clone().unwrap_or_default(), change.after.clone().unwrap_or_default());
        let _ = writeln!(text, "~ {}: {}, was {}", name(&after), maximum(&after), maximum(&before));
    }
    for limit in &changes.removed {
        let _ = writeln!(text, "- {}: {}", name(limit), maximum(limit));
    }
    let listed = changes.added.len() + changes.changed.len() + changes.removed.len();
    let omitted = limit_count(changes).saturating_sub(i64::try_from(listed).unwrap_or(i64::MAX));
    if omitted > 0 {
        let _ = writeln!(text, "... and {omitted} more");
    }
    if limit_count(changes) > 0 {
        let (added, changed, removed) = (changes.added_count, changes.changed_count, changes.removed_count);
        let _ = writeln!(text, "{added} {would}added, {changed} {would}changed, {removed} {would}removed");
    }
    if let Some(OrderChange { before, after }) = &changes.order {
        changed_rule(&mut text, "order", before.as_ref(), after.as_ref(), order::written);
    }
    for PriorityChange { before, after } in &changes.priorities {
        changed_rule(&mut text, "priority", before.as_ref(), after.as_ref(), priorities::written);
    }
    for ReclaimPolicyChange { before, after } in &changes.reclaim_policies {
        changed_rule(&mut text, "reclaim policy", before.as_ref(), after.as_ref(), reclaim::written_policy);
    }
    if count(changes) == 0 {
        text.push_str("the limits are those of the file\n");
    }
    for scope in &changes.over_limit {
        let _ = writeln!(text, "over its limit: {}", over(scope, ""));
    }
    let unnamed = changes.over_limit_count - i64::try_from(changes.over_limit.len()).unwrap_or(i64::MAX);
    if unnamed > 0 {
        let _ = writeln!(text, "... and {unnamed} more");
    }
    for GuaranteeExcess { labels, dimension, guaranteed, capacity } in &changes.guarantee_excess {
        let [guaranteed, capacity] = [guaranteed, capacity].map(|amount| text::amount_by_key(dimension, *amount));
        let labels = labels.join(", ");
        let _ = writeln!(text, "the guarantees by {labels} exceed the EMs: {dimension}={guaranteed} of {capacity}");
    }
    if changes.over_limit_partial {
        text.push_str("not all scopes were checked: linkis-rm scope list lists the others\n");
    }
    if changes.state() == LimitState::Counting && would.is_empty() {
        text.push_str("tickets are still being counted: linkis-rm limit list shows which limits decide\n");
    }
    text
}

/// Describes the limits that a replacement keeps.
fn kept_text(new: &ReplaceLimitsRequest) -> &'static str {
    if new.keep_limits { "the file has no [[limit]]: the limits stay; limit = [] deletes them\n" } else { "" }
}

/// Describes the change of a rule of the wait queues. `written` returns the name and the values of a rule.
fn changed_rule<R>(
    text: &mut String,
    kind: &str,
    before: Option<&R>,
    after: Option<&R>,
    written: impl Fn(&R) -> (String, String),
) {
    let kind = |name: &str| if name.is_empty() { kind.to_owned() } else { format!("{kind} {name}") };
    // Writing to a string cannot fail.
    let _ = match (before.map(&written), after.map(&written)) {
        (Some((_, before)), Some((name, after))) => writeln!(text, "~ {}: {after}, was {before}", kind(&name)),
        (Some((name, before)), None) => writeln!(text, "- {}: {before}", kind(&name)),
        (None, Some((name, after))) => writeln!(text, "+ {}: {after}", kind(&name)),
        (None, None) => Ok(()),
    };
}

/// A dimension of a scope above its maximum.
struct DimensionExcess<'a> {
    dimension: &'a str,
    held: i64,
    max: i64,
    is_enforced: bool,
}

fn excesses(scope: &ScopeUsage) -> Vec<DimensionExcess<'_>> {
    let held = |dimension: &str| {
        let of = |amounts: &BTreeMap<String, i64>| amounts.get(dimension).copied().unwrap_or(0);
        of(&scope.used).saturating_add(of(&scope.locked))
    };
    let excess = |(dimension, (max, limit)): (_, (i64, &Limit))| {
        let (held, is_enforced) = (held(dimension), scopes::mode(limit) == "enforced");
        DimensionExcess { dimension, held, max, is_enforced }
    };
    scopes::maxima(scope).into_iter().map(excess).filter(|excess| excess.held > excess.max).collect()
}

/// Describes the excess of a scope. `effect` follows it if an enforced limit is exceeded.
fn over(scope: &ScopeUsage, effect: &str) -> String {
    let excesses = excesses(scope);
    let shown = |DimensionExcess { dimension, held, max, is_enforced }: &DimensionExcess<'_>| {
        let [held, max] = [held, max].map(|amount| text::amount_by_key(dimension, *amount));
        format!("{dimension}={held} of {max}{}", if *is_enforced { "" } else { " (advisory)" })
    };
    let shown = excesses.iter().map(shown).collect::<Vec<_>>().join(" ");
    let effect = if excesses.iter().any(|excess| excess.is_enforced) { effect } else { "" };
    format!("{}: {shown}{effect}", text::labels(&scope.labels))
}

fn row(limit: &Limit) -> TableRow {
    let state = match limit.state() {
        LimitState::Counting => "counting",
        LimitState::InForce => "in force",
        LimitState::Unspecified => text::NOTHING,
    };
    cells![
        name(limit),
        maximum_and_guarantee(limit),
        scopes::mode(limit).to_owned(),
        state.to_owned(),
        limit.update_time.as_ref(),
        text::name_or_nothing(&limit.updated_by),
        text::or_nothing(&limit.etag),
    ]
}
