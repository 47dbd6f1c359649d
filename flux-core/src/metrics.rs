//! The measures of overlap of the FLUX paper (arXiv 2406.06858, section 5).
//!
//! Invariant: the times of one figure are for the same shapes, element type and ranks. `t_gemm` is
//! the fastest known GEMM for them, unsplit, and the same for every compared method. So a method
//! pays for exposed communication and for what overlap costs its GEMM.

use std::time::Duration;

/// Effective communication time, in seconds: `ECT = t_op - t_gemm`.
///
/// For the serial method it is the time of the collective. 0 is perfect overlap. It is negative if
/// the operation's own GEMM is faster than the reference.
///
/// ```
/// use flux_core::metrics::ect;
/// use std::time::Duration;
/// let (t_op, t_gemm) = (Duration::from_micros(1_700), Duration::from_micros(1_600));
/// assert!((ect(t_op, t_gemm) - 100e-6).abs() < 1e-12);
/// assert!(ect(t_gemm, t_op) < 0.0);
/// ```
pub fn ect(t_op: Duration, t_gemm: Duration) -> f64 {
    t_op.as_secs_f64() - t_gemm.as_secs_f64()
}

/// Overlap efficiency: `E = 1 - ECT / ECT_serial`, with `ECT_serial = t_serial - t_gemm`.
///
/// `t_serial` is the time without overlap: the fastest GEMM and the collective, one after the
/// other. 1 hides all communication, 0 gains nothing, less is slower than serial. `None` if the
/// serial method is not slower than its GEMM.
///
/// ```
/// use flux_core::metrics::overlap_efficiency;
/// use std::time::Duration;
/// let ms = |ms: f64| Duration::from_secs_f64(ms * 1e-3);
/// let efficiency = overlap_efficiency(ms(1.73), ms(1.60), ms(2.12)).unwrap();
/// assert!((efficiency - 0.75).abs() < 1e-6);
/// assert_eq!(overlap_efficiency(ms(2.12), ms(1.60), ms(2.12)), Some(0.0));
/// assert_eq!(overlap_efficiency(ms(1.60), ms(1.60), ms(2.12)), Some(1.0));
/// assert_eq!(overlap_efficiency(ms(1.73), ms(1.60), ms(1.60)), None);
/// ```
pub fn overlap_efficiency(t_op: Duration, t_gemm: Duration, t_serial: Duration) -> Option<f64> {
    let serial = ect(t_serial, t_gemm);
    (serial > 0.0).then(|| 1.0 - ect(t_op, t_gemm) / serial)
}

/// Rate in TFLOP/s; a multiply and an add count as two operations.
///
/// With [`Problem::flop_per_rank`](crate::Problem::flop_per_rank) it is the rate of one GPU.
/// Infinite if `time` is zero.
///
/// ```
/// use flux_core::metrics::tflops;
/// use flux_core::{DType, OpKind, Problem, WorldSize};
/// use std::time::Duration;
/// let world = WorldSize::new(8).unwrap();
/// let p = Problem::new(OpKind::AllGatherGemm, 8192, 49152, 12288, DType::Bf16, world)?;
/// assert!((tflops(p.flop_per_rank(), Duration::from_micros(1_600)) - 773.09).abs() < 0.01);
/// # Ok::<(), flux_core::ProblemError>(())
/// ```
pub fn tflops(flop: u64, time: Duration) -> f64 {
    flop as f64 / time.as_secs_f64() * 1e-12
}
