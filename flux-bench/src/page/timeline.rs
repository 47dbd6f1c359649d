//! Time lines of calls as a page that needs nothing else.
//!
//! Invariant: what is drawn of a phase is as long as its spans together, however coarse the picture
//! is, and the exposed wait of the title is the sum of the waits that are drawn.

use super::html::{self, Cell, Column, Html};
use crate::show::{TimeScale, timeline_chart, timeline_legend, timelines};
use crate::timeline::{Call, Worker, lives, percent, total, us};
use crate::{atomic_file, report};
use anyhow::Context;
use flux_core::timeline::Phase;
use std::path::{Path, PathBuf};
use std::time::Duration;

const SCRIPT: &str = include_str!("timeline.js");
/// A page's bytes, at most.
const BYTES: usize = 2 << 20;
/// Columns of a picture that is too large with every span, at least and at most.
const COLUMNS: [u32; 2] = [1 << 3, 1 << 12];
/// Columns of a picture of its own, which is not enlarged.
const PICTURE_COLUMNS: u32 = 2048;
/// Calls share a scale where none is so many times as long as another.
const ALIKE: u32 = 4;

/// Where time lines are drawn.
#[derive(Clone, Debug, clap::Args)]
#[group(id = "drawn", multiple = true)]
pub(crate) struct Drawings {
    /// Write the time line to this file, as a page of HTML that needs nothing else
    #[arg(long, value_name = "FILE.html")]
    html: Option<PathBuf>,
    /// Write the time line to this file, as a picture
    #[arg(long, value_name = "FILE.svg")]
    svg: Option<PathBuf>,
}

impl Drawings {
    /// Whether there is nothing to draw.
    pub(crate) const fn is_empty(&self) -> bool {
        self.html.is_none() && self.svg.is_none()
    }

    /// Whether the files can be written, before time is spent on what they show.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        Ok([&self.html, &self.svg]
            .into_iter()
            .flatten()
            .try_for_each(|path| atomic_file::check(path))?)
    }

    /// Writes the files.
    pub(crate) fn write(&self, calls: &[Call]) -> anyhow::Result<()> {
        let write = |path: &Path, drawing: &str| {
            atomic_file::write(path, |w| w.write_all(drawing.as_bytes()))
        };
        if let Some(path) = &self.html {
            write(path, &page(calls)?)?;
        }
        if let Some(path) = &self.svg {
            let scales = scales(calls, longest(calls) / PICTURE_COLUMNS);
            write(path, &timelines(&calls.iter().zip(scales).collect::<Vec<_>>()))?;
        }
        Ok(())
    }
}

/// The page of calls, of one kind or measured and simulated.
///
/// # Errors
/// There are too many workers and calls for a page.
pub(crate) fn page(calls: &[Call]) -> anyhow::Result<String> {
    let exact = document(calls, Duration::ZERO);
    if exact.len() <= BYTES {
        return Ok(exact);
    }
    let longest = longest(calls);
    let columns = (COLUMNS[0].ilog2()..=COLUMNS[1].ilog2()).map(|bits| 1_u32 << bits);
    let pages = columns.map(|columns| document(calls, longest / columns));
    let last = pages.take_while(|page| page.len() <= BYTES).last();
    last.with_context(|| {
        let workers: usize = calls.iter().map(Call::workers).sum();
        let calls = calls.len();
        format!("{workers} workers of {calls} calls do not fit a page of 2 MiB: show fewer calls")
    })
}

/// The scale of each call, with columns of one width at most.
fn scales(calls: &[Call], column: Duration) -> Vec<TimeScale> {
    let longest = longest(calls);
    let alike = calls.iter().all(|call| longest <= call.length() * ALIKE);
    let until = |call: &Call| if alike { longest } else { call.length() };
    calls.iter().map(|call| TimeScale { until: until(call), column }).collect()
}

fn longest(calls: &[Call]) -> Duration {
    calls.iter().map(Call::length).max().unwrap_or_default()
}

fn document(calls: &[Call], column: Duration) -> String {
    let title = match calls {
        [] => String::new(),
        [call] => call.headline(),
        [call, more @ ..] => format!("{}, and {} more", call.headline(), more.len()),
    };
    let mut intro = Html::default();
    intro.paragraph(
        "lede",
        "A row is a worker: a CTA of the kernel on its SM, or a thread of the host. Time goes to \
         the right. Loads, stores and messages under a product are hidden, and not drawn. Waits \
         that no product hides are the exposed wait.",
    );
    intro.paragraph(
        "origin",
        &format!("`{}` at commit `{}`.", report::command_line(), report::commit()),
    );
    let mut lines = Html::default();
    lines.legend(&timeline_legend());
    for (call, scale) in calls.iter().zip(scales(calls, column)) {
        lines.charts("timeline", call.workers(), &[timeline_chart(call, scale)]);
    }
    let (mut numbers, mut method) = (Html::default(), Html::default());
    table(&mut numbers, calls);
    method.paragraph("", &resolution(column));
    method.list(&METHOD);
    let mut page = Html::default();
    page.section("line", "Time line", &lines);
    page.section("ranks", "A worker's time, by rank", &numbers);
    page.section("method", "How it is drawn", &method);
    page.script(SCRIPT);
    let sections = [("line", "Time line"), ("ranks", "By rank"), ("method", "How it is drawn")];
    html::document(&title, &sections, &intro, &page)
}

/// The mean over a rank's workers of each phase.
fn table(page: &mut Html, calls: &[Call]) {
    let mut columns = vec![Column::Number("rank"), Column::Number("workers")];
    let titles = Phase::ALL.map(|phase| format!("{} us", phase.name()));
    columns.extend(titles.iter().map(|title| Column::Number(title)));
    columns.extend([Column::Number("wait %"), Column::Words("call")]);
    let mut rows = Vec::new();
    for call in calls {
        for (rank, workers) in call.ranks.iter().enumerate() {
            let all: Vec<&Worker> = workers.iter().collect();
            let count = u32::try_from(all.len()).unwrap_or(u32::MAX).max(1);
            let mut row: Vec<Cell> = vec![rank.into(), count.into()];
            row.extend(Phase::ALL.map(|phase| us(total(&all, phase) / count).into()));
            let share = percent(total(&all, Phase::Wait), lives(&all));
            row.extend([format!("{share:.1}").into(), call.title.clone().into()]);
            rows.push(row);
        }
    }
    page.table(&columns, &rows);
}

/// How the pictures are drawn, and what they leave out.
const METHOD: [&str; 6] = [
    "No rows are merged. Where a row is thinner than a pixel, the browser blends neighbours; \
     select a part to see each.",
    "Phases differ in place, too: a product fills the row, an addition its upper half, a result \
     that leaves its lower half, and a wait is a line in the middle. A worker that has not begun, \
     or is done, has nothing.",
    "Each rank's time begins with its first worker: clocks of two GPUs are not compared.",
    "Pictures share a scale, unless a call is more than four times as long as another.",
    "A GPU stamps nothing behind a CTA's last tile. Scattered rows that are added there, and \
     results that are copied, count as waiting.",
    "With a script: drag over a part to enlarge it in all pictures, double-click for the whole, \
     and point at a span for its times.",
];

fn resolution(column: Duration) -> String {
    if column.is_zero() {
        return "Every span is drawn from its begin to its end.".to_owned();
    }
    format!(
        "The page is kept under 2 MiB: time is cut in columns of {} ns. Within a column spans of \
         one phase are drawn as one, so the sum of each phase is exact, and a moment is wrong by a \
         column at most.",
        column.as_nanos()
    )
}
