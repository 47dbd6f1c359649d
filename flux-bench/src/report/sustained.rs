//! Calls back to back, beside the rounds of the same row.
//!
//! Invariant: both efficiencies follow one formula, so their difference is the machine's.

use super::table::stands_out;
use super::{Each, Head, Row, dashed, milliseconds, ms, resolved};
use crate::harness::Times;
use flux_core::metrics;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;

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
    let mut text = String::new();
    for row in rows {
        let Some(s) = &row.sustained else { continue };
        if text.is_empty() {
            let _ = writeln!(
                text,
                "\nback to back, {} s each, alternating: times of a call and E, and the rounds' \
                 E\n",
                s.seconds
            );
            let _ = writeln!(
                text,
                "{}   T_op ms    T_gemm  T_serial     E %  rounds  difference",
                Head::ABOVE
            );
        }
        let (sustained, rounds) =
            (stands_out(&s.t_serial_ms, &s.t_gemm_ms, s.blocks), resolved(row));
        let shown = |value: Option<f64>| dashed(value.map(|v| format!("{:.1}", v * 100.0)));
        let [op, gemm, serial] = [s.t_op_ms, s.t_gemm_ms, s.t_serial_ms].map(|t| ms(t.median));
        let e = shown(s.overlap_efficiency.filter(|_| sustained));
        let of_rounds = shown(row.overlap_efficiency.filter(|_| rounds));
        let difference = shown(s.difference.filter(|_| sustained && rounds));
        let _ = writeln!(
            text,
            "{} {op:>9} {gemm:>9} {serial:>9} {e:>7} {of_rounds:>7} {difference:>11}",
            row.head.line()
        );
    }
    text
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
