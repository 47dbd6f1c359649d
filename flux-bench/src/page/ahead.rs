//! Where flux is ahead of the collective and the GEMM in turn: by op and model, then by record.

use super::Named;
use super::html::{Cell, Column, Html};
use crate::harness::percentile;
use crate::record::Record;
use crate::report::{Placement, Report, Row};
use crate::show::{extremes, speed_up};
use flux_core::Numerics;
use std::collections::BTreeMap;

/// A range of a call's rows, with the head of its column.
type Range = (&'static str, fn(u32) -> bool);
const RANGES: [Range; 3] = [
    ("m to 256", |m| m <= 256),
    ("m 257 to 1023", |m| m > 256 && m < 1024),
    ("m from 1024", |m| m >= 1024),
];

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
        "How many cases, an op of a shape with so many rows, are faster than NCCL and cuBLASLt \
         in turn, and by how much.",
    );
    page.list(&sums(&all));
    by_op(page, &all);
    page.heading("By record: median speed-up by m");
    let range = |number: usize| {
        move |(_, report): &(&Named, &Report)| {
            let rows = report.rows.iter().filter(|row| RANGES[number].1(row.head.m));
            Cell::Gain(median(rows.map(speed_up).collect()))
        }
    };
    let gain = |row: Option<&Row>| Cell::Gain(row.map(speed_up));
    let which = |row: Option<&Row>| row.map_or_else(String::new, |r| r.head.to_string()).into();
    page.columns(
        &all,
        &[
            (Column::Words("record"), &|(named, _)| Cell::link(&named.name)),
            (Column::Words("options"), &|(_, report)| options(report).join(", ").into()),
            (Column::Number("ahead"), &|(_, report)| ahead(report).into()),
            (Column::Number(RANGES[0].0), &range(0)),
            (Column::Number(RANGES[1].0), &range(1)),
            (Column::Number(RANGES[2].0), &range(2)),
            (Column::Number("fastest"), &|(_, report)| gain(fastest(report))),
            (Column::Words("which is"), &|(_, report)| which(fastest(report))),
            (Column::Number("slowest"), &|(_, report)| gain(slowest(report))),
            (Column::Words("which is"), &|(_, report)| which(slowest(report))),
        ],
    );
    page.paragraph(
        "note",
        "\u{25b2} ahead, \u{25bc} behind, = within half a per cent. Names of records are GPU, \
         number of GPUs and transport; `tuned` has plans that `flux-bench tune` has found, \
         `portable` the kernel of GPUs other than Hopper, `batch-invariant` bits of a row that no \
         other row changes, and `any-order` the same cases without that.",
    );
}

/// The speed-up of each op and model, least to most, over NVLink without options.
fn by_op(page: &mut Html, all: &[(&Named, &Report)]) {
    let plain = all.iter().filter(|(_, r)| r.transport == "nvlink" && options(r).is_empty());
    let mut groups: BTreeMap<(&str, &str), Vec<&Row>> = BTreeMap::new();
    for row in plain.flat_map(|(_, report)| &report.rows) {
        groups.entry((&row.head.op, &row.head.model)).or_default().push(row);
    }
    if groups.is_empty() {
        return;
    }
    page.heading("By op and model: least to most speed-up of nvlink records without options");
    let mut columns = vec![Column::Words("op"), Column::Words("model")];
    columns.extend(RANGES.map(|(title, _)| Column::Number(title)));
    let range = |rows: &[&Row], of: fn(u32) -> bool| {
        let found: Vec<f64> =
            rows.iter().filter(|row| of(row.head.m)).map(|row| speed_up(row)).collect();
        let (least, most) = extremes(found.iter().copied());
        if found.is_empty() {
            return Cell::Gain(None);
        }
        let ahead = found.iter().filter(|&&gain| gain > 1.0).count();
        let cases = format!("ahead in {ahead} of {}", found.len());
        Cell::Gains { least, lines: vec![format!("{least:.2}x to {most:.2}x"), cases] }
    };
    let lines: Vec<Vec<Cell>> = groups
        .iter()
        .map(|((op, model), rows)| {
            let cells = RANGES.map(|(_, of)| range(rows, of));
            [(*op).into(), (*model).into()].into_iter().chain(cells).collect()
        })
        .collect();
    page.table(&columns, &lines);
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
            "pcie" => "`pcie`, GPUs of one host without peer access, or with it off".to_owned(),
            "mixed" => "`mixed`, hosts of several GPUs".to_owned(),
            "nccl" => "`nccl`, any other GPUs".to_owned(),
            other => format!("`{other}`"),
        };
        let on = match report.placement {
            Placement { hosts, machines: 1, .. } if hosts > 1 => {
                format!("{on} (one machine acts as {hosts} hosts)")
            }
            Placement { hosts, machines, .. } if machines < hosts => {
                format!("{on} ({machines} machines act as {hosts} hosts)")
            }
            _ => on,
        };
        let scaled = report.rows.first().is_some_and(|row| is_quantized(&row.head.dtype));
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
        format!("{on}: faster in {ahead} of {} cases, {low:.2}x to {high:.2}x", gains.len())
    };
    sums.into_iter().map(words).collect()
}

/// Whether element types are those of 8-bit operands.
fn is_quantized(dtype: &str) -> bool {
    dtype.parse().is_ok_and(|numerics: Numerics| numerics.operand.is_quantized())
}

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

fn fastest(report: &Report) -> Option<&Row> {
    report.rows.iter().max_by(|a, b| speed_up(a).total_cmp(&speed_up(b)))
}

fn slowest(report: &Report) -> Option<&Row> {
    report.rows.iter().min_by(|a, b| speed_up(a).total_cmp(&speed_up(b)))
}

/// How many rows are ahead, of how many.
pub(super) fn ahead(report: &Report) -> String {
    let ahead = report.rows.iter().filter(|row| speed_up(row) > 1.0).count();
    format!("{ahead} of {}", report.rows.len())
}

fn median(mut gains: Vec<f64>) -> Option<f64> {
    gains.sort_by(f64::total_cmp);
    percentile(&gains, 50)
}
