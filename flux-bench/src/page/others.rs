//! Serving traces, first calls, the kernel alone, peers alone; and simulated machines apart.

use super::html::{Cell, Column, Html};
use super::{Named, machines};
use crate::record::Record;
use crate::report::ms;

use Column::{Number, Words};

/// A table of a record: what it shows, its columns and its rows.
struct Table {
    words: &'static str,
    columns: Vec<Column<'static>>,
    rows: Vec<Vec<Cell>>,
}

pub(super) fn section(page: &mut Html, records: &[Named]) {
    for named in records {
        if let Some(table) = table(&named.record) {
            show(page, named, &table);
        }
    }
}

pub(super) fn simulated(page: &mut Html, records: &[Named]) {
    for named in records {
        let Record::Simulated(report) = &named.record else { continue };
        let rows = report
            .rows
            .iter()
            .map(|r| {
                vec![
                    r.head.to_string().into(),
                    r.head.tp.into(),
                    ms(r.t_op_ms).into(),
                    ms(r.t_gemm_ms).into(),
                    ms(r.t_serial_ms).into(),
                    Cell::Gain(r.speed_up),
                ]
            })
            .collect();
        let columns = vec![
            Words("op"),
            Number("TP"),
            Number("T_op ms"),
            Number("T_gemm ms"),
            Number("T_serial ms"),
            Number("speed-up"),
        ];
        let words = "By a model of the machine (`flux-bench simulate`). No GPU ran any of this.";
        show(page, named, &Table { words, columns, rows });
    }
}

fn show(page: &mut Html, named: &Named, table: &Table) {
    let mut content = Html::default();
    content.paragraph("note", table.words);
    content.table(&table.columns, &table.rows);
    let rows = format!("{} rows", table.rows.len());
    machines::block(page, named, (&machines::on(&named.record), &rows), false, &content);
}

fn table(record: &Record) -> Option<Table> {
    Some(match record {
        Record::Serving(report) => Table {
            words: "A trace of a serving engine, with another m in each call: prefill chunks and decode \
                    steps. Totals of all calls on the slowest rank; late calls may have waited for the \
                    host, and their times count.",
            columns: vec![
                Words("op"),
                Words("trace"),
                Number("calls"),
                Number("flux ms"),
                Number("in turn ms"),
                Number("speed-up"),
                Number("late"),
            ],
            rows: report
                .serving
                .iter()
                .map(|r| {
                    vec![
                        format!("{} {} up to m {}", r.head.op, r.head.model, r.head.m).into(),
                        r.trace.clone().into(),
                        r.calls.into(),
                        ms(r.total_op_ms).into(),
                        ms(r.total_serial_ms).into(),
                        Cell::Gain(Some(r.total_serial_ms / r.total_op_ms)),
                        r.late.into(),
                    ]
                })
                .collect(),
        },
        Record::Core(report) => Table {
            words: "flux's kernel as a plain GEMM on one GPU, at one rank's shape, beside cuBLASLt. The \
                    gain is cuBLASLt's time over the kernel's; flags is what signals cost.",
            columns: vec![
                Words("op"),
                Number("cuBLASLt ms"),
                Number("kernel ms"),
                Number("gain"),
                Number("flags %"),
                Number("TFLOP/s"),
            ],
            rows: report
                .rows
                .iter()
                .map(|r| {
                    vec![
                        r.head.to_string().into(),
                        ms(r.t_gemm_ms.median).into(),
                        ms(r.t_core_ms.median).into(),
                        Cell::Gain(Some(r.core)),
                        format!("{:.1}", 100.0 * r.flags).into(),
                        format!("{:.0}", r.tflops).into(),
                    ]
                })
                .collect(),
        },
        Record::FirstCall(report) => Table {
            words: "The first call of a fresh process, beside later calls after as long a rest.",
            columns: vec![
                Words("op"),
                Number("first ms"),
                Number("later ms"),
                Number("first / later"),
            ],
            rows: report
                .rows
                .iter()
                .map(|r| {
                    vec![
                        r.head.to_string().into(),
                        ms(r.first_call_ms).into(),
                        ms(r.warm_ms.median).into(),
                        format!("{:.2}", r.of_warm()).into(),
                    ]
                })
                .collect(),
        },
        Record::Peers(report) => {
            let time = |t: Option<crate::harness::Times>| {
                Cell::Text(t.map_or_else(|| "-".to_owned(), |t| ms(t.median)))
            };
            Table {
                words: "PyTorch's own ways on the same machine, which stand beside flux above.",
                columns: vec![
                    Words("op"),
                    Number("torch.mm ms"),
                    Number("NCCL in turn ms"),
                    Number("async-TP ms"),
                    Number("one-shot ms"),
                    Number("two-shot ms"),
                ],
                rows: report
                    .rows
                    .iter()
                    .map(|r| {
                        vec![
                            r.head.to_string().into(),
                            time(r.gemm_ms),
                            time(r.serial_ms),
                            time(r.async_tp_ms),
                            time(r.one_shot_ms),
                            time(r.two_shot_ms),
                        ]
                    })
                    .collect(),
            }
        }
        Record::Ops(_) | Record::Layers(_) | Record::Simulated(_) => return None,
    })
}
