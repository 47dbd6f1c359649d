//! Whole layers, steps and answers: what a layer gains, then bars of every row.

use super::html::{Cell, Column, Html};
use super::{Named, machines};
use crate::record::{LayerRow, LayersReport, Record};
use crate::report::{dashed, ms};
use crate::show::layer_charts;
use std::collections::BTreeSet;

pub(super) fn section(page: &mut Html, records: &[Named]) {
    let mut all: Vec<(&Named, &LayersReport)> = records
        .iter()
        .filter_map(|named| match &named.record {
            Record::Layers(report) => Some((named, report)),
            _ => None,
        })
        .collect();
    // Engines and training frameworks follow.
    all.sort_by_key(|(_, report)| report.kind != "layers");
    if all.is_empty() {
        return;
    }
    page.paragraph(
        "",
        "PyTorch layers of real models, with attention, norms and activations. A gain is another \
         way's time over flux's: NCCL's AllReduce in prefill and decode, Megatron-LM's AllGather \
         and ReduceScatter in training. Below it stands the best other way, where that is \
         another: PyTorch's one-shot or two-shot AllReduce (AR) over peer memory, or its \
         async-TP. The colour is the worse of both. E is the share of what collectives add to a \
         layer that flux saves. vLLM's row-parallel layers take NCCL's AllReduce, too. `kept x` \
         holds gathered rows for the backward pass.",
    );
    for phase in phases(&all) {
        gains(page, &phase, &all);
    }
    let rows: Vec<Compared<'_>> = all
        .iter()
        .flat_map(|(named, report)| report.rows.iter().map(move |row| (*named, row)))
        .filter_map(|(named, row)| {
            let (mode, gain) = row.gain()?;
            Some(Compared { named, row, mode, gain })
        })
        .collect();
    let mut table = Html::default();
    table.columns(
        &rows,
        &[
            (Column::Words("record"), &|of| Cell::link(&of.named.name)),
            (Column::Words("model"), &|of| of.row.model.clone().into()),
            (Column::Words("operands"), &|of| model_of(of.row).1.into()),
            (Column::Words("phase"), &|of| phase(of.row).into()),
            (Column::Number("m or batch"), &|of| {
                of.row.m.or(of.row.batch).map_or_else(String::new, |m| m.to_string()).into()
            }),
            (Column::Number("NCCL ms"), &|of| ms(of.base().1).into()),
            (Column::Words("by"), &|of| LayersReport::title(of.base().0).into()),
            (Column::Number("flux ms"), &|of| ms(of.flux()).into()),
            (Column::Number("gain"), &|of| Cell::Gain(Some(of.gain))),
            (Column::Number("over best"), &|of| {
                Cell::Gain(of.row.best_other().map(|(_, ms)| ms / of.flux()))
            }),
            (Column::Number("E %"), &|of| {
                dashed(of.row.hidden(of.mode).map(|part| format!("{:.0}", 100.0 * part))).into()
            }),
        ],
    );
    page.numbers(&format!("All {} rows in numbers", rows.len()), &table);
    page.heading("Every way in bars");
    page.paragraph(
        "note",
        "Milliseconds of a layer, a training step or an answer; shorter is better. The outline has \
         no collectives at all and is wrong by design: it is what is left to reach with cuBLASLt's \
         GEMMs, and GEMMs with fused activations can pass it. flux's bars are blue and \
         its words bold. Whiskers reach from p10 to p90, for vLLM from the least to the most.",
    );
    for (number, (named, report)) in all.iter().enumerate() {
        let mut content = Html::default();
        content.charts("cards", report.rows.len(), &layer_charts(report));
        let why = report.rows.iter().flat_map(|row| &row.why);
        let mut reasons: Vec<String> =
            why.map(|(mode, why)| format!("{}: {why}", LayersReport::title(mode))).collect();
        reasons.sort();
        reasons.dedup();
        if !reasons.is_empty() {
            content.paragraph("origin", &format!("Not run: {}.", reasons.join("; ")));
        }
        let gains: Vec<f64> = report.rows.iter().filter_map(|row| Some(row.gain()?.1)).collect();
        let (low, high) = crate::show::extremes(gains.into_iter());
        let sum = format!("{low:.2}x to {high:.2}x");
        machines::block(page, named, (&machines::on(&named.record), &sum), number == 0, &content);
    }
}

/// A row with the fastest way of flux, and its gain over the base.
struct Compared<'a> {
    named: &'a Named,
    row: &'a LayerRow,
    mode: &'a str,
    gain: f64,
}

impl Compared<'_> {
    fn base(&self) -> (&str, f64) {
        self.row.base().unwrap_or_default()
    }

    fn flux(&self) -> f64 {
        self.row.ms[self.mode]
    }
}

/// Phases, with what an engine did in them, in the order of the records.
fn phases(all: &[(&Named, &LayersReport)]) -> Vec<String> {
    let mut phases = Vec::new();
    for row in all.iter().flat_map(|(_, report)| &report.rows) {
        if !phases.contains(&phase(row)) {
            phases.push(phase(row));
        }
    }
    let order = ["prefill", "decode", "train"];
    phases.sort_by_key(|phase| order.iter().position(|name| name == phase).unwrap_or(order.len()));
    phases
}

fn phase(row: &LayerRow) -> String {
    row.case.as_ref().map_or_else(|| row.phase.clone(), |case| format!("{} {case}", row.phase))
}

/// The gains of a phase: a line for each number of rows, a column for each model and record.
fn gains(page: &mut Html, of: &str, all: &[(&Named, &LayersReport)]) {
    let rows = || {
        let rows = all.iter().flat_map(|(n, report)| report.rows.iter().map(move |row| (*n, row)));
        rows.filter(|(_, row)| phase(row) == of)
    };
    let sizes: BTreeSet<u32> = rows().filter_map(|(_, row)| row.m.or(row.batch)).collect();
    let by_batch = rows().all(|(_, row)| row.m.is_none());
    let mut measured: Vec<(&Named, (&str, &str))> = Vec::new();
    for (named, row) in rows() {
        if !measured.iter().any(|(n, of)| (&n.name, *of) == (&named.name, model_of(row))) {
            measured.push((named, model_of(row)));
        }
    }
    let titles: Vec<String> = measured
        .iter()
        .map(|(Named { record, .. }, (model, dtype))| {
            let transport = record.transport().unwrap_or("-");
            format!("{model} {dtype}, {}, {transport}", record.origin().machine())
        })
        .collect();
    let mut columns = vec![Column::Number(if by_batch { "batch" } else { "m" })];
    columns.extend(titles.iter().map(|title| Column::Number(title)));
    let mut lines: Vec<Vec<Cell>> = Vec::new();
    for size in sizes {
        let gain = |(named, of): &(&Named, (&str, &str))| {
            let is_it = |(n, row): &(&Named, &LayerRow)| {
                (&n.name, model_of(row), row.m.or(row.batch)) == (&named.name, *of, Some(size))
            };
            rows().find(is_it).and_then(|(_, row)| both(row)).unwrap_or(Cell::Gain(None))
        };
        lines.push(
            std::iter::once(size.to_string().into()).chain(measured.iter().map(gain)).collect(),
        );
    }
    let links = measured.iter().map(|(named, _)| Cell::link(&named.name));
    lines.push(std::iter::once("record".into()).chain(links).collect());
    page.heading(&match of {
        "prefill" => "Prefill".to_owned(),
        "decode" => "Decode".to_owned(),
        "train" => "Training: forward and backward of a layer".to_owned(),
        "megatron" => "Training: a step of Megatron-Core".to_owned(),
        "steps" => "Training: a step of a model of transformers".to_owned(),
        "prompt" => "Prefill: a prompt of a model of transformers".to_owned(),
        "generate" => "Decoding: a token of a model of transformers".to_owned(),
        other => other.replace("vllm", "vLLM:"),
    });
    page.table(&columns, &lines);
}

/// The model, and the element type of its operands.
fn model_of(row: &LayerRow) -> (&str, &str) {
    (&row.model, row.dtype())
}

/// The gain over the base, and over the best other way where that is another.
fn both(row: &LayerRow) -> Option<Cell> {
    let ((mode, over_base), (base, _)) = (row.gain()?, row.base()?);
    let mut lines = vec![format!("{over_base:.2}x {}", LayersReport::title(base))];
    let mut least = over_base;
    if let Some((best, time)) = row.best_other().filter(|(best, _)| *best != base) {
        let over_best = time / row.ms[mode];
        lines.push(format!("{over_best:.2}x {}", LayersReport::title(best)));
        least = least.min(over_best);
    }
    Some(Cell::Gains { least, lines })
}
