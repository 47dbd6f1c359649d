//! Whole layers as bars.
//!
//! Invariant: bars of a card begin at zero and share one scale; whiskers reach from the tenth to the
//! ninetieth percentile. A way of flux is bold, what has no collectives is an outline.

use super::draw::{Point, escape, text};
use super::{Chart, GREY, begin};
use crate::record::{LayerRow, LayersReport};
use crate::report::ms;
use std::fmt::Write as _;

const WIDTH: f64 = 300.0;
/// A bar with its gap.
const LINE: f64 = 20.0;
const BAR: f64 = 12.0;
/// Where bars begin, and how long the longest is with its whisker.
const LEFT: f64 = 110.0;
const LONGEST: f64 = 138.0;
/// Cards side by side in a picture, and the space above each of them there.
const COLUMNS: usize = 3;
const TOP: f64 = 44.0;

const FLUX: &str = "#2f81f7";
const OTHER: &str = "#d9730d";

/// A card for every row.
pub(crate) fn charts(report: &LayersReport) -> Vec<Chart> {
    let chart = |row: &LayerRow| {
        let title = row.label();
        let mut svg = begin((WIDTH, height(row)), &escape(&format!("{title}: milliseconds")));
        card(&mut svg, Point { x: 0.0, y: 0.0 }, row);
        Chart { title, subtitle: gain(row), svg: svg + "</svg>" }
    };
    report.rows.iter().map(chart).collect()
}

/// A picture of all rows.
pub(crate) fn svg(report: &LayersReport) -> String {
    let tallest = report.rows.iter().map(height).fold(0.0, f64::max);
    let lines = report.rows.len().div_ceil(COLUMNS);
    let columns = report.rows.len().min(COLUMNS);
    let size = (WIDTH * columns as f64, 30.0 + (TOP + tallest) * lines as f64);
    let head = escape(&format!(
        "{}, {}, PyTorch {}: milliseconds of a layer",
        report.origin.machine(),
        report.transport,
        report.torch
    ));
    let mut out = begin(size, &head);
    text(&mut out, Point { x: 8.0, y: 20.0 }, "start", &head);
    for (i, row) in report.rows.iter().enumerate() {
        let x = (i % COLUMNS) as f64 * WIDTH;
        let y = 30.0 + (i / COLUMNS) as f64 * (TOP + tallest);
        text(&mut out, Point { x: x + 8.0, y: y + 18.0 }, "start", &bold(&escape(&row.label())));
        text(&mut out, Point { x: x + 8.0, y: y + 35.0 }, "start", &escape(&gain(row)));
        card(&mut out, Point { x, y: y + TOP }, row);
    }
    out + "</svg>\n"
}

fn height(row: &LayerRow) -> f64 {
    LINE * row.ms.len() as f64 + 4.0
}

/// What the fastest way of flux gains over the base.
fn gain(row: &LayerRow) -> String {
    let gain = row.gain().and_then(|(mode, gain)| Some((mode, gain, row.base()?.0)));
    gain.map_or_else(String::new, |(mode, gain, base)| {
        format!("{} {gain:.2}x over {}", LayersReport::title(mode), LayersReport::title(base))
    })
}

fn bold(words: &str) -> String {
    format!("<tspan font-weight=\"600\">{words}</tspan>")
}

fn card(out: &mut String, Point { x, y }: Point, row: &LayerRow) {
    let modes = row.modes();
    let spread = |mode: &str, ms: f64| row.spread.get(mode).copied().unwrap_or([ms, ms]);
    let most = modes.iter().map(|&(mode, ms)| ms.max(spread(mode, ms)[1])).fold(0.0, f64::max);
    let wide = |ms: f64| LONGEST * ms / most;
    for (i, &(mode, time)) in modes.iter().enumerate() {
        let top = y + LINE * i as f64 + 4.0;
        let middle = top + BAR / 2.0;
        let is_flux = LayersReport::is_flux(mode);
        let look = match mode {
            "none" => format!("fill=\"none\" stroke=\"{GREY}\" stroke-dasharray=\"3 2\""),
            _ if is_flux => format!("fill=\"{FLUX}\""),
            _ => format!("fill=\"{OTHER}\" fill-opacity=\".65\""),
        };
        let _ = writeln!(
            out,
            "<rect x=\"{:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{BAR}\" {look}/>",
            x + LEFT,
            wide(time)
        );
        let [low, high] = spread(mode, time).map(wide);
        let _ = writeln!(
            out,
            "<path d=\"M{:.1} {middle:.1}h{:.1}m0 -3v6m-{:.1} 0v-6\" stroke=\"{GREY}\" \
             fill=\"none\"/>",
            x + LEFT + low,
            high - low,
            high - low
        );
        let shown = |words: String| if is_flux { bold(&words) } else { words };
        let title = shown(escape(LayersReport::title(mode)));
        text(out, Point { x: x + LEFT - 6.0, y: middle + 4.0 }, "end", &title);
        let after = Point { x: x + LEFT + wide(time).max(high) + 6.0, y: middle + 4.0 };
        text(out, after, "start", &shown(ms(time)));
    }
}
