//! Parsers of argument values: names, engines, times and labels. Caller: clap, for the arguments of the commands.

use std::time::SystemTime;

use prost_types::Timestamp;

use rm_proto::v1 as proto;

use super::output::text::parse_name;

/// Parses an engine: `APPLICATION/INSTANCE`, or the instance alone for Linkis's application.
pub fn engine(text: &str) -> Result<proto::EngineInstance, String> {
    let (application_name, instance) = text.split_once('/').unwrap_or(("linkis-cg-engineconn", text));
    Ok(proto::EngineInstance { application_name: application_name.to_owned(), instance: instance.to_owned() })
}

/// Parses a time: RFC 3339, or a duration before now, such as `90m` or `7d`.
pub fn time(text: &str) -> Result<Timestamp, String> {
    let at = match humantime::parse_duration(text) {
        Ok(ago) => SystemTime::now().checked_sub(ago),
        Err(_) => humantime::parse_rfc3339_weak(text).ok(),
    };
    let wrong =
        || format!("{text:?} is neither a time like 2026-11-22T08:00:00Z nor a duration before now, like 90m or 7d");
    at.map(Timestamp::from).ok_or_else(wrong)
}

/// Parses a name as tables show it.
#[expect(clippy::unnecessary_wraps, reason = "a value parser")]
pub fn name(text: &str) -> Result<String, String> {
    Ok(parse_name(text))
}

/// Parses a label: `KEY=VALUE`.
pub fn label(text: &str) -> Result<(String, String), String> {
    let text = parse_name(text);
    let (key, value) = text.split_once('=').ok_or_else(|| format!("{text:?} is not KEY=VALUE"))?;
    Ok((key.to_owned(), value.to_owned()))
}
