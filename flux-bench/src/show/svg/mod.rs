//! A report as a picture.
//!
//! Invariant: a time is drawn as a multiple of its own row's `T_gemm`, on one scale for all panels,
//! so that 1.0 is the GEMM alone everywhere. Peers above the scale are drawn at its upper end,
//! under the value of the least. No colour is near black or white: pictures stand on either.

mod bars;
mod curves;
mod draw;
mod timeline;

pub(crate) use bars::{charts as layer_charts, svg as layers};
pub(crate) use draw::escape;
pub(crate) use timeline::{
    TimeScale, chart as timeline_chart, legend as timeline_legend, svg as timelines,
};

use super::{extremes, machine};
use crate::report::{PeersReport, Report, Row, efficiency};
use curves::Curve;
use draw::{Point, bar, line, text};

/// A panel with its margins, in pixels, and how many of them stand side by side.
const CELL: Point = Point { x: 430.0, y: 316.0 };
const COLUMNS: usize = 2;
/// Space above the panels, of the head and the legend.
const TOP: f64 = 60.0;
/// The area inside a cell that values are drawn in: its corners on the left above and on the right
/// below.
const BEGIN: Point = Point { x: 48.0, y: 34.0 };
const END: Point = Point { x: 414.0, y: 214.0 };
/// Below the area, for overlap efficiencies: the base of their bars, and the height of 100 %.
const BARS: f64 = 74.0;
const WHOLE: f64 = 32.0;
/// Bars end here, in parts of the whole.
const BARS_SHOWN: f64 = 1.25;
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

/// A drawing of its own, with what stands above it.
pub(crate) struct Chart {
    pub(crate) title: String,
    pub(crate) subtitle: String,
    pub(crate) svg: String,
}

/// What all panels of a record share.
struct Frame<'a> {
    curves: Vec<Curve<'a>>,
    ticks: Ticks,
    /// Logarithms of the fewest and of the most rows.
    m: (f64, f64),
}

impl<'a> Frame<'a> {
    fn of(report: &Report, peers: Option<&'a PeersReport>) -> Self {
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
        Self { ticks, m: extremes(report.rows.iter().map(|r| f64::from(r.head.m).log2())), curves }
    }

    fn panel<'p>(&'p self, corner: Point, rows: &'p [&'p Row]) -> Panel<'p> {
        let ends = [corner.x + BEGIN.x + 20.0, corner.x + END.x - 20.0];
        let x = Scale { low: self.m.0, high: self.m.1, ends };
        let y = Scale {
            low: self.ticks.at(self.ticks.first),
            high: self.ticks.at(self.ticks.last),
            ends: [corner.y + END.y, corner.y + BEGIN.y],
        };
        Panel { corner, rows, curves: &self.curves, x, y, ticks: self.ticks }
    }
}

/// What begins a drawing.
fn begin((width, height): (f64, f64), title: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         width=\"{width}\" height=\"{height}\" role=\"img\" font-family=\"system-ui, sans-serif\" \
         font-size=\"12\" fill=\"{GREY}\">\n<title>{title}</title>\n"
    )
}

/// The picture, a panel for every op and model; with what peers took, where it is known.
pub(super) fn svg(report: &Report, peers: Option<&PeersReport>) -> String {
    let panels = panels(&report.rows);
    let frame = Frame::of(report, peers);
    let above = TOP + if peers.is_some() { LEGEND_LINE } else { 0.0 };
    let size = (CELL.x * COLUMNS as f64, above + CELL.y * panels.len().div_ceil(COLUMNS) as f64);
    let head = escape(&format!("{}: time / T_gemm over m", machine(report)));
    let mut out = begin(size, &head);
    text(&mut out, Point { x: BEGIN.x, y: 20.0 }, "start", &head);
    legend(&mut out, &frame.curves);
    for (i, rows) in panels.iter().enumerate() {
        let corner =
            Point { x: (i % COLUMNS) as f64 * CELL.x, y: above + (i / COLUMNS) as f64 * CELL.y };
        let panel = frame.panel(corner, rows);
        let title = escape(&format!("{}, {}: {}", panel.op(), panel.model(), panel.extents()));
        text(&mut out, Point { x: corner.x + BEGIN.x, y: corner.y + 10.0 }, "start", &title);
        panel.draw(&mut out);
    }
    out.push_str("</svg>\n");
    out
}

/// The panels as drawings of their own, without titles.
pub(crate) fn charts(report: &Report, peers: Option<&PeersReport>) -> Vec<Chart> {
    const CUT: f64 = 14.0;
    let frame = Frame::of(report, peers);
    let panels = panels(&report.rows);
    let charts = panels.iter().map(|rows| {
        let panel = frame.panel(Point { x: 0.0, y: -CUT }, rows);
        let title = format!("{}, {}", panel.op(), panel.model());
        let mut svg =
            begin((CELL.x, CELL.y - CUT), &escape(&format!("{title}: time / T_gemm over m")));
        panel.draw(&mut svg);
        Chart { title, subtitle: panel.extents(), svg: svg + "</svg>" }
    });
    charts.collect()
}

/// The curves' samples with their names, the GEMM alone last.
pub(crate) fn legends(report: &Report, peers: Option<&PeersReport>) -> Vec<Chart> {
    const WIDTH: f64 = 30.0;
    let sample = |title: &str, draw: &dyn Fn(&mut String)| {
        let mut svg = begin((WIDTH, 12.0), &escape(title));
        draw(&mut svg);
        Chart { title: title.to_owned(), subtitle: String::new(), svg: svg + "</svg>" }
    };
    let mut all: Vec<Chart> = curves::of(report, peers)
        .iter()
        .map(|curve| {
            let ends = [4.0, WIDTH - 4.0].map(|x| Point { x, y: 6.0 });
            sample(&curve.name, &|out| draw::curve(out, curve.style, ends.into_iter()))
        })
        .collect();
    all.push(sample("the GEMM alone, 1.0", &|out| {
        line(out, Point { x: 0.0, y: 6.0 }, WIDTH, DASHED);
    }));
    all
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
    fn op(&self) -> &str {
        match self.rows[0].head.op.as_str() {
            "ag_gemm" => "AllGather-GEMM",
            "gemm_rs" => "GEMM-ReduceScatter",
            "gemm_ar" => "GEMM-AllReduce",
            other => other,
        }
    }

    fn model(&self) -> &str {
        &self.rows[0].head.model
    }

    fn extents(&self) -> String {
        format!("n {}, k {}", self.rows[0].head.n, self.rows[0].head.k)
    }

    fn draw(&self, out: &mut String) {
        let Self { corner, rows, curves, x, y, ticks } = self;
        let (left, right) = (corner.x + BEGIN.x, corner.x + END.x);
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
        // Of those above the scale the least, which flux is nearest to.
        for row in *rows {
            let above = curves.iter().filter_map(|curve| curve.ratio(row)).filter(|&r| r > y.high);
            let least = above.fold(f64::INFINITY, f64::min);
            if least.is_finite() {
                let over = Point { x: of_m(row), y: y.at(y.high) - 7.0 };
                text(out, over, "middle", &format!("{least:.1}"));
            }
        }
        let base = corner.y + END.y + BARS;
        line(out, Point { x: left, y: base }, right, "stroke-opacity=\".5\"");
        line(out, Point { x: left, y: base - WHOLE }, right, "stroke-opacity=\".3\"");
        for row in *rows {
            let x = of_m(row);
            let percent = efficiency(row, 0);
            if let Ok(height) = percent.parse::<f64>() {
                let height = (height / 100.0).clamp(0.0, BARS_SHOWN) * WHOLE;
                bar(out, Point { x: x - 5.0, y: base - height }, (10.0, height), curves[0].style);
            }
            text(out, Point { x, y: base + 16.0 }, "middle", &percent);
        }
        text(out, Point { x: left - 6.0, y: base + 16.0 }, "end", "E %");
        // The first of the legend on top of the others.
        for curve in curves.iter().rev() {
            let ratios = || rows.iter().filter_map(|row| Some((of_m(row), curve.ratio(row)?)));
            if ratios().next().is_some() {
                let points = ratios().map(|(x, ratio)| Point { x, y: y.at(ratio.min(y.high)) });
                draw::curve(out, curve.style, points);
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
