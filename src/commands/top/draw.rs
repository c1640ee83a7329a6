//! Rendering of `top`: lines of a terminal from the cluster feed and the view state. Pure functions.
//!
//! Invariant: a line is never wider than the terminal and contains no control characters.

use rm_proto::v1::{DimensionTotals, ScopeUsage, WaitingRequest};

use super::super::{
    ems::{DimensionUse, percent},
    output::{
        terminal::TerminalSize,
        text::{self, clean, cut, width},
    },
    overview, scopes,
};
use super::state::{ClusterFeed, TopEm, ViewState, ems};

/// Style of a piece of a line, if the terminal has colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// Default style.
    Plain,
    /// A heading.
    Title,
    /// A healthy state, or low use.
    Good,
    /// High use.
    Warn,
    /// Full, or an unhealthy state.
    Bad,
}

/// Styled pieces of one line, together at most as wide as the terminal.
pub type StyledLine = Vec<(Style, String)>;

/// Content of the terminal, and the number of visible EMs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScreenFrame {
    /// Lines, at most as many as the terminal has.
    pub lines: Vec<StyledLine>,
    /// Number of lines for EMs.
    pub page: usize,
}

/// Returns the number of scopes and of waiting requests to show on a terminal with `rows` lines.
fn shares_of(rows: usize) -> (usize, usize) {
    match rows {
        0..=19 => (2, 1),
        20..=29 => (4, 3),
        30..=39 => (6, 5),
        _ => (10, 8),
    }
}

/// Renders the screen.
pub fn draw(cluster: &ClusterFeed, look: &mut ViewState, size: TerminalSize) -> ScreenFrame {
    let TerminalSize { columns, rows } = size;
    let mut lines = Vec::with_capacity(rows);
    head(cluster, columns, &mut lines);
    let (most_scopes, most_waiting) = shares_of(rows);
    scopes_lines(cluster, columns, most_scopes, &mut lines);
    queue_lines(cluster, columns, most_waiting, &mut lines);
    // The last line shows the keys.
    let page = rows.saturating_sub(lines.len() + 2);
    em_lines(cluster, look, columns, page, &mut lines);
    lines.truncate(rows.saturating_sub(1));
    lines.resize(rows.saturating_sub(1), StyledLine::new());
    lines.push(keys(look, columns));
    lines.truncate(rows);
    ScreenFrame { lines, page }
}

/// Returns a text shortened to the width.
fn plain(text: &str, columns: usize) -> StyledLine {
    vec![(Style::Plain, cut(&clean(text), columns).into_owned())]
}

fn title(text: &str, columns: usize) -> StyledLine {
    vec![(Style::Title, cut(text, columns).into_owned())]
}

fn style_of(percent: i64) -> Style {
    match percent {
        ..70 => Style::Good,
        70..90 => Style::Warn,
        _ => Style::Bad,
    }
}

/// Returns `[####++..]`: used, locked and free.
fn bar(used: i64, locked: i64, max: i64, columns: usize) -> StyledLine {
    let room = columns.saturating_sub(2);
    let full = percent(used.saturating_add(locked), max).unwrap_or(0);
    let part = |amount: i64| {
        let (amount, max) = (i128::from(amount.max(0)), i128::from(max.max(1)));
        usize::try_from((amount * i128::try_from(room).unwrap_or(0) + max / 2) / max).unwrap_or(room).min(room)
    };
    let held = if max > 0 { part(used.saturating_add(locked)) } else { 0 };
    let used = if max > 0 { part(used).min(held) } else { 0 };
    let filled = "#".repeat(used) + &"+".repeat(held - used);
    let free = ".".repeat(room - held);
    let style = style_of(full);
    vec![(Style::Plain, "[".to_owned()), (style, filled), (Style::Plain, free + "]")]
}

/// Renders the totals of the cluster.
fn head(cluster: &ClusterFeed, columns: usize, lines: &mut Vec<StyledLine>) {
    let overview = &cluster.overview;
    let at = text::time(overview.snapshot_time.as_ref());
    lines.push(match &cluster.problem {
        Some(problem) => {
            vec![(Style::Bad, cut(&clean(&format!("{at}, no update since: {problem}")), columns).into_owned())]
        }
        None => title(&format!("linkis-rm  {at}  {}", clean(&cluster.address)), columns),
    });
    let tickets = overview::tickets_text(&overview.tickets.clone().unwrap_or_default());
    let line = overview::line_text(&overview.line.unwrap_or_default());
    let rates = overview.throughput.unwrap_or_default();
    let (grants, refusals) = (rates.grants_per_second, rates.refusals_per_second);
    lines.push(plain(&format!("EMs      {}", overview::ems_text(overview)), columns));
    lines.push(plain(&format!("tickets  {tickets}   waiting {line}"), columns));
    lines.push(plain(&format!("rates    {grants:.1} grants/s  {refusals:.1} refusals/s"), columns));
    let totals = overview::totals(overview);
    // Dimensions that all EMs of Linkis have come first.
    let order = |key: &str| ["memory", "cores", "instances"].iter().position(|known| *known == key).unwrap_or(3);
    let mut totals: Vec<_> = totals.into_iter().collect();
    totals.sort_by_key(|(dimension, _)| order(dimension));
    totals.truncate(TOTALS_MAX);
    let numbers: Vec<String> = totals.iter().map(|(dimension, totals)| numbers(dimension, totals)).collect();
    let widest = numbers.iter().map(|numbers| width(numbers)).max().unwrap_or(0);
    let room = columns.saturating_sub(15 + widest).min(60);
    for ((dimension, totals), numbers) in totals.into_iter().zip(numbers) {
        let mut line = vec![(Style::Plain, padded(short(dimension), 14))];
        if room >= 6 {
            line.extend(bar(totals.used, totals.locked, grantable(&totals), room));
        }
        line.push((Style::Plain, numbers));
        lines.push(fit(line, columns));
    }
}

/// Maximum number of dimensions with a bar.
const TOTALS_MAX: usize = 5;

fn grantable(totals: &DimensionTotals) -> i64 {
    totals.total.saturating_sub(totals.protected_amount)
}

fn numbers(dimension: &str, totals: &DimensionTotals) -> String {
    let shown = |amount| text::amount_by_key(dimension, amount);
    let full = overview::fullness(totals).map_or_else(String::new, |full| format!(" {full}%"));
    format!("{full} {} used, {} locked of {}", shown(totals.used), shown(totals.locked), shown(grantable(totals)))
}

/// Returns the key of a dimension without the prefix of custom ones, to save columns.
fn short(key: &str) -> &str {
    key.strip_prefix("special.").unwrap_or(key)
}

/// Returns a name padded to a width, and one blank.
fn padded(name: &str, columns: usize) -> String {
    let name = cut(&clean(name), columns).into_owned();
    let blanks = " ".repeat(columns.saturating_sub(width(&name)) + 1);
    name + &blanks
}

/// Joins as many texts as fit unshortened; the first one may be shortened.
fn whole(texts: impl IntoIterator<Item = String>, columns: usize) -> String {
    let mut line = String::new();
    for text in texts {
        let text = clean(&text).into_owned();
        match width(&line) + width(&text) {
            _ if line.is_empty() => line = cut(&text, columns).into_owned(),
            both if both <= columns => line.push_str(&text),
            _ => break,
        }
    }
    line
}

/// Shortens a line to the width of the terminal.
fn fit(line: StyledLine, columns: usize) -> StyledLine {
    let mut left = columns;
    let mut fitting = StyledLine::new();
    for (style, text) in line {
        let text = cut(&text, left).into_owned();
        left -= width(&text).min(left);
        fitting.push((style, text));
    }
    fitting
}

fn scopes_lines(cluster: &ClusterFeed, columns: usize, most: usize, lines: &mut Vec<StyledLine>) {
    let fullest = cluster.overview.scopes.as_ref().map(|scopes| scopes.fullest.as_slice()).unwrap_or_default();
    let mut shown: Vec<StyledLine> = fullest.iter().filter_map(|scope| scope_line(scope, columns)).take(most).collect();
    if shown.is_empty() {
        return;
    }
    lines.push(title("FULLEST SCOPES", columns));
    lines.append(&mut shown);
}

/// Renders a scope in its fullest dimension.
fn scope_line(scope: &ScopeUsage, columns: usize) -> Option<StyledLine> {
    let of = |amounts: &std::collections::BTreeMap<String, i64>, key: &str| amounts.get(key).copied().unwrap_or(0);
    let maxima = scopes::maxima(scope);
    let held = |key: &str| of(&scope.used, key).saturating_add(of(&scope.locked, key));
    let (full, key, max) = maxima
        .iter()
        .filter_map(|(key, (max, _))| Some((percent(held(key), *max)?, *key, *max)))
        .max_by_key(|of| of.0)?;
    let shown = |amount| text::amount_by_key(key, amount);
    let numbers = format!(" {full:>3}% {} {} of {}", short(key), shown(held(key)), shown(max));
    let bar_columns = if columns >= 100 { 22 } else { 12 };
    let name_columns = columns.saturating_sub(bar_columns + 1).min(columns / 3).max(8);
    let name = cut(&clean(&text::labels(&scope.labels)), name_columns).into_owned();
    let mut line =
        vec![(Style::Plain, format!("{name}{} ", " ".repeat(name_columns - width(&name).min(name_columns))))];
    line.extend(bar(of(&scope.used, key), of(&scope.locked, key), max, bar_columns));
    line.push((style_of(full), numbers));
    Some(fit(line, columns))
}

fn queue_lines(cluster: &ClusterFeed, columns: usize, most: usize, lines: &mut Vec<StyledLine>) {
    if cluster.line.is_empty() {
        return;
    }
    lines.push(title("WAIT QUEUE", columns));
    lines.extend(cluster.line.iter().take(most).map(|waiting| waiting_text(waiting, columns)));
}

fn waiting_text(waiting: &WaitingRequest, columns: usize) -> StyledLine {
    let position = waiting.entries.iter().map(|entry| entry.ahead).max().unwrap_or(0).saturating_add(1);
    let since = text::time(waiting.waiting_since.as_ref());
    let since = since.get(11..19).unwrap_or(&since);
    let mut texts = vec![
        format!("{position:>4}  {}/{}", waiting.user, waiting.creator),
        format!("  since {since}"),
        format!("  {}", text::resource(waiting.resource.as_ref())),
    ];
    texts.extend(waiting.entries.iter().map(|entry| format!("  short: {}", entry.scope)));
    vec![(Style::Plain, whole(texts, columns))]
}

fn em_lines(cluster: &ClusterFeed, look: &mut ViewState, columns: usize, page: usize, lines: &mut Vec<StyledLine>) {
    let ems = ems(cluster, look);
    look.offset = look.offset.min(ems.len().saturating_sub(page.max(1)));
    let order = if look.is_reversed { ", reversed" } else { "" };
    let first = if ems.is_empty() { 0 } else { look.offset + 1 };
    let last = ems.len().min(look.offset + page);
    let more = if cluster.has_more_ems { " or more" } else { "" };
    lines.push(title(&format!("EMS {first}-{last} of {}{more}, by {}{order}", ems.len(), look.sort.as_str()), columns));
    let names = ems.iter().map(|em| width(&clean(&em.name))).max().unwrap_or(0).clamp(8, (columns / 3).max(8));
    let seen = || ems.iter().skip(look.offset).take(page);
    let states = seen().map(|em| width(&em.state)).max().unwrap_or(0);
    lines.extend(seen().map(|em| em_line(em, names, states, columns)));
}

fn em_line(em: &TopEm<'_>, names: usize, states: usize, columns: usize) -> StyledLine {
    let fullest = em.shares.iter().max_by_key(|share| share.percent().unwrap_or(0));
    let bar_columns = if columns >= 100 { 32 } else { 16 };
    let mut line = vec![(Style::Plain, padded(&em.name, names))];
    line.extend(match fullest {
        Some(share) => bar(share.used, share.locked, share.max, bar_columns),
        None => bar(0, 0, 0, bar_columns),
    });
    let full = em.fullness();
    line.push((style_of(full), format!(" {full:>3}% ")));
    let is_well = matches!(em.state.as_str(), "healthy" | "unreported");
    line.push((if is_well { Style::Plain } else { Style::Bad }, padded(&em.state, states)));
    let shown = |share: &DimensionUse| {
        let amount = |amount| text::amount(&share.dimension, amount);
        format!(" {} {}/{}", share.dimension.name(), amount(share.held()), amount(share.max))
    };
    let taken: usize = line.iter().map(|(_, text)| width(text)).sum();
    line.push((Style::Plain, whole(em.shares.iter().map(shown), columns.saturating_sub(taken))));
    fit(line, columns)
}

fn keys(look: &ViewState, columns: usize) -> StyledLine {
    let filter = clean(&look.filter);
    let text = match (look.is_typing, look.filter.is_empty()) {
        (true, _) => format!("/{filter}_   enter: keep  esc: clear"),
        (false, false) => format!("only /{filter}   esc: clear  s: sort  r: reverse  q: quit"),
        (false, true) => "s: sort  r: reverse  /: filter  arrows, space: scroll  q: quit".to_owned(),
    };
    title(&text, columns)
}

#[cfg(test)]
#[path = "draw_tests.rs"]
mod tests;
