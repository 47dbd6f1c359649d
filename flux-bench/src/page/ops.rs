//! Records of ops: a chart for each op and model, and every row in numbers.

use super::html::{Cell, Column, Html, Of};
use super::{Named, ahead, machines, peers_of};
use crate::record::Record;
use crate::report::{PeersReport, Report, Row, efficiency, ms};
use crate::show::{best_peer, charts, extremes, legends, speed_up};

pub(super) fn section(page: &mut Html, records: &[Named]) {
    let mut of = None;
    for named in records {
        let Record::Ops(report) = &named.record else { continue };
        let machine = named.record.origin().machine();
        // The first of a machine is open: its main record.
        let open = of.as_ref() != Some(&machine);
        if of.is_none() {
            page.paragraph(
                "",
                "Time is drawn as a multiple of the GEMM alone, the dashed line at 1.0: what is \
                 above it is communication that shows. Below, bars are E, with the line at \
                 100 %. Lower curves and higher bars are better.",
            );
        }
        if open {
            page.heading(&machine);
        }
        of = Some(machine);
        let peers = peers_of(records, named);
        let mut content = Html::default();
        content.legend(&legends(report, peers));
        content.charts("charts", report.rows.len(), &charts(report, peers));
        numbers(&mut content, report, peers);
        if let Some(peers) = peers {
            content.paragraph(
                "origin",
                &format!(
                    "Peers: PyTorch {}, NCCL {}: `{}` at commit `{}`.",
                    peers.torch, peers.nccl, peers.origin.command, peers.origin.commit
                ),
            );
        }
        let (low, high) = extremes(report.rows.iter().map(speed_up));
        let sum = format!("ahead in {}, {low:.2}x to {high:.2}x", ahead::ahead(report));
        machines::block(page, named, (&on(report), &sum), open, &content);
    }
}

/// What the ops ran on, but for the machine.
pub(super) fn on(report: &Report) -> String {
    let (tp, dtype) = report.rows.first().map_or((0, ""), |r| (r.head.tp, &r.head.dtype));
    let options = ahead::options(report).into_iter().map(|option| format!(", {option}"));
    format!(
        "{}, TP {tp}, {dtype}{}{}",
        report.transport,
        report.placement,
        options.collect::<String>()
    )
}

fn numbers(page: &mut Html, report: &Report, peers: Option<&PeersReport>) {
    let mut columns: Vec<Of<'_, Row>> = vec![
        (Column::Words("op"), &|row| row.head.op.clone().into()),
        (Column::Words("model"), &|row| row.head.model.clone().into()),
        (Column::Number("m"), &|row| {
            let padded = row.serial_m.map_or_else(String::new, |m| format!(" (serial {m})"));
            format!("{}{padded}", row.head.m).into()
        }),
        (Column::Number("T_op ms"), &|row| ms(row.t_op_ms.median).into()),
        (Column::Number("p10 to p90"), &|row| {
            format!("{} to {}", ms(row.t_op_ms.p10), ms(row.t_op_ms.p90)).into()
        }),
        (Column::Number("T_gemm ms"), &|row| ms(row.t_gemm_ms.median).into()),
        (Column::Number("T_serial ms"), &|row| ms(row.t_serial_ms.median).into()),
        (Column::Number("speed-up"), &|row| Cell::Gain(Some(speed_up(row)))),
        (Column::Number("E %"), &|row| efficiency(row, 1).into()),
    ];
    let best = |row: &Row| best_peer(peers, row).into();
    if peers.is_some() {
        columns.push((Column::Words("best peer ms"), &best));
    }
    let mut table = Html::default();
    table.columns(&report.rows, &columns);
    page.numbers(&format!("All {} rows in numbers", report.rows.len()), &table);
}
