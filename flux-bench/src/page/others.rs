//! Serving traces, first calls, the kernel alone, peers alone; and simulated machines apart.

use super::html::{Cell, Column, Html, Of};
use super::{Named, machines};
use crate::harness::Times;
use crate::record::Record;
use crate::report::{dashed, ms};

use Column::{Number, Words};

pub(super) fn section(page: &mut Html, records: &[Named]) {
    tables(page, records, |record| !matches!(record, Record::Simulated(_)));
}

pub(super) fn simulated(page: &mut Html, records: &[Named]) {
    tables(page, records, |record| matches!(record, Record::Simulated(_)));
}

fn tables(page: &mut Html, records: &[Named], of: fn(&Record) -> bool) {
    for named in records.iter().filter(|named| of(&named.record)) {
        let mut content = Html::default();
        table(&mut content, &named.record);
        if !content.is_empty() {
            let rows = format!("{} rows", named.record.rows());
            machines::block(page, named, (&machines::on(&named.record), &rows), false, &content);
        }
    }
}

/// What a record shows, and its rows.
fn table(page: &mut Html, record: &Record) {
    match record {
        Record::Serving(report) => rows(
            page,
            "A trace of a serving engine, with another m in each call: prefill chunks and decode \
             steps. Totals of all calls on the slowest rank; late calls may have waited for the \
             host, and their times count.",
            &report.serving,
            &[
                (Words("op"), &|r| {
                    format!("{} {} up to m {}", r.head.op, r.head.model, r.head.m).into()
                }),
                (Words("trace"), &|r| r.trace.clone().into()),
                (Number("calls"), &|r| r.calls.into()),
                (Number("flux ms"), &|r| ms(r.total_op_ms).into()),
                (Number("in turn ms"), &|r| ms(r.total_serial_ms).into()),
                (Number("speed-up"), &|r| Cell::Gain(Some(r.total_serial_ms / r.total_op_ms))),
                (Number("late"), &|r| r.late.into()),
            ],
        ),
        Record::Core(report) => rows(
            page,
            "flux's kernel as a plain GEMM on one GPU, at one rank's shape, beside cuBLASLt. The \
             gain is cuBLASLt's time over the kernel's; flags is what signals cost.",
            &report.rows,
            &[
                (Words("op"), &|r| r.head.to_string().into()),
                (Number("cuBLASLt ms"), &|r| median(r.t_gemm_ms)),
                (Number("kernel ms"), &|r| ms(r.t_core_ms.median).into()),
                (Number("gain"), &|r| Cell::Gain(r.core)),
                (Number("flags %"), &|r| format!("{:.1}", 100.0 * r.flags).into()),
                (Number("TFLOP/s"), &|r| format!("{:.0}", r.tflops).into()),
            ],
        ),
        Record::FirstCall(report) => rows(
            page,
            "The first call of a fresh process, beside later calls after as long a rest.",
            &report.rows,
            &[
                (Words("op"), &|r| r.head.to_string().into()),
                (Number("first ms"), &|r| ms(r.first_call_ms).into()),
                (Number("later ms"), &|r| ms(r.warm_ms.median).into()),
                (Number("first / later"), &|r| format!("{:.2}", r.of_warm()).into()),
            ],
        ),
        Record::Peers(report) => rows(
            page,
            "PyTorch's own ways on the same machine, which stand beside flux above.",
            &report.rows,
            &[
                (Words("op"), &|r| r.head.to_string().into()),
                (Number("GEMM ms"), &|r| median(r.gemm_ms)),
                (Number("NCCL in turn ms"), &|r| median(r.serial_ms)),
                (Number("async-TP ms"), &|r| median(r.async_tp_ms)),
                (Number("one-shot ms"), &|r| median(r.one_shot_ms)),
                (Number("two-shot ms"), &|r| median(r.two_shot_ms)),
            ],
        ),
        Record::Simulated(report) => rows(
            page,
            "By a model of the machine (`flux-bench simulate`). No GPU ran any of this.",
            &report.rows,
            &[
                (Words("op"), &|r| r.head.to_string().into()),
                (Number("TP"), &|r| r.head.tp.into()),
                (Number("T_op ms"), &|r| ms(r.t_op_ms).into()),
                (Number("T_gemm ms"), &|r| ms(r.t_gemm_ms).into()),
                (Number("T_serial ms"), &|r| ms(r.t_serial_ms).into()),
                (Number("speed-up"), &|r| Cell::Gain(r.speed_up)),
            ],
        ),
        Record::Ops(_) | Record::Layers(_) => {}
    }
}

fn rows<R>(page: &mut Html, words: &str, rows: &[R], columns: &[Of<'_, R>]) {
    page.paragraph("note", words);
    page.columns(rows, columns);
}

fn median(times: Option<Times>) -> Cell {
    dashed(times.map(|times| ms(times.median))).into()
}
