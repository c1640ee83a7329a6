//! Rate limit of warnings and errors: many callers can cause the same line many times.
//!
//! The limit is per place in the code. A line after dropped ones states their number. Caller: [`super::start`].

use std::{
    collections::HashMap,
    fmt,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use tracing::{Event, Level, Subscriber, callsite::Identifier};
use tracing_subscriber::{
    fmt::{FmtContext, FormatEvent, FormatFields, format::Writer},
    registry::LookupSpan,
};

/// Maximum number of lines of one kind (one place in the code) per [`WITHIN`].
const PASSED_MAX: u32 = 20;

/// Period of [`PASSED_MAX`].
const WITHIN: Duration = Duration::from_secs(10);

/// Writes a line after a statement of the number of dropped lines before it.
pub(super) type SkippedLineWriter = fn(u64, &str, &mut Writer<'_>) -> fmt::Result;

/// Writes the number of dropped lines as a line of text before the line.
pub(super) fn left_out(left_out: u64, line: &str, writer: &mut Writer<'_>) -> fmt::Result {
    write!(writer, "({left_out} lines like the next one were dropped)\n{line}")
}

/// Formats events as `F` does. Drops warnings and errors of one kind above the limit; the next line of the kind states
/// how many were dropped.
#[derive(Debug)]
pub(super) struct RateLimitedFormat<F> {
    format: F,
    left_out: SkippedLineWriter,
    kinds: Mutex<HashMap<Identifier, EventKind>>,
}

/// Line count of one kind.
#[derive(Debug)]
struct EventKind {
    since: Instant,
    passed: u32,
    left_out: u64,
}

impl<F> RateLimitedFormat<F> {
    /// Creates a rate-limited format. `left_out` writes the number of dropped lines.
    pub fn new(format: F, left_out: SkippedLineWriter) -> Self {
        Self { format, left_out, kinds: Mutex::default() }
    }

    fn pass(&self, kind: Identifier, now: Instant) -> Option<u64> {
        let mut kinds = self.kinds.lock().unwrap_or_else(PoisonError::into_inner);
        kinds.entry(kind).or_insert_with(|| EventKind::new(now)).pass(now)
    }
}

impl EventKind {
    fn new(now: Instant) -> Self {
        Self { since: now, passed: 0, left_out: 0 }
    }

    /// Counts one more line at `now`. Returns the number of dropped lines before it, or `None` if the line is to be
    /// dropped.
    fn pass(&mut self, now: Instant) -> Option<u64> {
        if now.saturating_duration_since(self.since) >= WITHIN {
            (self.since, self.passed) = (now, 0);
        }
        if self.passed >= PASSED_MAX {
            self.left_out += 1;
            return None;
        }
        self.passed += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

impl<S, N, F> FormatEvent<S, N> for RateLimitedFormat<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let metadata = event.metadata();
        if *metadata.level() <= Level::WARN {
            match self.pass(metadata.callsite(), Instant::now()) {
                None => return Ok(()),
                Some(0) => {}
                Some(left_out) => {
                    let mut line = String::new();
                    self.format.format_event(context, Writer::new(&mut line), event)?;
                    return (self.left_out)(left_out, &line, &mut writer);
                }
            }
        }
        self.format.format_event(context, writer, event)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::{io, sync::Arc};

    use tracing_subscriber::fmt::format::Format;

    use super::*;

    #[derive(Clone, Default)]
    pub(crate) struct CapturedLines(Arc<Mutex<Vec<u8>>>);

    impl CapturedLines {
        pub(crate) fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl io::Write for CapturedLines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn rate_limit_bounds_one_kind_and_passes_others() {
        let lines = CapturedLines::default();
        let to = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || to.clone())
            .event_format(RateLimitedFormat::new(Format::default().without_time(), left_out))
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            for number in 0..10_000 {
                tracing::error!(number, "the database is away");
                tracing::info!(number, "served");
            }
            tracing::warn!("something else");
        });
        let text = lines.text();
        let count = |of: &str| text.lines().filter(|line| line.contains(of)).count();
        assert_eq!((count("the database is away"), count("served"), count("something else")), (20, 10_000, 1));
    }

    #[test]
    fn rate_limit_counts_dropped_lines() {
        let start = Instant::now();
        let mut kind = EventKind::new(start);
        assert_eq!((0..PASSED_MAX + 2).filter_map(|_| kind.pass(start)).count(), 20);
        assert_eq!([kind.pass(start + WITHIN), kind.pass(start + WITHIN)], [Some(2), Some(0)]);
    }
}
