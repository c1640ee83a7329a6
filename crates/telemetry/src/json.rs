//! Log lines as JSON objects with `timestamp`, `level`, `target`, `message` and the fields of the event.
//!
//! Replaces the format of the library, which logs an error without its causes. Caller: [`super::start`].

use std::{error::Error, fmt};

use tracing::{
    Event, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    fmt::{
        FmtContext, FormatEvent, FormatFields,
        format::Writer,
        time::{FormatTime as _, SystemTime},
    },
    registry::LookupSpan,
};

use super::with_causes;

/// Format of an event as one line of JSON.
#[derive(Debug, Clone, Copy)]
pub(super) struct JsonFormat;

impl<S, N> FormatEvent<S, N> for JsonFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let metadata = event.metadata();
        writer.write_str("{\"timestamp\":\"")?;
        SystemTime.format_time(&mut writer)?;
        write!(writer, "\",\"level\":\"{}\",\"target\":{}", metadata.level(), JsonText(metadata.target()))?;
        let mut fields = JsonFields { writer: &mut writer, written: Ok(()) };
        event.record(&mut fields);
        fields.written?;
        writer.write_str("}\n")
    }
}

/// Writes a line with the number of dropped lines before it as the member `left_out`.
pub(super) fn left_out(left_out: u64, line: &str, writer: &mut Writer<'_>) -> fmt::Result {
    write!(writer, "{{\"left_out\":{left_out},{}", line.strip_prefix('{').unwrap_or(line))
}

/// Visitor that writes each field as a member of the object.
struct JsonFields<'a, 'writer> {
    writer: &'a mut Writer<'writer>,
    written: fmt::Result,
}

impl JsonFields<'_, '_> {
    fn member(&mut self, field: &Field, value: impl fmt::Display) {
        if self.written.is_ok() {
            self.written = write!(self.writer, ",{}:{value}", JsonText(field.name()));
        }
    }
}

impl Visit for JsonFields<'_, '_> {
    fn record_f64(&mut self, field: &Field, value: f64) {
        match value.is_finite() {
            true => self.member(field, value),
            false => self.member(field, JsonText(&value.to_string())),
        }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.member(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.member(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.member(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.member(field, JsonText(value));
    }

    fn record_error(&mut self, field: &Field, value: &(dyn Error + 'static)) {
        self.member(field, JsonText(&with_causes(value)));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.member(field, JsonText(&format!("{value:?}")));
    }
}

/// A text as a quoted JSON string.
struct JsonText<'a>(&'a str);

impl fmt::Display for JsonText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self.0).map_err(|_| fmt::Error)?)
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use serde_json::{Value, json};

    use super::*;
    use crate::rate_limit::{RateLimitedFormat, tests::CapturedLines};

    #[derive(Debug, thiserror::Error)]
    #[error("the database cannot be used")]
    struct UnreachableWriter(#[source] io::Error);

    #[test]
    fn json_line_with_any_text_is_one_object() {
        let lines = CapturedLines::default();
        let to = lines.clone();
        let logs = tracing_subscriber::fmt().with_writer(move || to.clone());
        let logs = logs.event_format(RateLimitedFormat::new(JsonFormat, left_out)).finish();
        tracing::subscriber::with_default(logs, || {
            let error = UnreachableWriter(io::Error::other("connection \"refused\"\n"));
            let error: &(dyn Error + 'static) = &error;
            let (user, nothing) = ("<img src=x>\u{1b}[31m\"\\", None::<&str>);
            tracing::error!(error, user, nothing, share = f64::NAN, count = 3_u64, is_open = true, key = ?("a", 1), "it failed");
        });
        let text = lines.text();
        let line: Value = serde_json::from_str(&text).unwrap();
        let mut members = line.as_object().unwrap().clone();
        let time = members.remove("timestamp").unwrap();
        assert!(time.as_str().unwrap().ends_with('Z'), "{time}");
        assert!(text.starts_with("{\"timestamp\":") && text.lines().count() == 1, "{text}");
        let expected = json!({
            "level": "ERROR", "target": "rm_telemetry::json::tests", "message": "it failed",
            "error": "the database cannot be used: connection \"refused\"\n", "user": "<img src=x>\u{1b}[31m\"\\",
            "share": "NaN", "count": 3, "is_open": true, "key": "(\"a\", 1)",
        });
        assert_eq!(Value::Object(members), expected);
    }

    #[test]
    fn json_line_states_count_of_dropped_lines() {
        let mut text = String::new();
        left_out(7, "{\"level\":\"WARN\"}\n", &mut Writer::new(&mut text)).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), json!({"left_out": 7, "level": "WARN"}));
    }
}
