//! Checks of replies: a refusal states its reason completely, and agrees with the model of the cluster.

use rm_model::refusal::{Refusal, Shortfall};

use super::{
    calls::{CallError, em_instance},
    model::{Model, Short},
    trace::{Amounts, Task, Trace},
    user_limit,
};

/// Returns what is missing in a refusal, for any state of the cluster. A refusal has to name everything that explains
/// it.
pub fn gaps(refusal: &Refusal, task: &Task) -> Vec<String> {
    let mut gaps = Vec::new();
    let mut claim = |holds: bool, gap: &str| {
        if !holds {
            gaps.push(format!("{} was refused, but {gap}: {refusal:?}", task.name));
        }
    };
    claim(!refusal.shortfalls.is_empty(), "nothing is short");
    claim(refusal.code != 0 && !refusal.reason.is_empty(), "without a code or a reason");
    for short in &refusal.shortfalls {
        claim(is_explained(short, task), "the shortfall is not explained");
    }
    gaps
}

fn is_explained(short: &Shortfall, task: &Task) -> bool {
    let need = Amounts::NAMES.into_iter().zip(task.need().values());
    let is_of_limit = short.scope == user_limit::scope(&task.user());
    let is_of_em = short.scope.starts_with("em=");
    need.into_iter().any(|(name, need)| short.dimension.name() == name && short.requested == need)
        && short.requested > short.available
        && short.max >= short.available
        && (is_of_limit || is_of_em)
        && is_of_limit != short.rule.is_empty()
}

/// Returns what is wrong with a grant on a node while no other call is in progress: missing capacity, or an exceeded
/// limit.
pub fn wrong_grant(model: &Model<'_>, trace: &Trace, task: &Task, node: usize) -> Vec<String> {
    let mut short = model.short_on(node, task);
    short.extend(model.short_of_limit(task));
    match task.accepts(&trace.nodes[node]) {
        true if short.is_empty() => vec![],
        _ => vec![format!("{} was granted on {}, but {short:?}", task.name, trace.nodes[node].name)],
    }
}

/// Returns what is wrong with a refusal while no other call is in progress. It has to name exactly the shortage of the
/// model, on its node and in the limit. `asked` is the node of the request; without it, a node may be short only if all
/// nodes are.
pub fn wrong_refusal(
    model: &Model<'_>,
    trace: &Trace,
    task: &Task,
    asked: Option<usize>,
    refusal: &Refusal,
) -> Result<Vec<String>, CallError> {
    let (of_limit, of_em): (Vec<_>, Vec<_>) = refusal.shortfalls.iter().partition(|short| !short.rule.is_empty());
    let mut wrong = Vec::new();
    let mut claim = |holds: bool, what: &str| {
        if !holds {
            wrong.push(format!("{} was refused, but {what}: {refusal:?}", task.name));
        }
    };
    claim(same(&of_limit, model.short_of_limit(task)), "its user's limit is not short by that");
    match of_em.first() {
        Some(first) => {
            let node = named(trace, &first.scope)?;
            claim(of_em.iter().all(|short| short.scope == first.scope), "several EMs are short");
            claim(asked.is_none() || asked == node, "it asked elsewhere");
            claim(asked.is_some() || model.first_fit(task).is_none(), "it fits on some EM");
            claim(node.is_some_and(|node| task.accepts(&trace.nodes[node])), "not on an EM that matches");
            claim(node.is_some_and(|node| same(&of_em, model.short_on(node, task))), "the EM is not short by that");
        }
        None => claim(asked.is_none_or(|node| model.short_on(node, task).is_empty()), "its EM is short as well"),
    }
    let never_fits = refusal.shortfalls.iter().any(|short| short.requested > short.max);
    claim(refusal.never_fits == never_fits, "it says wrongly whether it ever fits");
    Ok(wrong)
}

fn named(trace: &Trace, scope: &str) -> Result<Option<usize>, CallError> {
    for (number, node) in trace.nodes.iter().enumerate() {
        if scope == format!("em={}", em_instance(node)?) {
            return Ok(Some(number));
        }
    }
    Ok(None)
}

fn same(told: &[&Shortfall], mut known: Vec<Short>) -> bool {
    let told = told.iter().map(|told| (told.dimension.name(), told.requested, told.available, told.max));
    let mut told: Vec<_> = told.collect();
    told.sort_unstable();
    known.sort_unstable();
    told.into_iter().eq(known.iter().map(|short| (short.dimension, short.requested, short.available, short.max)))
}
