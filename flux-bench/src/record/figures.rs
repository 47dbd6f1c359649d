//! The times of a record that two records are compared by.

use super::{LayerRow, LayersReport, Record};
use crate::harness::Times;
use crate::report::Head;
use flux_core::DType;

/// A time of flux, and one of the same run that flux has no part in.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Figure {
    /// Of what: op, model, m and element types other than bf16, or model, phase and m.
    pub(crate) row: String,
    pub(crate) ms: Times,
    /// Tells a change of the machine from one of flux.
    pub(crate) control: Option<f64>,
}

/// A time without a spread.
const fn alone(ms: f64) -> Times {
    Times { p10: ms, median: ms, p90: ms }
}

/// How a row of an op is named: those of other element types are other rows.
fn of_head(head: &Head) -> String {
    if head.dtype == DType::Bf16.name() {
        head.to_string()
    } else {
        format!("{head} {}", head.dtype)
    }
}

fn each<R>(rows: &[R], of: impl Fn(&R) -> Figure) -> Vec<Figure> {
    rows.iter().map(of).collect()
}

fn of_layer(row: &LayerRow) -> impl Iterator<Item = Figure> {
    let modes = row.modes().into_iter().filter(|(mode, _)| LayersReport::is_flux(mode));
    modes.map(|(mode, ms)| {
        let [p10, p90] = row.spread.get(mode).copied().unwrap_or([ms, ms]);
        let name = format!("{}, {}", row.label(), LayersReport::title(mode));
        let control = row.base().map(|(_, ms)| ms);
        Figure { row: name, ms: Times { p10, median: ms, p90 }, control }
    })
}

impl Record {
    /// One figure a row, or as many as a row has ways of flux; rows of peers have none.
    pub(crate) fn figures(&self) -> Vec<Figure> {
        let of = |row: String, ms: Times, control: f64| Figure { row, ms, control: Some(control) };
        match self {
            Self::Ops(report) => {
                each(&report.rows, |r| of(of_head(&r.head), r.t_op_ms, r.t_serial_ms.median))
            }
            Self::Serving(report) => each(&report.serving, |r| {
                let calls = r.calls as f64;
                let row = format!("{}, mean of {} calls", of_head(&r.head), r.trace);
                of(row, alone(r.total_op_ms / calls), r.total_serial_ms / calls)
            }),
            Self::Core(report) => each(&report.rows, |r| {
                let control = r.t_gemm_ms.map(|gemm| gemm.median);
                Figure { row: of_head(&r.head), ms: r.t_core_ms, control }
            }),
            Self::FirstCall(report) => each(&report.rows, |r| {
                of(of_head(&r.head), alone(r.first_call_ms), r.warm_ms.median)
            }),
            Self::Layers(report) => report.rows.iter().flat_map(of_layer).collect(),
            Self::Simulated(report) => {
                each(&report.rows, |r| of(of_head(&r.head), alone(r.t_op_ms), r.t_gemm_ms))
            }
            Self::Peers(_) => Vec::new(),
        }
    }
}
