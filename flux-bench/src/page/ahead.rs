//! Where flux is ahead of the collective and the GEMM in turn: a line for each record of ops.

use super::Named;
use super::html::{Cell, Column, Html};
use crate::record::Record;
use crate::report::{Report, Row};
use crate::show::{extremes, speed_up};
use flux_core::DType;

/// Numbers of rows up to which a call is short, and from which on it is long.
const FEW: u32 = 256;
const MANY: u32 = 1024;

pub(super) fn section(page: &mut Html, records: &[Named]) {
    let all: Vec<(&Named, &Report)> = records
        .iter()
        .filter_map(|named| match &named.record {
            Record::Ops(report) => Some((named, report)),
            _ => None,
        })
        .collect();
    if all.is_empty() {
        return;
    }
    page.paragraph(
        "",
        "How many calls are faster than NCCL and cuBLASLt in turn, and by how much. A line is a \
         record, that is one run; the columns are the median speed-up of its calls by their rows \
         m, then the fastest and the slowest call.",
    );
    page.list(&sums(&all));
    let columns = [
        Column::Words("record"),
        Column::Words("options"),
        Column::Number("ahead"),
        Column::Number("m to 256"),
        Column::Number("to 1023"),
        Column::Number("from 1024"),
        Column::Number("fastest"),
        Column::Number("slowest"),
        Column::Words("which is"),
    ];
    let lines: Vec<Vec<Cell>> = all.iter().map(|(named, report)| line(named, report)).collect();
    page.table(&columns, &lines);
    page.paragraph(
        "note",
        "\u{25b2} ahead, \u{25bc} behind, = within half a per cent. Names of records are GPU, \
         number of GPUs and transport; `tuned` has plans that `flux-bench tune` has found, and \
         `hosts2` is one machine whose processes act as two hosts.",
    );
}

/// A sentence for each transport, and one for the portable kernel.
fn sums(all: &[(&Named, &Report)]) -> Vec<String> {
    let mut sums: Vec<(String, Vec<f64>)> = Vec::new();
    for (_, report) in all {
        let on = match &*report.transport {
            _ if options(report).contains(&PORTABLE) => {
                "The portable kernel, which GPUs other than Hopper take, run on Hopper".to_owned()
            }
            "nvlink" => "`nvlink`, GPUs of one host with peer access".to_owned(),
            "pcie" => "`pcie`, GPUs of one host without peer access".to_owned(),
            "mixed" => "`mixed`, hosts of several GPUs".to_owned(),
            "nccl" => "`nccl`, any other GPUs".to_owned(),
            other => format!("`{other}`"),
        };
        let scaled = report.rows.first().is_some_and(|row| row.head.dtype.starts_with(FP8));
        let on = if scaled { on + ", 8-bit operands" } else { on };
        let gains = report.rows.iter().map(speed_up);
        match sums.iter_mut().find(|(of, _)| *of == on) {
            Some((_, all)) => all.extend(gains),
            None => sums.push((on, gains.collect())),
        }
    }
    let words = |(on, gains): (String, Vec<f64>)| {
        let ahead = gains.iter().filter(|&&gain| gain > 1.0).count();
        let (low, high) = extremes(gains.iter().copied());
        format!("{on}: faster in {ahead} of {} calls, {low:.2}x to {high:.2}x", gains.len())
    };
    sums.into_iter().map(words).collect()
}

/// How the element types of 8-bit operands begin.
const FP8: &str = DType::E4m3.name();

const PORTABLE: &str = "portable kernel";

/// What a run changes of the ops, by its command.
pub(super) fn options(report: &Report) -> Vec<&'static str> {
    let all = [
        ("FLUX_ARCH=sm_80", PORTABLE),
        ("--dtype fp8", "8-bit operands"),
        ("--batch-invariant", "batch-invariant"),
        ("--partials f32", "fp32 partial sums"),
        ("--norm", "residual and norm"),
        ("--sustained", "back to back"),
    ];
    let given = all.into_iter().filter(|(word, _)| report.origin.command.contains(word));
    given.map(|(_, words)| words).collect()
}

fn line(named: &Named, report: &Report) -> Vec<Cell> {
    let gains = |of: &dyn Fn(u32) -> bool| {
        report.rows.iter().filter(|row| of(row.head.m)).map(speed_up).collect::<Vec<f64>>()
    };
    let (low, high) = extremes(report.rows.iter().map(speed_up));
    let slowest = report.rows.iter().min_by(|a, b| speed_up(a).total_cmp(&speed_up(b)));
    vec![
        Cell::Link { to: named.name.clone(), words: named.name.clone() },
        options(report).join(", ").into(),
        ahead(report).into(),
        Cell::Gain(median(gains(&|m| m <= FEW))),
        Cell::Gain(median(gains(&|m| m > FEW && m < MANY))),
        Cell::Gain(median(gains(&|m| m >= MANY))),
        Cell::Gain(Some(high)),
        Cell::Gain(Some(low)),
        slowest.map_or_else(String::new, |row: &Row| row.head.to_string()).into(),
    ]
}

/// How many rows are ahead, of how many.
pub(super) fn ahead(report: &Report) -> String {
    let ahead = report.rows.iter().filter(|row| speed_up(row) > 1.0).count();
    format!("{ahead} of {}", report.rows.len())
}

fn median(mut gains: Vec<f64>) -> Option<f64> {
    gains.sort_by(f64::total_cmp);
    let (middle, last) = (gains.len() / 2, gains.len().checked_sub(1)?);
    Some(if gains.len() % 2 == 1 {
        gains[middle]
    } else {
        f64::midpoint(gains[last / 2], gains[middle])
    })
}
