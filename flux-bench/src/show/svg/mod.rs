//! A report as a picture.
//!
//! Invariant: a time is drawn as a multiple of its own row's `T_gemm`, on one scale for all panels,
//! so that 1.0 is the GEMM alone everywhere. Peers above the scale are drawn at its upper end, with
//! their value. No colour is near black or white: pictures stand on either.

mod curves;
mod draw;

use super::{extremes, machine};
use crate::report::PeersReport;
use crate::report::{Report, Row};
use curves::Curve;
use draw::{Point, escape, line, text};

/// A panel with its margins, in pixels, and how many of them stand side by side.
const CELL: Point = Point { x: 430.0, y: 250.0 };
const COLUMNS: usize = 2;
/// Space above the panels, of the head and the legend.
const TOP: f64 = 60.0;
/// The area inside a cell that values are drawn in: its corners on the left above and on the right
/// below.
const BEGIN: Point = Point { x: 48.0, y: 34.0 };
const END: Point = Point { x: 414.0, y: 214.0 };
/// Height of a line of the legend.
const LEGEND_LINE: f64 = 18.0;
/// Up to here the scale goes for peers' sake; for the op's and the serial path's as far as they do.
const PEERS_SHOWN: f64 = 2.0;
/// As many horizontal lines are drawn at most.
const MAX_STEPS: f64 = 7.0;

const GREY: &str = "#808080";
const DASHED: &str = "stroke-dasharray=\"5 3\" stroke-width=\"1.5\"";

/// A linear map of values to pixels.
struct Scale {
    low: f64,
    high: f64,
    /// Pixels of both.
    ends: [f64; 2],
}

impl Scale {
    /// Where `value` lies; in the middle where there is but one value.
    fn at(&self, value: f64) -> f64 {
        let &Self { low, high, ends: [start, end] } = self;
        let part = if high > low { (value - low) / (high - low) } else { 0.5 };
        start + part * (end - start)
    }
}

/// Horizontal lines at multiples of a step.
#[derive(Clone, Copy)]
struct Ticks {
    step: f64,
    first: i32,
    last: i32,
}

/// The picture, a panel for every op and model; with what peers took, where it is known.
pub fn svg(report: &Report, peers: Option<&PeersReport>) -> String {
    let panels = panels(&report.rows);
    let curves = curves::of(report, peers);
    let own = || {
        report
            .rows
            .iter()
            .flat_map(|r| [r.t_op_ms, r.t_serial_ms].map(|t| t.median / r.t_gemm_ms.median))
            .chain([1.0])
    };
    let (_, highest) = extremes(own());
    let top = if peers.is_some() { highest.max(PEERS_SHOWN) } else { highest };
    let drawn = || {
        curves
            .iter()
            .flat_map(|c| report.rows.iter().filter_map(|r| c.ratio(r)))
            .map(|ratio| ratio.min(top))
    };
    let (low, high) = extremes(own().chain(drawn()));
    let ticks = Ticks::enclosing(low, high);
    let (fewest, most) = extremes(report.rows.iter().map(|r| f64::from(r.head.m).log2()));

    let above = TOP + if peers.is_some() { LEGEND_LINE } else { 0.0 };
    let (width, height) =
        (CELL.x * COLUMNS as f64, above + CELL.y * panels.len().div_ceil(COLUMNS) as f64);
    let head = escape(&format!("{}: time / T_gemm over m", machine(report)));
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         width=\"{width}\" height=\"{height}\" role=\"img\" font-family=\"system-ui, sans-serif\" \
         font-size=\"12\" fill=\"{GREY}\">\n<title>{head}</title>\n"
    );
    text(&mut out, Point { x: BEGIN.x, y: 20.0 }, "start", &head);
    legend(&mut out, &curves);
    for (i, rows) in panels.iter().enumerate() {
        let corner =
            Point { x: (i % COLUMNS) as f64 * CELL.x, y: above + (i / COLUMNS) as f64 * CELL.y };
        let x = Scale {
            low: fewest,
            high: most,
            ends: [corner.x + BEGIN.x + 20.0, corner.x + END.x - 20.0],
        };
        let y = Scale {
            low: ticks.at(ticks.first),
            high: ticks.at(ticks.last),
            ends: [corner.y + END.y, corner.y + BEGIN.y],
        };
        Panel { corner, rows, curves: &curves, x, y, ticks }.draw(&mut out);
    }
    out.push_str("</svg>\n");
    out
}

/// The rows of each op and shape but for `m`, by rising `m`, in the report's order.
fn panels(rows: &[Row]) -> Vec<Vec<&Row>> {
    let key = |r: &Row| (r.head.op.clone(), r.head.model.clone(), r.head.n, r.head.k);
    let mut panels: Vec<Vec<&Row>> = Vec::new();
    for row in rows {
        match panels.iter_mut().find(|p| key(p[0]) == key(row)) {
            Some(panel) => panel.push(row),
            None => panels.push(vec![row]),
        }
    }
    for panel in &mut panels {
        panel.sort_by_key(|r| r.head.m);
    }
    panels
}

impl Ticks {
    /// With a step of 1, 2 or 5 times a power of ten, whose multiples enclose `low` and `high`.
    fn enclosing(low: f64, high: f64) -> Self {
        let around = |step: f64| Self {
            step,
            first: (low / step).floor() as i32,
            last: (high / step).ceil() as i32,
        };
        let steps =
            (-2..6).flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10_f64.powi(power)));
        let mut fitting =
            steps.map(around).filter(|ticks| f64::from(ticks.last - ticks.first) <= MAX_STEPS);
        fitting.next().unwrap_or_else(|| around(1e6))
    }

    fn at(self, number: i32) -> f64 {
        f64::from(number) * self.step
    }
}

/// The rows of an op and shape, drawn from a corner on.
struct Panel<'a> {
    corner: Point,
    rows: &'a [&'a Row],
    curves: &'a [Curve<'a>],
    x: Scale,
    y: Scale,
    ticks: Ticks,
}

impl Panel<'_> {
    fn draw(&self, out: &mut String) {
        let Self { corner, rows, curves, x, y, ticks } = self;
        let (left, right) = (corner.x + BEGIN.x, corner.x + END.x);
        let head = &rows[0].head;
        text(
            out,
            Point { x: left, y: corner.y + 20.0 },
            "start",
            &escape(&format!("{}, {}: n {}, k {}", head.op, head.model, head.n, head.k)),
        );
        let decimals = if ticks.step < 0.1 { 2 } else { 1 };
        for tick in ticks.first..=ticks.last {
            let value = ticks.at(tick);
            let at = y.at(value);
            line(out, Point { x: left, y: at }, right, "stroke-opacity=\".3\"");
            let below = Point { x: left - 6.0, y: at + 4.0 };
            text(out, below, "end", &format!("{value:.decimals$}"));
        }
        line(out, Point { x: left, y: y.at(1.0) }, right, DASHED);
        let below = corner.y + END.y + 16.0;
        let of_m = |row: &Row| x.at(f64::from(row.head.m).log2());
        for row in *rows {
            text(out, Point { x: of_m(row), y: below }, "middle", &row.head.m.to_string());
        }
        text(out, Point { x: left - 6.0, y: below }, "end", "m");
        // The first of the legend on top of the others.
        for curve in curves.iter().rev() {
            let ratios = || rows.iter().filter_map(|row| Some((of_m(row), curve.ratio(row)?)));
            let top = y.high;
            if ratios().next().is_some() {
                let points = ratios().map(|(x, ratio)| Point { x, y: y.at(ratio.min(top)) });
                draw::curve(out, curve.style, points);
            }
            for (x, ratio) in ratios().filter(|&(_, ratio)| ratio > top) {
                let beside = Point { x: x + 7.0, y: y.at(top) + 4.0 };
                text(out, beside, "start", &format!("{ratio:.1}"));
            }
        }
    }
}

/// A line of the op, the serial path and the GEMM, and one of the peers.
fn legend(out: &mut String, curves: &[Curve<'_>]) {
    let (own, peers) = curves.split_at(curves::OWN);
    let y = 40.0;
    let x = entries(out, own, y);
    line(out, Point { x, y }, x + 24.0, DASHED);
    text(out, Point { x: x + 32.0, y: y + 4.0 }, "start", "the GEMM alone: 1.0");
    entries(out, peers, y + LEGEND_LINE);
}

/// Side by side; returns where the next would begin.
fn entries(out: &mut String, curves: &[Curve<'_>], y: f64) -> f64 {
    let mut x = BEGIN.x;
    for curve in curves {
        let ends = [x, x + 24.0].map(|x| Point { x, y });
        draw::curve(out, curve.style, ends.into_iter());
        text(out, Point { x: x + 32.0, y: y + 4.0 }, "start", &curve.name);
        x += 70.0 + 7.0 * curve.name.len() as f64;
    }
    x
}
