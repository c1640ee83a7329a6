//! `limit get`, `set`, `delete`: one limit, named by its labels.
//!
//! What a change replaces is shown and confirmed. The confirmed state is the replaced state, or nothing is changed.

use std::collections::BTreeMap;

use clap::{Args, ValueEnum};

use rm_client::calls;
use rm_edge::convert;
use rm_model::{limit::LabelPattern, scope::RESERVED};
use rm_proto::v1::{
    DeleteLimitRequest, Limit, LimitMode, LimitState, ListLimitsRequest, SetLimitRequest, SetLimitResponse,
};

use super::{COLUMNS, PAGE, maximum_and_guarantee, name, over, row};
use crate::commands::{
    amounts::{self, Amounts},
    consent::{Confirmation, Consent},
    error::{CommandFailure, CommandReply},
    output::{
        Format, json,
        table::details,
        text::{self, parse_name},
    },
    scopes,
    service::{ServiceClient, TIMEOUT, TIMEOUT_LONG},
    service_arguments::ServiceArguments,
};

/// Arguments of `limit get`.
#[derive(Debug, Clone, Args)]
pub struct GetLimitCommand {
    /// Labels of the limit: user=hadoop, or user=hadoop,creator=IDE; "each user" if every user has the maximum of its own.
    #[arg(required = true, value_name = "LABELS")]
    labels: Vec<String>,

    #[command(flatten)]
    arguments: ServiceArguments,
}

/// Effect of a limit above its maximum.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Mode {
    Enforced,
    Advisory,
    Off,
}

/// Arguments of `limit set`.
#[derive(Debug, Clone, Args)]
pub struct SetLimitCommand {
    /// Labels of the limit: user=hadoop, or user=hadoop,creator=IDE for both together; "each user" gives every user the same
    /// maximum of its own.
    #[arg(required = true, value_name = "LABELS")]
    labels: Vec<String>,

    /// Maxima, as in instances=2,memory=20g. A dimension that is not named has no maximum any more.
    #[arg(long, value_name = "AMOUNTS", value_parser = amounts::parse, required_unless_present_any = ["mode", "guarantee"])]
    max: Option<Amounts>,

    /// Guarantee, as in instances=1: within it, waiting requests go before all others. instances=0 removes it [default: as it is].
    #[arg(long, value_name = "AMOUNTS", value_parser = amounts::parse)]
    guarantee: Option<Amounts>,

    /// Effect above the maximum [default: as it is, enforced for a new limit].
    #[arg(long, value_enum)]
    mode: Option<Mode>,

    /// Reason, for the history.
    #[arg(long)]
    reason: Option<String>,

    #[command(flatten)]
    confirmation: Confirmation,

    #[command(flatten)]
    arguments: ServiceArguments,
}

/// Arguments of `limit delete`.
#[derive(Debug, Clone, Args)]
pub struct DeleteLimitCommand {
    /// Labels of the limit, as limit list prints them: user=hadoop, or "each user".
    #[arg(required = true, value_name = "LABELS")]
    labels: Vec<String>,

    #[command(flatten)]
    consent: Consent,

    #[command(flatten)]
    arguments: ServiceArguments,
}

/// Returns a limit with these labels: `KEY=VALUE`, `each KEY`, or the name of a label that requests cannot set, several with commas.
///
/// # Errors
/// [`CommandFailure::Usage`] if a label has two values.
pub fn labelled(labels: &[String]) -> Result<Limit, CommandFailure> {
    let mut limit = Limit::default();
    for part in labels.iter().flat_map(|labels| labels.split(',')) {
        match part.split_once('=') {
            Some((key, value)) => {
                let key = parse_name(key.trim());
                if limit.labels.insert(key.clone(), parse_name(value)).is_some() {
                    return Err(CommandFailure::Usage(format!(
                        "LABELS: {key} has two values: each needs a rule of its own"
                    )));
                }
            }
            None if part.trim() == "each" => {
                let label = labels.iter().find(|label| *label != "each").map_or("user", String::as_str);
                let advice = format!("write \"each {label}\" with its label, in quotes");
                return Err(CommandFailure::Usage(format!("LABELS: each names no label; {advice}")));
            }
            // A word alone is a label of every ticket; any other may be a value, or a mistyped label.
            None if !part.trim().starts_with("each ") && (labels.len() > 1 || !RESERVED.contains(&part.trim())) => {
                let advice = format!("write LABEL=VALUE, or \"each {}\" in quotes for each of its values", part.trim());
                return Err(CommandFailure::Usage(format!("LABELS: {part:?} has no value; {advice}")));
            }
            None => {
                let part = part.trim();
                limit.each.push(parse_name(part.strip_prefix("each ").unwrap_or(part)));
            }
        }
    }
    Ok(limit)
}

/// Returns the stored limit with these labels.
async fn find(service: &ServiceClient, pattern: &LabelPattern) -> Result<Option<Limit>, CommandFailure> {
    let mut question = ListLimitsRequest { page_size: PAGE, ..Default::default() };
    loop {
        let page = service.make(&calls::LIST_LIMITS, &question).await?;
        let is_it = |limit: &Limit| convert::limit::pattern("limit", limit).is_ok_and(|known| known == *pattern);
        match page.limits.into_iter().find(is_it) {
            Some(limit) => return Ok(Some(limit)),
            None if page.next_page_token.is_empty() => return Ok(None),
            None => question.page_token = page.next_page_token,
        }
    }
}

/// Returns the maxima and the mode of a limit, and its last change if it is known.
fn described(limit: &Limit) -> String {
    let mut words = vec![maximum_and_guarantee(limit)];
    words.extend(Some(scopes::mode(limit).to_owned()).filter(|mode| mode != "enforced"));
    if let Some(time) = &limit.update_time {
        words.push(format!("set {} by {}", text::time(Some(time)), text::name(&limit.updated_by)));
    }
    words.join("  ")
}

impl GetLimitCommand {
    /// Prints the limit.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let named = labelled(&self.labels)?;
        let pattern = convert::limit::pattern("LABELS", &named)?;
        let found = find(&self.arguments.service(TIMEOUT)?, &pattern).await?;
        let Some(limit) = found else {
            return Err(missing(&named));
        };
        let mut printer = self.arguments.printer();
        let item = json::items_of(&json::answer_of(&calls::LIST_LIMITS)?, "limits")?;
        let text = match printer.format() {
            Format::Table | Format::Wide => details(COLUMNS, &row(&limit)),
            Format::Json => json::pretty(&item, &limit, 0)? + "\n",
            Format::Jsonl => json::line(&item, &limit)? + "\n",
        };
        printer.print(&text)?;
        Ok(CommandReply::Yes)
    }
}

impl SetLimitCommand {
    /// Shows what the limit replaces, and sets it.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let mut limit = labelled(&self.labels)?;
        let pattern = convert::limit::pattern("LABELS", &limit)?;
        let service = self.arguments.service(TIMEOUT_LONG)?;
        let before = find(&service, &pattern).await?;
        let mode = match (self.mode, &before) {
            (Some(Mode::Enforced), _) => LimitMode::Enforced,
            (Some(Mode::Advisory), _) => LimitMode::Advisory,
            (Some(Mode::Off), _) => LimitMode::Off,
            (None, Some(before)) => before.mode(),
            (None, None) => LimitMode::Enforced,
        };
        limit.set_mode(mode);
        let amounts = |set: &Option<Amounts>, of: fn(&Limit) -> &BTreeMap<String, i64>| match (set, &before) {
            (Some(set), _) => set.by_key(),
            (None, before) => before.as_ref().map(|before| of(before).clone()).unwrap_or_default(),
        };
        limit.max = amounts(&self.max, |before| &before.max);
        limit.guarantee = amounts(&self.guarantee, |before| &before.guarantee);
        limit.guarantee.retain(|_, amount| *amount != 0);
        if before.is_none() && self.max.is_none() && self.guarantee.is_some() {
            return Err(CommandFailure::Usage("--guarantee: a new limit needs --max, too".to_owned()));
        }
        let is_bare = |dimension: &&String| !limit.max.contains_key(*dimension);
        if let Some(dimension) = limit.guarantee.keys().find(is_bare).filter(|_| self.guarantee.is_none()) {
            let problem = format!("--max: replaces all maxima, and the guarantee of {dimension} needs one");
            return Err(CommandFailure::Usage(format!("{problem}; name it, too, or set --guarantee {dimension}=0")));
        }
        convert::limit::new_rule("limit", Some(&limit))?;
        if let Some(before) = &before {
            let (now, new) = (described(before), described(&limit));
            self.confirmation.confirm(&format!("{}\n  now  {now}\n  new  {new}\nChange it?", name(&limit)))?;
        }
        let expected_etag = Some(before.as_ref().map(|before| before.etag.clone()).unwrap_or_default());
        let reason = self.reason.unwrap_or_default();
        let question = SetLimitRequest { limit: Some(limit.clone()), expected_etag, reason };
        let reply = service.make_slowly("setting the limit", &calls::SET_LIMIT, &question).await?;
        let done = if before.is_some() { "changed" } else { "set" };
        self.arguments.printer().answer(&calls::SET_LIMIT, &reply, || set_text(&limit, done, &reply))?;
        Ok(CommandReply::Yes)
    }
}

/// Describes a set limit, and the scopes above it.
fn set_text(limit: &Limit, done: &str, reply: &SetLimitResponse) -> String {
    let mut text = format!("{done} the limit {}: {}\n", name(limit), described(limit));
    for scope in &reply.over_limit {
        let over = over(scope, "; nothing ends, new requests are refused");
        text.push_str(&format!("over its limit: {over}\n"));
    }
    if reply.state() == LimitState::Counting {
        text.push_str("tickets are still being counted: linkis-rm limit list shows which limits decide\n");
    }
    text
}

fn missing(limit: &Limit) -> CommandFailure {
    CommandFailure::Refused(format!("there is no limit {}; linkis-rm limit list has all", name(limit)))
}

impl DeleteLimitCommand {
    /// Shows the limit, and deletes it.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let limit = labelled(&self.labels)?;
        let pattern = convert::limit::pattern("LABELS", &limit)?;
        let service = self.arguments.service(TIMEOUT)?;
        let (expected_etag, shown) = match self.consent.is_interactive() {
            true => match find(&service, &pattern).await? {
                Some(before) => (Some(before.etag.clone()), format!(", {}", described(&before))),
                None => return Err(missing(&limit)),
            },
            false => (None, String::new()),
        };
        let reason = self.consent.confirm(&format!("Delete the limit {}{shown}?", name(&limit)))?;
        let deleted = limit.clone();
        let question = DeleteLimitRequest { limit: Some(limit), expected_etag, reason };
        let answer = service.make(&calls::DELETE_LIMIT, &question).await?;
        self.arguments
            .printer()
            .answer(&calls::DELETE_LIMIT, &answer, || format!("deleted the limit {}\n", name(&deleted)))?;
        Ok(CommandReply::Yes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_read_as_limits_print_them() {
        for (labels, shown) in [
            (&["user=hadoop"][..], "user=hadoop"),
            (&["creator=IDE,user=hadoop"], "creator=IDE,user=hadoop"),
            (&["each user"], "each user"),
            (&["user"], "each user"),
            (&["creator=IDE,each user"], "creator=IDE,each user"),
            (&["user=hadoop", "each creator"], "each creator,user=hadoop"),
            (&["team=data science"], "team=data science"),
            (&["team=a\\u{2c}b"], "team=a,b"),
        ] {
            let labels: Vec<String> = labels.iter().map(|label| (*label).to_owned()).collect();
            let pattern = convert::limit::pattern("LABELS", &labelled(&labels).unwrap()).unwrap();
            assert_eq!(pattern.to_string(), shown);
        }
        for wrong in ["", "user=a,user=b", "hadoop", "user:hadoop"] {
            assert!(labelled(&[wrong.to_owned()]).is_err(), "{wrong}");
        }
        assert!(labelled(&["user=hadoop", "creator"].map(str::to_owned)).is_err());
    }
}
