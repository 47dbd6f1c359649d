//! The report of `flux-bench lab core`.
//!
//! Invariant: [`CoreRow::new`] derives every row from times of the same rounds.

use super::contenders::Measured;
use crate::harness::{PlannedLayer, Times, Verdict};
use crate::report::{Column, Head, Origin, columns, dashed, milliseconds, ms, verdict};
use flux_core::metrics;
use serde::{Deserialize, Serialize};

pub(crate) const SCHEMA: u32 = 1;

/// The kernel beside cuBLASLt, with what is needed to judge and repeat it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CoreReport {
    /// `SCHEMA`.
    pub schema: u32,
    /// Where it was measured, and how it is repeated: `device` to `command`.
    #[serde(flatten)]
    pub origin: Origin,
    /// One per op and shape.
    pub rows: Vec<CoreRow>,
}

/// One rank's part of an op at one shape, in milliseconds; [the module](super) explains each time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CoreRow {
    /// What it is of: `op` to `dtype`, those of the world whose rank 0 was measured.
    #[serde(flatten)]
    pub head: Head,
    /// Plan of the world, kernel and CTAs.
    pub plan: String,
    /// The fastest of the algorithms that cuBLASLt proposes first, where it has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub t_gemm_ms: Option<Times>,
    /// Why it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_gemm: Option<String>,
    /// The kernel as a world of 1.
    pub t_core_ms: Times,
    /// Rank 0's program without waits for peers.
    pub t_order_ms: Times,
    /// Rank 0's program, every signal of a peer raised before.
    pub t_flags_ms: Times,
    /// `T_gemm / T_core`, of the medians: 1 is as fast as cuBLASLt, more is faster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub core: Option<f64>,
    /// `T_flags / T_core - 1`, of the medians: what the world's program costs.
    pub flags: f64,
    /// `T_flags / T_order - 1`, of the medians: what looking at raised signals costs.
    pub waits: f64,
    /// Rate of the kernel as a world of 1, of the median.
    pub tflops: f64,
    /// Largest deviation from the fp64 reference, over its largest element.
    pub max_rel_err: f64,
    /// Of operands with scales: the root mean square of the deviations of a sample of the kernel's
    /// elements, over that of the reference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rms_err: Option<f64>,
    /// The same of cuBLASLt's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gemm_rms_err: Option<f64>,
    /// Whether all outputs of the kernel's three contenders were within the bound, and exact for
    /// integers.
    pub verified: bool,
    pub samples: u32,
    /// cuBLASLt with kernels of sm_80, where the portable kernel runs on a later GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm80: Option<Sm80Gemm>,
}

/// cuBLASLt's fastest algorithm with kernels of sm_80.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sm80Gemm {
    pub t_gemm_ms: Times,
    /// `T_gemm / T_core`, of the medians.
    pub core: f64,
    /// Names of the kernels.
    pub kernels: Vec<String>,
}

impl CoreRow {
    /// The row of a case, from its times.
    pub(super) fn new(
        case: &PlannedLayer,
        plan: String,
        measured: Measured,
        verdict: Verdict,
        samples: u32,
    ) -> Self {
        let t_gemm_ms = measured.gemm;
        let [t_core_ms, t_order_ms, t_flags_ms] = measured.ours;
        let problem = &case.problem;
        Self {
            head: Head::new(&case.name, problem),
            plan,
            t_gemm_ms,
            no_gemm: None,
            t_core_ms,
            t_order_ms,
            t_flags_ms,
            core: t_gemm_ms.map(|gemm| gemm.median / t_core_ms.median),
            flags: t_flags_ms.median / t_core_ms.median - 1.0,
            waits: t_flags_ms.median / t_order_ms.median - 1.0,
            tflops: metrics::tflops(problem.flop_per_rank(), milliseconds(t_core_ms)),
            max_rel_err: verdict.max_rel_err(),
            rms_err: None,
            gemm_rms_err: None,
            verified: verdict.ok(),
            samples,
            sm80: None,
        }
    }

    /// Of what cuBLASLt's kernels of sm_80 took.
    pub(super) fn sm80(&self, t_gemm_ms: Times, kernels: Vec<String>) -> Sm80Gemm {
        Sm80Gemm { t_gemm_ms, core: t_gemm_ms.median / self.t_core_ms.median, kernels }
    }
}

impl CoreReport {
    /// Whether every row's numbers were verified.
    pub fn verified(&self) -> bool {
        self.rows.iter().all(|r| r.verified)
    }
}

fn percent(part: f64) -> String {
    format!("{:.1}", part * 100.0)
}

/// The report as text: what was measured and what it includes, then a line a row.
pub(super) fn table(report: &CoreReport) -> String {
    let first = report.rows.first();
    let (tp, samples) = first.map_or((0, 0), |r| (r.head.tp, r.samples));
    let dtype = first.map_or("", |r| &r.head.dtype);
    let sm80 = report.rows.iter().any(|r| r.sm80.is_some());
    let scaled = report.rows.iter().any(|r| r.rms_err.is_some());
    let mut all: Vec<Column<'_, CoreRow>> = vec![
        ("T_gemm ms", &|r| dashed(r.t_gemm_ms.map(|gemm| ms(gemm.median)))),
        ("T_core ms", &|r| ms(r.t_core_ms.median)),
        ("core %", &|r| dashed(r.core.map(percent))),
        ("T_order ms", &|r| ms(r.t_order_ms.median)),
        ("T_flags ms", &|r| ms(r.t_flags_ms.median)),
        ("flags %", &|r| format!("{:+.2}", r.flags * 100.0)),
        ("waits %", &|r| format!("{:+.2}", r.waits * 100.0)),
        ("TFLOP/s", &|r| format!("{:.0}", r.tflops)),
        ("verified", &|r| verdict(r.verified, r.max_rel_err)),
    ];
    let of_scaled: [Column<'_, CoreRow>; 2] = [
        ("rms err", &|r| dashed(r.rms_err.map(|err| format!("{err:.2e}")))),
        ("cuBLASLt's", &|r| dashed(r.gemm_rms_err.map(|err| format!("{err:.2e}")))),
    ];
    let of_sm80: [Column<'_, CoreRow>; 3] = [
        ("T_sm80 ms", &|r| dashed(r.sm80.as_ref().map(|g| ms(g.t_gemm_ms.median)))),
        ("sm80 %", &|r| dashed(r.sm80.as_ref().map(|g| percent(g.core)))),
        ("its kernels", &|r| dashed(r.sm80.as_ref().map(|g| g.kernels.join(" + ")))),
    ];
    all.extend(of_scaled.into_iter().filter(|_| scaled));
    all.extend(of_sm80.into_iter().filter(|_| sm80));
    let mut explained = String::new();
    if sm80 {
        explained += "T_sm80: best cuBLASLt algorithm with kernels of sm_80; sm80 % = T_sm80 / \
                      T_core\n";
    }
    if scaled {
        explained += "rms err: of a sample against fp64, the kernel's and cuBLASLt's\n";
    }
    let mut reasons: Vec<&str> = report.rows.iter().filter_map(|r| r.no_gemm.as_deref()).collect();
    reasons.dedup();
    for why in reasons {
        explained += why;
        explained.push('\n');
    }
    format!(
        "{}, one GPU as rank 0 of {tp}, {dtype}\nmedians of {samples} rounds; core % = T_gemm / \
         T_core, flags % = T_flags / T_core - 1, waits % = T_flags / T_order - 1\n\
         T_gemm: best cuBLASLt algorithm at the rank's shape; T_core: the kernel on it without \
         peers\n\
         T_flags: the rank's tile program with every signal raised before; T_order: the same \
         without its waits for peers\n\
         both include the order of shards, the close, and: ag_gemm peers' rows from the gather \
         buffer, nothing pushed; gemm_rs partial tiles sent to memory of\n\
         this GPU at the op's pace with their signals, and the peers' partial tiles read and \
         added\n{explained}\n{}",
        report.origin.device,
        columns(&report.rows, (Head::COLUMNS, |r| &r.head), &all)
    )
}
