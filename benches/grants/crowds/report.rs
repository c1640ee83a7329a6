//! Report of the crowds: a table for display, and a JSON file.

use std::{fs, path::Path, time::Duration};

use serde_json::{Value, json};

use crate::{Failure, machine::Machine, ratios::RatioTarget, report::thousands};

use super::{
    Options,
    findings::{Figure, Findings, Pair, Passes, millis},
    open::Times,
};

pub(super) struct ScenarioReport {
    pub options: Options,
    pub date: String,
    pub duration: Duration,
    pub machine: Option<Machine>,
    pub passed: Vec<(&'static str, Findings)>,
}

impl ScenarioReport {
    /// Returns true if all crowds finished and all stored counters agree.
    pub fn sound(&self) -> bool {
        self.passed.iter().all(|(_, findings)| findings.sound())
    }

    pub fn print(&self) {
        println!("\n{}", self.text());
    }

    pub fn write(&self, path: Option<&Path>) -> Result<(), Failure> {
        let Some(path) = path else { return Ok(()) };
        let text = format!("{:#}\n", self.json());
        fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()).into())
    }

    fn text(&self) -> String {
        let mut text = format!("{:<11} {:<84} {:>11} {:<10}\n", "crowd", "what", "median", "");
        for (crowd, findings) in &self.passed {
            findings.figures.iter().for_each(|figure| text.push_str(&figure_line(crowd, figure)));
        }
        text.push_str(&passes_heading());
        for (crowd, findings) in &self.passed {
            findings.passes.iter().for_each(|passes| text.push_str(&passes_line(crowd, passes)));
        }
        text.push('\n');
        for (crowd, findings) in &self.passed {
            let kinds = [("", &findings.notes), ("UNFINISHED: ", &findings.unfinished), ("WRONG: ", &findings.wrong)];
            for (kind, lines) in kinds {
                lines.iter().for_each(|line| text.push_str(&format!("{crowd:<11} {kind}{line}\n")));
            }
        }
        let (met, wanted) = self.met();
        let (scale, rounds) = (self.options.scale, self.options.rounds);
        let machine = self.machine.as_ref().map(ToString::to_string).unwrap_or_default();
        let minutes = self.duration.as_secs_f64() / 60.0;
        text + &format!(
            "\n{met} of {wanted} are as wanted\n{}, {minutes:.0} min, scale {scale}, {rounds} rounds\n{machine}",
            self.date
        )
    }

    /// Returns how many bounds are met, and how many exist.
    fn met(&self) -> (usize, usize) {
        let figures = self.passed.iter().flat_map(|(_, findings)| &findings.figures).filter_map(Figure::met);
        let passes = self.passed.iter().flat_map(|(_, findings)| &findings.passes).map(Passes::met);
        figures.chain(passes).fold((0, 0), |(met, all), is_met| (met + usize::from(is_met), all + 1))
    }

    fn json(&self) -> Value {
        let crowds = self.passed.iter().map(|(crowd, findings)| {
            json!({
                "crowd": crowd,
                "figures": findings.figures.iter().map(figure).collect::<Vec<_>>(),
                "passes": findings.passes.iter().map(passes).collect::<Vec<_>>(),
                "notes": findings.notes,
                "unfinished": findings.unfinished,
                "wrong": findings.wrong,
            })
        });
        json!({
            "date": self.date,
            "seconds": self.duration.as_secs_f64(),
            "scale": self.options.scale,
            "rounds": self.options.rounds,
            "machine": self.machine,
            "crowds": crowds.collect::<Vec<_>>(),
        })
    }
}

fn figure_line(crowd: &str, figure: &Figure) -> String {
    let mut line = format!("{crowd:<11} {:<84} {:>11} {:<10}", figure.name, number(figure.median()), figure.unit);
    if figure.values.len() > 1 {
        let (least, most) = figure
            .values
            .iter()
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), value| (least.min(*value), most.max(*value)));
        line.push_str(&format!(" {:<19}", format!("({} to {})", number(least), number(most))));
    }
    if let Some((wanted, is_met)) = figure.wanted.zip(figure.met()) {
        line.push_str(&verdict(wanted, is_met));
    }
    format!("{}\n", line.trim_end())
}

fn passes_heading() -> String {
    format!(
        "\n{:<11} {:<62} {:>18} {:>24} {:>9} {:>8} {:>7} {:>6} {:>8}\n",
        "crowd",
        "others meanwhile, ms",
        "calm p50/p99/max",
        "meanwhile p50/p99/max",
        "p99 more",
        "gap",
        "failed",
        "MB",
        "MB more"
    )
}

fn passes_line(crowd: &str, passes: &Passes) -> String {
    let times = |of: fn(&Pair) -> Times| {
        let at = |time: fn(Times) -> Duration| passes.median(|pair| millis(time(of(pair))));
        format!("{:.1}/{:.1}/{:.0}", at(|times| times.p50), at(|times| times.p99), at(|times| times.max))
    };
    let line = format!(
        "{crowd:<11} {:<62} {:>18} {:>24} {:>9.1} {:>8.0} {:>7} {:>6.0} {:>8.0}{}",
        passes.name,
        times(|pair| pair.calm),
        times(|pair| pair.during),
        passes.more(),
        passes.median(|pair| millis(pair.gap)),
        passes.failed(),
        passes.median(|pair| pair.idle),
        passes.median(|pair| pair.peak.unwrap_or(f64::NAN)),
        verdict(Passes::wanted(), passes.met()),
    );
    format!("{}\n", line.trim_end())
}

fn verdict(wanted: RatioTarget, is_met: bool) -> String {
    format!("  wanted {} {:<5} {}", wanted.sign(), number(wanted.bound()), if is_met { "met" } else { "NOT MET" })
}

/// Formats a number with its significant digits.
fn number(value: f64) -> String {
    match value.abs() {
        large if large >= 100.0 || value == value.trunc() => thousands(value),
        middle if middle >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

fn figure(figure: &Figure) -> Value {
    json!({
        "what": figure.name,
        "unit": figure.unit,
        "median": figure.median(),
        "values": figure.values,
        "wanted": figure.wanted.map(|wanted| format!("{} {}", wanted.sign(), wanted.bound())),
        "met": figure.met(),
    })
}

fn passes(passes: &Passes) -> Value {
    let times = |times: Times| {
        let Times { calls, p50, p99, max } = times;
        json!({ "calls": calls, "p50": millis(p50), "p99": millis(p99), "max": millis(max) })
    };
    let pairs = passes.pairs.iter().map(|pair| {
        json!({
            "calm": times(pair.calm),
            "meanwhile": times(pair.during),
            "longest_gap": millis(pair.gap),
            "failed": pair.failed,
            "memory_idle_megabytes": pair.idle,
            "memory_more_megabytes": pair.peak,
        })
    });
    json!({
        "what": passes.name,
        "p99_more": passes.more(),
        "met": passes.met(),
        "pairs": pairs.collect::<Vec<_>>(),
    })
}
