//! Parsers of argument values: EMs, engines, times and labels. Caller: clap, for the arguments of the commands.

use std::time::SystemTime;

use prost_types::Timestamp;

use rm_edge::convert::answer;
use rm_model::em::EmInstance;
use rm_proto::v1 as proto;

use super::output::text::EM_APPLICATION;

/// Parses an EM as tables show it: `APPLICATION/INSTANCE`, or the instance alone for Linkis's application.
pub fn em(text: &str) -> Result<proto::EmInstance, String> {
    let (application, instance) = text.split_once('/').unwrap_or((EM_APPLICATION, text));
    let em = EmInstance::parse("EM", application, instance).map_err(|error| error.to_string())?;
    Ok(answer::em_message(&em))
}

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

/// Parses a label: `KEY=VALUE`.
pub fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| format!("{text:?} is not KEY=VALUE"))?;
    Ok((key.to_owned(), value.to_owned()))
}
