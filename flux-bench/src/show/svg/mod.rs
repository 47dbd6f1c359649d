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
use draw::{escape, line, text};

/// A panel with its margins, in pixels, and how many of them stand side by side.
const CELL: (f64, f64) = (430.0, 250.0);
const COLUMNS: usize = 2;
/// Space above the panels, of the head and the legend.
const TOP: f64 = 60.0;
/// The area inside a cell that values are drawn in: left, top, right, bottom.
const AREA: (f64, f64, f64, f64) = (48.0, 34.0, 414.0, 214.0);
/// Height of a line of the legend.
const LEGEND_LINE: f64 = 18.0;
/// Up to here the scale goes for peers' sake; for the op's and the serial path's as far as they do.
const PEERS_SHOWN: f64 = 2.0;
/// As many horizontal lines are drawn at most.
const MAX_STEPS: f64 = 7.0;

const GREY: &str = "#808080";

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
    let (step, ticks) = ticks(extremes(own().chain(drawn())));
    let ms = extremes(report.rows.iter().map(|r| f64::from(r.head.m).log2()));

    let above = TOP + if peers.is_some() { LEGEND_LINE } else { 0.0 };
    let (width, height) =
        (CELL.0 * COLUMNS as f64, above + CELL.1 * panels.len().div_ceil(COLUMNS) as f64);
    let head = escape(&format!("{}: time / T_gemm over m", machine(report)));
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         width=\"{width}\" height=\"{height}\" role=\"img\" font-family=\"system-ui, sans-serif\" \
         font-size=\"12\" fill=\"{GREY}\">\n<title>{head}</title>\n"
    );
    text(&mut out, (AREA.0, 20.0), "start", &head);
    legend(&mut out, &curves);
    for (i, rows) in panels.iter().enumerate() {
        let corner = ((i % COLUMNS) as f64 * CELL.0, above + (i / COLUMNS) as f64 * CELL.1);
        let x = Scale { values: ms, pixels: (corner.0 + AREA.0 + 20.0, corner.0 + AREA.2 - 20.0) };
        let y = Scale {
            values: (f64::from(ticks.0) * step, f64::from(ticks.1) * step),
            pixels: (corner.1 + AREA.3, corner.1 + AREA.1),
        };
        panel(&mut out, corner, (rows, &curves), (&x, &y), (step, ticks));
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

/// A step of 1, 2 or 5 times a power of ten, and its first and last multiple that enclose `low` and
/// `high`.
fn ticks((low, high): (f64, f64)) -> (f64, (i32, i32)) {
    let around = |step: f64| (step, ((low / step).floor() as i32, (high / step).ceil() as i32));
    let steps = (-2..6).flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10_f64.powi(power)));
    let mut fitting =
        steps.map(around).filter(|&(_, (first, last))| f64::from(last - first) <= MAX_STEPS);
    fitting.next().unwrap_or_else(|| around(1e6))
}

fn panel(
    out: &mut String,
    corner: (f64, f64),
    (rows, curves): (&[&Row], &[Curve<'_>]),
    (x, y): (&Scale, &Scale),
    (step, (first, last)): (f64, (i32, i32)),
) {
    let (left, right) = (corner.0 + AREA.0, corner.0 + AREA.2);
    let head = &rows[0].head;
    text(
        out,
        (left, corner.1 + 20.0),
        "start",
        &escape(&format!("{}, {}: n {}, k {}", head.op, head.model, head.n, head.k)),
    );
    let decimals = if step < 0.1 { 2 } else { 1 };
    for tick in first..=last {
        let value = f64::from(tick) * step;
        line(out, (left, y.at(value)), (right, y.at(value)), "stroke-opacity=\".3\"");
        text(out, (left - 6.0, y.at(value) + 4.0), "end", &format!("{value:.decimals$}"));
    }
    line(
        out,
        (left, y.at(1.0)),
        (right, y.at(1.0)),
        "stroke-dasharray=\"5 3\" stroke-width=\"1.5\"",
    );
    for row in rows {
        text(
            out,
            (x.at(f64::from(row.head.m).log2()), corner.1 + AREA.3 + 16.0),
            "middle",
            &row.head.m.to_string(),
        );
    }
    text(out, (left - 6.0, corner.1 + AREA.3 + 16.0), "end", "m");
    // The first of the legend on top of the others.
    for curve in curves.iter().rev() {
        let ratios = || {
            rows.iter()
                .filter_map(|row| Some((x.at(f64::from(row.head.m).log2()), curve.ratio(row)?)))
        };
        let (_, top) = y.values;
        if ratios().next().is_some() {
            draw::curve(out, curve.style, ratios().map(|(x, ratio)| (x, y.at(ratio.min(top)))));
        }
        for (x, ratio) in ratios().filter(|&(_, ratio)| ratio > top) {
            text(out, (x + 7.0, y.at(top) + 4.0), "start", &format!("{ratio:.1}"));
        }
    }
}

/// A line of the op, the serial path and the GEMM, and one of the peers.
fn legend(out: &mut String, curves: &[Curve<'_>]) {
    let (own, peers) = curves.split_at(curves::OWN);
    let y = 40.0;
    let x = entries(out, own, y);
    line(out, (x, y), (x + 24.0, y), "stroke-dasharray=\"5 3\" stroke-width=\"1.5\"");
    text(out, (x + 32.0, y + 4.0), "start", "the GEMM alone: 1.0");
    entries(out, peers, y + LEGEND_LINE);
}

/// Side by side; returns where the next would begin.
fn entries(out: &mut String, curves: &[Curve<'_>], y: f64) -> f64 {
    let mut x = AREA.0;
    for curve in curves {
        draw::curve(out, curve.style, [(x, y), (x + 24.0, y)].into_iter());
        text(out, (x + 32.0, y + 4.0), "start", &curve.name);
        x += 70.0 + 7.0 * curve.name.len() as f64;
    }
    x
}
