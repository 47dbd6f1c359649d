//! Calls back to back, beside the rounds of the same row.
//!
//! Invariant: both efficiencies follow one formula, so their difference is the machine's.

use super::table::stands_out;
use super::{Each, Head, Row, columns, dashed, efficiency, milliseconds, ms, resolved};
use crate::harness::Times;
use flux_core::metrics;
use serde::{Deserialize, Serialize};

/// Calls back to back: milliseconds of a call on the slowest rank, as means over blocks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sustained {
    /// How long each contender ran in all, in seconds.
    pub seconds: f64,
    /// Blocks of each contender.
    pub blocks: u32,
    /// The fused op.
    pub t_op_ms: Times,
    /// The GEMM alone.
    pub t_gemm_ms: Times,
    /// The collective and the GEMM, one after the other.
    pub t_serial_ms: Times,
    /// Overlap efficiency of the medians; absent where the serial path is not slower than its GEMM.
    pub overlap_efficiency: Option<f64>,
    /// What it is above the efficiency of the rounds.
    pub difference: Option<f64>,
}

impl Sustained {
    /// From the times of op, GEMM and serial path, beside the rounds'.
    pub fn new(
        seconds: f64,
        blocks: u32,
        [t_op_ms, t_gemm_ms, t_serial_ms]: [Times; 3],
        short: &Each<Times>,
    ) -> Self {
        let efficiency = |op, gemm, serial| {
            metrics::overlap_efficiency(milliseconds(op), milliseconds(gemm), milliseconds(serial))
        };
        let overlap_efficiency = efficiency(t_op_ms, t_gemm_ms, t_serial_ms);
        let of_rounds = efficiency(short.op, short.gemm, short.serial);
        let difference =
            overlap_efficiency.zip(of_rounds).map(|(sustained, rounds)| sustained - rounds);
        Self { seconds, blocks, t_op_ms, t_gemm_ms, t_serial_ms, overlap_efficiency, difference }
    }
}

/// The rows that have it as text, beside their rounds.
pub(crate) fn table(rows: &[Row]) -> String {
    let rows: Vec<(&Row, &Sustained)> =
        rows.iter().filter_map(|row| Some((row, row.sustained.as_ref()?))).collect();
    let Some((_, Sustained { seconds, .. })) = rows.first() else { return String::new() };
    let resolved_sustained = |s: &Sustained| stands_out(&s.t_serial_ms, &s.t_gemm_ms, s.blocks);
    let percent = |part: Option<f64>| dashed(part.map(|part| format!("{:.1}", part * 100.0)));
    let shown = columns(
        &rows,
        (Head::COLUMNS, |(row, _)| &row.head),
        &[
            ("T_op ms", &|(_, s)| ms(s.t_op_ms.median)),
            ("T_gemm", &|(_, s)| ms(s.t_gemm_ms.median)),
            ("T_serial", &|(_, s)| ms(s.t_serial_ms.median)),
            ("E %", &|(_, s)| percent(s.overlap_efficiency.filter(|_| resolved_sustained(s)))),
            ("rounds", &|(row, _)| efficiency(row, 1)),
            ("difference", &|(row, s)| {
                percent(s.difference.filter(|_| resolved(row) && resolved_sustained(s)))
            }),
        ],
    );
    format!(
        "\nback to back, {seconds} s each, alternating: times of a call and E, and the rounds' \
         E\n\n{shown}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flat(ms: f64) -> Times {
        Times { p10: ms, median: ms, p90: ms }
    }

    #[test]
    fn the_difference_is_that_of_two_efficiencies() {
        let short = Each { op: flat(1.1), gemm: flat(1.0), comm: flat(0.5), serial: flat(1.5) };
        let sustained = Sustained::new(20.0, 40, [flat(1.3), flat(1.1), flat(1.6)], &short);
        assert!((sustained.overlap_efficiency.unwrap() - 0.6).abs() < 1e-9, "{sustained:?}");
        assert!((sustained.difference.unwrap() + 0.2).abs() < 1e-9, "{sustained:?}");
        let nothing_to_hide = Sustained::new(20.0, 40, [flat(1.3), flat(1.6), flat(1.6)], &short);
        assert_eq!((nothing_to_hide.overlap_efficiency, nothing_to_hide.difference), (None, None));
    }
}
