//! Time lines: a row for each worker, with time to the right.
//!
//! Invariant: lengths are times. Coordinates of a rank's rows are nanoseconds since its first
//! worker began, and the number of the row, so that the marks are the data. Phases differ in colour
//! and in place: a product fills its row, an addition the upper half, a result that leaves the
//! lower half, and a wait is a line in the middle.

use super::draw::{Point, escape, text};
use super::{Chart, GREY, Ticks, begin};
use crate::timeline::{self, Call, Worker, percent, total, us};
use flux_core::timeline::{Phase, Track};
use std::fmt::Write as _;
use std::time::Duration;

const WIDTH: f64 = 860.0;
/// Beside the rows.
const SIDE: f64 = 20.0;
/// Above a rank's rows, and below all: a line of text, as large as on a phone.
const LINE: f64 = 30.0;
/// All rows of a call together, and a row of few or many.
const ROWS: f64 = 560.0;
const ROW: [f64; 2] = [1.25, 18.0];

/// How a phase looks: its class, its colour, and the middle and the width of its line in a row.
const fn look(phase: Phase) -> (char, &'static str, &'static str, &'static str) {
    match phase {
        Phase::Wait => ('w', "#cf4a0a", " 0", ".38"),
        Phase::Multiply => ('m', "#2f81f7", " 0", ".92"),
        Phase::Add => ('a', "#a371f7", "-.2", ".5"),
        Phase::Send => ('s', "#1a9e77", " .2", ".5"),
    }
}

/// What the phases are called, as of a worker.
const fn verb(phase: Phase) -> &'static str {
    match phase {
        Phase::Wait => "waits",
        Phase::Multiply => "multiplies",
        Phase::Add => "adds",
        Phase::Send => "stores or sends",
    }
}

/// How times become lengths.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TimeScale {
    /// The right end.
    pub(crate) until: Duration,
    /// Within a column of this width, spans of one phase are drawn as one; zero for none.
    pub(crate) column: Duration,
}

/// The time line as a drawing of its own.
pub(crate) fn chart(call: &Call, scale: TimeScale) -> Chart {
    let title = call.headline();
    let mut svg = begin((WIDTH, height(call)), &escape(&title));
    svg += &style();
    draw(&mut svg, 0.0, call, scale);
    Chart { title, subtitle: call.about.join("; "), svg: svg + "</svg>" }
}

/// A picture of several calls, one above the other.
pub(crate) fn svg(calls: &[(&Call, TimeScale)]) -> String {
    const WORDS: f64 = 18.0;
    let head = |call: &Call| WORDS * (call.about.len() + 2) as f64;
    let tall: f64 = calls.iter().map(|(call, _)| head(call) + height(call)).sum();
    let size = (WIDTH, LINE + tall);
    let mut out = begin(size, "Time lines of calls");
    out += &style();
    for (number, sample) in legend().into_iter().enumerate() {
        let x = SIDE + 130.0 * number as f64;
        let _ = writeln!(out, "<g transform=\"translate({x} 9)\">{}</g>", sample.svg);
        text(&mut out, Point { x: x + 34.0, y: 19.0 }, "start", &sample.title);
    }
    let mut y = LINE;
    for &(call, scale) in calls {
        let title = call.headline();
        let bold = format!("<tspan font-weight=\"600\">{}</tspan>", escape(&title));
        text(&mut out, Point { x: SIDE, y: y + 22.0 }, "start", &bold);
        for (line, words) in (2..).zip(&call.about) {
            let below = Point { x: SIDE, y: y + 4.0 + WORDS * f64::from(line) };
            text(&mut out, below, "start", &escape(words));
        }
        draw(&mut out, y + head(call), call, scale);
        y += head(call) + height(call);
    }
    out + "</svg>\n"
}

/// A sample of each phase, with its name.
pub(crate) fn legend() -> Vec<Chart> {
    let sample = |phase| {
        let (class, _, middle, _) = look(phase);
        let mut svg = begin((26.0, 14.0), verb(phase));
        let _ = write!(
            svg,
            "<svg class=\"rows\" width=\"26\" height=\"14\" viewBox=\"0 -.5 1 1\" \
             preserveAspectRatio=\"none\"><path class=\"{class}\" d=\"M0{middle}h1\"/></svg></svg>"
        );
        Chart { title: verb(phase).to_owned(), subtitle: String::new(), svg }
    };
    Phase::ALL.map(sample).into()
}

fn style() -> String {
    let rule = |phase| {
        let (class, colour, _, width) = look(phase);
        format!(".rows .{class}{{stroke:{colour};stroke-width:{width}}}")
    };
    format!("<style>.rows path{{fill:none}}{}</style>\n", Phase::ALL.map(rule).concat())
}

fn row_height(call: &Call) -> f64 {
    (ROWS / call.workers().max(1) as f64).clamp(ROW[0], ROW[1])
}

fn height(call: &Call) -> f64 {
    LINE * (call.ranks.len() + 1) as f64 + row_height(call) * call.workers() as f64
}

/// The ranks from `top` on, and the axis below.
fn draw(out: &mut String, top: f64, call: &Call, scale: TimeScale) {
    let (wide, mut y) = (WIDTH - 2.0 * SIDE, top);
    let end = top + height(call) - LINE;
    // Long calls are told in milliseconds.
    let (unit, per) =
        if scale.until >= Duration::from_millis(10) { ("ms", 1e6) } else { ("us", 1e3) };
    let until = scale.until.as_nanos().max(1) as f64;
    let ticks = Ticks::enclosing(0.0, until / per);
    for part in (0..=ticks.last).map(|tick| ticks.at(tick) * per / until).filter(|&at| at <= 1.0) {
        let x = SIDE + part * wide;
        let anchor = match part {
            part if part < 0.05 => "start",
            part if part > 0.95 => "end",
            _ => "middle",
        };
        let _ = writeln!(
            out,
            "<path d=\"M{x:.1} {:.1}V{end:.1}\" stroke=\"{GREY}\" stroke-opacity=\".35\"/>\n\
             <text class=\"tick\" data-at=\"{part:.5}\" x=\"{x:.1}\" y=\"{:.1}\" \
             text-anchor=\"{anchor}\">{} {unit}</text>",
            top + 8.0,
            end + 22.0,
            (part * until / per * 100.0).round() / 100.0
        );
    }
    for (rank, workers) in call.ranks.iter().enumerate() {
        let all: Vec<&Worker> = workers.iter().collect();
        let wait = total(&all, Phase::Wait);
        let share = percent(wait, timeline::lives(&all));
        let words = format!("rank {rank}, {} workers: {share:.1} % waiting", all.len());
        text(out, Point { x: SIDE, y: y + 22.0 }, "start", &words);
        let tall = row_height(call) * workers.len() as f64;
        let _ = writeln!(
            out,
            "<svg class=\"rows\" data-rank=\"{rank}\" x=\"{SIDE}\" y=\"{:.1}\" width=\"{wide}\" \
             height=\"{tall:.1}\" viewBox=\"0 0 {until} {}\" preserveAspectRatio=\"none\">",
            y + LINE,
            workers.len()
        );
        let begin = timeline::begin(workers);
        for (number, worker) in workers.iter().enumerate() {
            row(out, number, worker, begin, scale.column);
        }
        *out += "</svg>\n";
        y += LINE + tall;
    }
}

/// A worker's row, with its totals as a title.
fn row(out: &mut String, number: usize, worker: &Worker, begin: Duration, column: Duration) {
    let totals =
        Phase::ALL.map(|phase| format!("{} {} us", verb(phase), us(worker.track.total(phase))));
    let title = escape(&format!("{}: {}", worker.name, totals.join(", ")));
    let _ = write!(out, "<g transform=\"translate(0 {number}.5)\"><title>{title}</title>");
    let mut paths = Phase::ALL.map(|phase| (phase, String::new(), 0));
    for span in coarse(&worker.track, column).spans() {
        let [from, to] =
            [span.begin, span.end].map(|time| time.saturating_sub(begin).as_nanos() as u64);
        for (_, path, end) in paths.iter_mut().filter(|(phase, ..)| *phase == span.phase) {
            let _ = if path.is_empty() {
                write!(path, "M{from}{}h{}", look(span.phase).2, to - from)
            } else {
                write!(path, "m{} 0h{}", from - *end, to - from)
            };
            *end = to;
        }
    }
    for (phase, path, _) in paths.iter().filter(|(_, path, _)| !path.is_empty()) {
        let _ = write!(out, "<path class=\"{}\" d=\"{path}\"/>", look(*phase).0);
    }
    *out += "</g>\n";
}

/// The track with one span for each phase in each column; the total of every phase is the same.
fn coarse(track: &Track, column: Duration) -> Track {
    let column = column.as_nanos() as u64;
    if column == 0 {
        return track.clone();
    }
    let mut coarse = Track::new(track.begin());
    // The column in progress: phases by their first span in it.
    let mut cell: Vec<(Phase, Duration)> = Vec::new();
    for span in track.spans() {
        let [mut from, to] = [span.begin, span.end].map(|time| time.as_nanos() as u64);
        while from < to {
            let until = to.min((from / column + 1) * column);
            let time = Duration::from_nanos(until - from);
            match cell.iter_mut().find(|(phase, _)| *phase == span.phase) {
                Some((_, sum)) => *sum += time,
                None => cell.push((span.phase, time)),
            }
            from = until;
            if from % column == 0 {
                flush(&mut coarse, &mut cell);
                // Whole columns at once.
                let whole = to / column * column;
                if whole > from {
                    coarse.until(span.phase, Duration::from_nanos(whole));
                    from = whole;
                }
            }
        }
    }
    flush(&mut coarse, &mut cell);
    coarse
}

/// Ends a column. A phase that the column before ends with comes first.
fn flush(track: &mut Track, cell: &mut Vec<(Phase, Duration)>) {
    let last = track.spans().last().map(|span| span.phase);
    cell.sort_by_key(|&(phase, _)| Some(phase) != last);
    for (phase, time) in cell.drain(..) {
        track.until(phase, track.end() + time);
    }
}
