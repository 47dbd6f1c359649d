//! A report as a picture.
//!
//! Invariant: a time is drawn as a multiple of its own row's `T_gemm`, and all panels have one scale, so that heights compare across panels
//! and 1.0 is the GEMM alone everywhere. Nothing lies behind the panels, and no colour is near black or white: they stand on either.

use super::machine;
use crate::report::{Report, Row};
use std::fmt::Write as _;

/// A panel with its margins, in pixels, and how many of them stand side by side.
const CELL: (f64, f64) = (430.0, 250.0);
const COLUMNS: usize = 2;
/// Space above the panels, of the head and the legend.
const TOP: f64 = 60.0;
/// The area inside a cell that values are drawn in: left, top, right, bottom.
const AREA: (f64, f64, f64, f64) = (48.0, 34.0, 414.0, 214.0);
/// As many horizontal lines are drawn at most.
const MAX_STEPS: f64 = 7.0;

const GREY: &str = "#808080";

/// What is drawn of a row.
struct Curve {
    colour: &'static str,
    /// The op's points are round, the serial path's square: they are told apart without their colours.
    round: bool,
    ratio: fn(&Row) -> f64,
}

const OP: Curve = Curve { colour: "#2f81f7", round: true, ratio: |r| r.t_op_ms.median / r.t_gemm_ms.median };
const SERIAL: Curve = Curve { colour: "#d9730d", round: false, ratio: |r| r.t_serial_ms.median / r.t_gemm_ms.median };

/// A linear map of values to pixels.
struct Scale {
    values: (f64, f64),
    pixels: (f64, f64),
}

impl Scale {
    /// Where `value` lies; in the middle where there is but one value.
    fn at(&self, value: f64) -> f64 {
        let ((low, high), (start, end)) = (self.values, self.pixels);
        let part = if high > low { (value - low) / (high - low) } else { 0.5 };
        start + part * (end - start)
    }
}

/// The picture, a panel for every op and model.
pub fn svg(report: &Report) -> String {
    let panels = panels(&report.rows);
    let ratios = || report.rows.iter().flat_map(|r| [1.0, (OP.ratio)(r), (SERIAL.ratio)(r)]);
    let (step, ticks) = ticks(ratios().fold(f64::INFINITY, f64::min), ratios().fold(f64::NEG_INFINITY, f64::max));
    let logs = || report.rows.iter().map(|r| f64::from(r.m).log2());
    let ms = (logs().fold(f64::INFINITY, f64::min), logs().fold(f64::NEG_INFINITY, f64::max));

    let (width, height) = (CELL.0 * COLUMNS as f64, TOP + CELL.1 * panels.len().div_ceil(COLUMNS) as f64);
    let head = escape(&format!("{}: time / T_gemm over m", machine(report)));
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" role=\"img\" \
         font-family=\"system-ui, sans-serif\" font-size=\"12\" fill=\"{GREY}\">\n<title>{head}</title>\n"
    );
    text(&mut out, (AREA.0, 20.0), "start", &head);
    legend(&mut out, report.nccl.is_some());
    for (i, rows) in panels.iter().enumerate() {
        let corner = ((i % COLUMNS) as f64 * CELL.0, TOP + (i / COLUMNS) as f64 * CELL.1);
        let x = Scale { values: ms, pixels: (corner.0 + AREA.0 + 20.0, corner.0 + AREA.2 - 20.0) };
        let y = Scale { values: (f64::from(ticks.0) * step, f64::from(ticks.1) * step), pixels: (corner.1 + AREA.3, corner.1 + AREA.1) };
        panel(&mut out, corner, rows, (&x, &y), (step, ticks));
    }
    out.push_str("</svg>\n");
    out
}

/// The rows of each op and shape but for `m`, by rising `m`, in the report's order.
fn panels(rows: &[Row]) -> Vec<Vec<&Row>> {
    let key = |r: &Row| (r.op.clone(), r.model.clone(), r.n, r.k);
    let mut panels: Vec<Vec<&Row>> = Vec::new();
    for row in rows {
        match panels.iter_mut().find(|p| key(p[0]) == key(row)) {
            Some(panel) => panel.push(row),
            None => panels.push(vec![row]),
        }
    }
    for panel in &mut panels {
        panel.sort_by_key(|r| r.m);
    }
    panels
}

/// A step of 1, 2 or 5 times a power of ten, and its first and last multiple that enclose `low` and `high`.
fn ticks(low: f64, high: f64) -> (f64, (i32, i32)) {
    let around = |step: f64| (step, ((low / step).floor() as i32, (high / step).ceil() as i32));
    let steps = (-2..6).flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10_f64.powi(power)));
    let mut fitting = steps.map(around).filter(|&(_, (first, last))| f64::from(last - first) <= MAX_STEPS);
    fitting.next().unwrap_or_else(|| around(1e6))
}

fn panel(out: &mut String, corner: (f64, f64), rows: &[&Row], (x, y): (&Scale, &Scale), (step, (first, last)): (f64, (i32, i32))) {
    let (left, right) = (corner.0 + AREA.0, corner.0 + AREA.2);
    let row = rows[0];
    text(out, (left, corner.1 + 20.0), "start", &escape(&format!("{}, {}: n {}, k {}", row.op, row.model, row.n, row.k)));
    let decimals = if step < 0.1 { 2 } else { 1 };
    for tick in first..=last {
        let value = f64::from(tick) * step;
        line(out, (left, y.at(value)), (right, y.at(value)), "stroke-opacity=\".3\"");
        text(out, (left - 6.0, y.at(value) + 4.0), "end", &format!("{value:.decimals$}"));
    }
    line(out, (left, y.at(1.0)), (right, y.at(1.0)), "stroke-dasharray=\"5 3\" stroke-width=\"1.5\"");
    for row in rows {
        text(out, (x.at(f64::from(row.m).log2()), corner.1 + AREA.3 + 16.0), "middle", &row.m.to_string());
    }
    text(out, (left - 6.0, corner.1 + AREA.3 + 16.0), "end", "m");
    for curve in [SERIAL, OP] {
        draw(out, &curve, rows.iter().map(|row| (x.at(f64::from(row.m).log2()), y.at((curve.ratio)(row)))));
    }
}

fn legend(out: &mut String, nccl: bool) {
    let y = 40.0;
    let serial = if nccl { "serial (NCCL + cuBLASLt)" } else { "serial (collective + GEMM)" };
    let mut x = AREA.0;
    for (curve, name) in [(OP, "fused op"), (SERIAL, serial)] {
        draw(out, &curve, [(x, y), (x + 24.0, y)].into_iter());
        text(out, (x + 32.0, y + 4.0), "start", name);
        x += 70.0 + 7.0 * name.len() as f64;
    }
    line(out, (x, y), (x + 24.0, y), "stroke-dasharray=\"5 3\" stroke-width=\"1.5\"");
    text(out, (x + 32.0, y + 4.0), "start", "the GEMM alone: 1.0");
}

/// The points and the line through them.
fn draw(out: &mut String, curve: &Curve, points: impl Iterator<Item = (f64, f64)>) {
    let colour = curve.colour;
    let mut path = String::new();
    for (x, y) in points {
        let _ = write!(path, "{}{x:.1},{y:.1}", if path.is_empty() { "" } else { " " });
        let _ = if curve.round {
            writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"{colour}\"/>")
        } else {
            writeln!(out, "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"6\" height=\"6\" fill=\"{colour}\"/>", x - 3.0, y - 3.0)
        };
    }
    let _ = writeln!(out, "<polyline points=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>");
}

fn line(out: &mut String, from: (f64, f64), to: (f64, f64), style: &str) {
    let ((x1, y1), (x2, y2)) = (from, to);
    let _ = writeln!(out, "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{GREY}\" {style}/>");
}

/// `content` is markup already.
fn text(out: &mut String, (x, y): (f64, f64), anchor: &str, content: &str) {
    let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{content}</text>");
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
