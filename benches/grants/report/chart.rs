//! SVG chart of the ratios: a bar for each, as a fraction of its bound, and a line at the bound. Readable on light and
//! dark pages.

use std::fmt::Write as _;

use crate::ratios::{Ratio, RatioTarget};

use super::{Report, ratio};

const WIDTH: f64 = 860.0;
const NAMES: f64 = 350.0;
/// Length of a bar that equals its bound.
const WANTED: f64 = 200.0;
/// Maximum length of a bar, as a multiple of the bound. Longer bars end in an arrow.
const PARTS_MAX: f64 = 2.0;
const TOP: f64 = 64.0;
const ROW: f64 = 22.0;
const BAR: f64 = 14.0;
/// Height of a text line below the bars.
const FOOT: f64 = 18.0;

const STYLE: &str = "
  text { font: 12px system-ui, sans-serif; fill: #24292f }
  .title { font-size: 15px; font-weight: 600 }
  .small { font-size: 11px; fill: #57606a }
  .page { fill: #ffffff }
  .met { fill: #1a7f37 }
  .missed { fill: #cf222e }
  .wanted { stroke: #24292f; stroke-dasharray: 4 3 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .small { fill: #9198a1 }
    .page { fill: #0d1117 }
    .met { fill: #3fb950 }
    .missed { fill: #f85149 }
    .wanted { stroke: #e6edf3 }
  }
";

pub(super) fn render(report: &Report<'_>) -> String {
    let wanted: Vec<(&Ratio, RatioTarget)> =
        report.ratios.iter().filter_map(|ratio| ratio.wanted.map(|wanted| (ratio, wanted))).collect();
    let bottom = TOP + ROW * wanted.len() as f64;
    let machine = report.machine.to_string();
    let height = bottom + FOOT * (machine.lines().count() + 1) as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
         role=\"img\">\n<title>linkis-rm: what is wanted, and what was measured</title>\n<style>{STYLE}</style>\n\
         <rect class=\"page\" width=\"100%\" height=\"100%\"/>\n"
    );
    text(&mut svg, 16.0, 26.0, "title", "linkis-rm: measured, as a part of what is wanted");
    text(&mut svg, NAMES + WANTED - 22.0, TOP - 12.0, "small", "wanted");
    for (number, (ratio, wanted)) in wanted.into_iter().enumerate() {
        bar(&mut svg, TOP + ROW * number as f64, ratio, wanted);
    }
    let x = NAMES + WANTED;
    // Writing to a string does not fail.
    let _ = writeln!(svg, "<line class=\"wanted\" x1=\"{x}\" x2=\"{x}\" y1=\"{}\" y2=\"{bottom}\"/>", TOP - 6.0);
    for (number, line) in machine.lines().enumerate() {
        text(&mut svg, 16.0, bottom + FOOT * (number as f64 + 1.0), "small", line);
    }
    text(&mut svg, WIDTH - 150.0, 26.0, "small", &report.date);
    svg + "</svg>\n"
}

fn bar(svg: &mut String, top: f64, of: &Ratio, wanted: RatioTarget) {
    let parts = (of.value / wanted.bound()).max(0.0);
    let length = parts.min(PARTS_MAX) * WANTED;
    let class = if of.met() == Some(true) { "met" } else { "missed" };
    text(svg, 16.0, top + 11.0, "", &of.name);
    let _ = writeln!(svg, "<rect class=\"{class}\" x=\"{NAMES}\" y=\"{top}\" width=\"{length:.1}\" height=\"{BAR}\"/>");
    let end = NAMES + length;
    if parts > PARTS_MAX {
        let (middle, bottom) = (top + BAR / 2.0, top + BAR);
        let tip = end + 8.0;
        let _ = writeln!(svg, "<path class=\"{class}\" d=\"M{end} {top} L{tip} {middle} L{end} {bottom} Z\"/>");
    }
    let label = format!("{} ({} {})", ratio(of.value), wanted.sign(), wanted.bound());
    // To the right of the line, so that the line does not cross the number.
    text(svg, end.max(NAMES + WANTED) + 12.0, top + 11.0, "small", &label);
}

fn text(svg: &mut String, x: f64, y: f64, class: &str, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(svg, "<text class=\"{class}\" x=\"{x}\" y=\"{y}\">{text}</text>");
}
