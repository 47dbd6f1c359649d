//! What was measured, and on what: the records' heads.

use super::html::{Cell, Column, Html};
use super::{Named, ops};
use crate::record::Record;
use std::collections::BTreeSet;
use std::fmt::Write as _;

/// What the page is, and its terms.
pub(super) fn intro(page: &mut Html, records: &[Named]) {
    let measured = records.iter().filter(|named| !matches!(named.record, Record::Simulated(_)));
    let rows: usize = measured.clone().map(|named| named.record.rows()).sum();
    let machines: BTreeSet<String> =
        measured.clone().map(|named| named.record.origin().machine()).collect();
    page.paragraph(
        "lede",
        "flux fuses the GEMMs of tensor-parallel layers with their collectives, so that traffic \
         hides under arithmetic. This page shows how long its calls take beside the same work \
         done in turn: NCCL's AllGather before cuBLASLt's GEMM, or its ReduceScatter or AllReduce \
         behind it.",
    );
    page.paragraph(
        "note",
        &format!(
            "{rows} rows of {} records, measured on {}. Times are medians over rounds, of the \
             slowest rank, on random data; every result shown was compared with a reference. {}",
            measured.clone().count(),
            words(&machines),
            if measured.count() == records.len() {
                "Nothing on this page is simulated."
            } else {
                "Nothing is simulated but the section that says so."
            }
        ),
    );
    page.terms(&[
        ("m", "rows of a call: tokens of a batch or a prompt, over all ranks"),
        (
            "ag_gemm, gemm_rs, gemm_ar",
            "AllGather of rows and a column-parallel GEMM; a row-parallel GEMM and ReduceScatter, \
             or AllReduce, of its sums",
        ),
        ("n, k", "extents of the weight of all ranks together"),
        ("TP", "ranks of the tensor-parallel group, one GPU each"),
        ("T_op", "one call of flux: GEMM and collective, fused"),
        ("T_gemm", "the rank's GEMM alone, by cuBLASLt; a faster kernel can beat it"),
        ("T_serial", "NCCL's collective before or behind that GEMM"),
        ("speed-up", "T_serial / T_op; above 1 flux is ahead"),
        (
            "E",
            "(T_serial - T_op) / (T_serial - T_gemm), the share of the communication that is \
             hidden: 0 % is no better than in turn, and a kernel faster than cuBLASLt's may pass \
             100 %; a dash where T_serial - T_gemm is within noise",
        ),
        (
            "transport",
            "`nvlink` and `pcie`: GPUs of one host; `nccl`: NCCL carries the rows; `mixed`: \
             several hosts",
        ),
    ]);
}

fn words(items: &BTreeSet<String>) -> String {
    items.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
}

/// A table of machines, then one of records.
pub(super) fn section(page: &mut Html, records: &[Named]) {
    let columns = [
        Column::Words("record"),
        Column::Words("on"),
        Column::Words("transport"),
        Column::Number("rows"),
        Column::Words("date"),
        Column::Words("commit"),
        Column::Words("versions"),
    ];
    let rows: Vec<Vec<Cell>> = records
        .iter()
        .map(|Named { name, record }| {
            let origin = record.origin();
            let versions: Vec<String> = record
                .versions()
                .iter()
                .map(|(name, version)| format!("{name} {version}"))
                .collect();
            vec![
                Cell::Link { to: name.clone(), words: name.clone() },
                origin.machine().into(),
                record.transport().unwrap_or("-").into(),
                record.rows().into(),
                origin.date.split('T').next().unwrap_or_default().into(),
                Cell::Code(short(&origin.commit)),
                versions.join(", ").into(),
            ]
        })
        .collect();
    page.table(&columns, &rows);
    page.heading("Commands");
    page.paragraph(
        "note",
        "Each record is what its command printed at its commit. Where that is clean, build there with `cargo xtask \
         bench` or `cargo xtask dist`, then run the line.",
    );
    let mut commands = Html::default();
    for named in records {
        commands
            .paragraph("origin", &format!("{}: `{}`", named.name, named.record.origin().command));
    }
    let mut line = Html::default();
    line.spans(&[("", &format!("All {} commands", records.len()))]);
    page.details(("", "numbers"), false, &line, &commands);
}

/// The command and the commit behind a record, under its figures.
pub(super) fn origin(page: &mut Html, record: &Record) {
    let origin = record.origin();
    let mut words = format!("`{}` at commit `{}`", origin.command, origin.commit);
    if dirty(&origin.commit) {
        words += " (not reproducible)";
    }
    if !origin.date.is_empty() {
        let _ = write!(words, ", {}", origin.date.replace('T', " ").trim_end_matches('Z'));
        words += " UTC";
    }
    for (name, version) in record.versions() {
        let _ = write!(words, ", {name} {version}");
    }
    if let Record::Layers(report) = record
        && let Some(note) = &report.note
    {
        let _ = write!(words, ". {note}");
    }
    page.paragraph("origin", &(words + "."));
}

/// A record's block: its name, what it ran on, a verdict, and its figures.
pub(super) fn block(
    page: &mut Html,
    named: &Named,
    (on, sum): (&str, &str),
    open: bool,
    content: &Html,
) {
    let mut line = Html::default();
    line.spans(&[("name", &named.name), ("on", on), ("sum", sum)]);
    let mut all = Html::default();
    all.push(content);
    origin(&mut all, &named.record);
    page.details((&named.name, "record"), open, &line, &all);
}

/// What a record of ops ran on, but for its machine.
pub(super) fn on(record: &Record) -> String {
    if let Record::Ops(report) = record {
        return ops::on(report);
    }
    let machine = record.origin().machine();
    record.transport().map_or_else(|| machine.clone(), |on| format!("{machine}, {on}"))
}

/// A commit's first digits, and whether its tree had changes.
fn short(commit: &str) -> String {
    let rest = if dirty(commit) { "-dirty, not reproducible" } else { "" };
    commit.split('-').next().unwrap_or_default().chars().take(10).collect::<String>() + rest
}

/// Whether the tree had changes that no commit has.
fn dirty(commit: &str) -> bool {
    commit.ends_with("-dirty")
}
