//! What calls back to back took, at the clocks and temperatures of a card at work.
//!
//! Invariant: contenders take turns in blocks of equal length, so each runs at the clocks that its
//! own power leaves it, on a card as warm as for the others.

use super::contender::Contender;
use super::report::CoreRow;
use crate::harness::Times;
use crate::report::{Head, ms};
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;

/// Calls back to back. Times are in milliseconds, of one call, as means over a block of calls;
/// percentiles are over blocks. Those of the kernel include raising what peers would have raised,
/// which takes microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SustainedCore {
    /// How long each contender ran in all, in seconds.
    pub seconds: f64,
    /// Blocks of each contender.
    pub blocks: u32,
    /// cuBLASLt's algorithm that was fastest in rounds.
    pub t_gemm_ms: Times,
    /// The kernel as a world of 1.
    pub t_core_ms: Times,
    /// Rank 0's program, every signal of a peer raised before.
    pub t_flags_ms: Times,
    /// `T_gemm / T_core`, of the medians.
    pub core: f64,
    /// `T_flags / T_core - 1`, of the medians.
    pub flags: f64,
}

impl SustainedCore {
    /// Who takes turns.
    pub(super) const TURNS: [Contender; 3] = [Contender::Gemm, Contender::Core, Contender::Flags];

    /// From the times of [`Self::TURNS`].
    pub(super) fn new(seconds: f64, blocks: u32, [t_gemm_ms, t_core_ms, t_flags_ms]: [Times; 3]) -> Self {
        let core = t_gemm_ms.median / t_core_ms.median;
        let flags = t_flags_ms.median / t_core_ms.median - 1.0;
        Self { seconds, blocks, t_gemm_ms, t_core_ms, t_flags_ms, core, flags }
    }
}

/// The rows that have it as text; empty where none has.
pub(super) fn table(rows: &[CoreRow]) -> String {
    let mut text = String::new();
    for row in rows {
        let Some(s) = &row.sustained else { continue };
        if text.is_empty() {
            let _ = writeln!(text, "\nback to back, {} s each, by turns: times of a call\n", s.seconds);
            let _ = writeln!(text, "{} T_gemm ms T_core ms    core % T_flags ms   flags %", Head::ABOVE);
        }
        let [gemm, core, flags] = [s.t_gemm_ms, s.t_core_ms, s.t_flags_ms].map(|t| ms(t.median));
        let line = row.head.line();
        let _ = writeln!(text, "{line} {gemm:>9} {core:>9} {:>9.1} {flags:>10} {:>+9.2}", s.core * 100.0, s.flags * 100.0);
    }
    text
}
