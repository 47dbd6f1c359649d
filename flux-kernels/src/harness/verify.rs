//! A whole result on the device against its fp64 reference.

use super::Harness;
use crate::abi::{Fill, RawReport, VerifyParams};
use crate::cuda::LaunchError;
use crate::epilogue::Activation;
use crate::weights::GateLayout;
use flux_core::numerics::SCALE_BLOCK;
use flux_core::problem::Shape;
use flux_core::{Partials, Problem, Rank, SumsTo};
use flux_cuda::Launch;
use flux_cuda::current::{download, upload};

/// Seeds of the two operands of a call.
#[derive(Clone, Copy, Debug)]
pub struct Seeds {
    /// Of the global `x`, `[m, k]`.
    pub x: u64,
    /// Of the global `w`, `[n, k]`.
    pub w: u64,
}

/// What a result is checked against.
#[derive(Clone, Copy, Debug)]
pub struct Expected {
    /// Of the operands.
    pub seeds: Seeds,
    /// Of all operands.
    pub fill: Fill,
    /// Seed of the bias, a matrix `[1, n]`, where there is one.
    pub bias: Option<u64>,
    /// Seed of the residual, a matrix `[m, n]`, where there is one.
    pub residual: Option<u64>,
    /// What is applied to the sum with both.
    pub activation: Activation,
    /// How gates and ups lie in the weights, where there are any.
    pub gates: Option<GateLayout>,
    /// Whether rows are flattened: a sum over the ranks then rounds the rank's own partial sums
    /// too.
    pub flattened: bool,
    /// Ranks of a node, where a GEMM-ReduceScatter sends sums of nodes; 1 where each rank sends to
    /// each.
    pub per_node: u32,
    /// Whether a library's collective sums partial sums that were rounded, of which one has the
    /// bias and the residual: it adds in any order, and rounds after each addition. Without sums
    /// over ranks, whether the product is rounded before the rest of the epilogue.
    pub unfused: bool,
}

/// What a verification found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VerifyReport {
    /// Elements outside of their bound; NaN is outside of any.
    pub violations: u64,
    /// Row and column, in the rank's `y`, of the first of them.
    pub first: Option<(u32, u32)>,
    /// Largest |y - reference|.
    pub max_error: f32,
    /// Largest |reference|.
    pub max_reference: f32,
}

impl VerifyReport {
    /// Whether every element is within its bound.
    pub fn passed(&self) -> bool {
        self.violations == 0
    }
}

/// Elements along `k` of a matrix instruction with 8-bit operands.
const PRODUCT_ELEMENTS: u32 = 32;
/// Relative to the sum of magnitudes, the error of such an instruction: tensor cores keep at least
/// 13 bits (DeepSeek-V3 technical report, arXiv 2412.19437, section 3.3.2, has 14 on H800).
const TENSOR_CORE_ROUNDOFF: f64 = 1.0 / 8192.0;

/// The error that 8-bit operands add to that of sums in fp32, relative to the sum of magnitudes.
/// Each instruction whose sum the next takes has one, and so have both multiplications by scales.
pub fn accumulation_error(problem: &Problem) -> f64 {
    let numerics = problem.numerics();
    if !numerics.operand.is_quantized() {
        return 0.0;
    }
    let elements = if numerics.promotes() { SCALE_BLOCK } else { problem.k_shard() };
    let instructions = elements.div_ceil(PRODUCT_ELEMENTS);
    f64::from(instructions) * TENSOR_CORE_ROUNDOFF + f64::from(f32::EPSILON)
}

impl Harness {
    /// Checks a rank's whole `y` in fp64, and waits for the result.
    ///
    /// The bound of an element of uniform data is a sum:
    ///
    /// - the rounding of the element, and of the bias's addition;
    /// - the rounding of partial sums that ranks send in the op's type;
    /// - `sqrt(k) * 2^-24 * sum |x| |w|` for fp32 accumulation;
    /// - [`accumulation_error`] of 8-bit operands.
    ///
    /// An inexact activation multiplies it by its slope and adds [`Activation::ERROR`]. Integer
    /// data has to be equal, unless the activation is inexact.
    ///
    /// # Safety
    /// `y` is valid, with so many elements from a row to the next, of the problem's
    /// [`y_shape`](Problem::y_shape) for `rank`; with gates it has half as many columns.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] when a call is refused.
    pub unsafe fn verify(
        &self,
        problem: &Problem,
        rank: Rank,
        y: u64,
        row_stride: u64,
        expected: &Expected,
        stream: usize,
    ) -> Result<VerifyReport, LaunchError> {
        let Shape { rows, cols } = GateLayout::result_shape(expected.gates, problem.y_shape(rank));
        let (gate_step, up_offset) =
            expected.gates.map_or((0, 0), |layout| layout.steps(problem.n_local(rank)));
        let numerics = problem.numerics();
        let (row0, col0, segment, own, per_node) = if problem.op().gathers() {
            // The one source is 0. With `own` of 1 its product counts as sent, and is rounded.
            (0, problem.columns(rank).start, problem.k(), u32::from(expected.unfused), 1)
        } else {
            // no source's partial sums stay as they are where tiles span shards
            let own = if expected.flattened { problem.world().get() } else { rank.get() };
            (problem.y_rows(rank).start, 0, problem.k_shard(), own, expected.per_node)
        };
        let owned = problem.op().sums_to() == SumsTo::All && !expected.flattened;
        let params = VerifyParams {
            y,
            row_stride,
            x_seed: expected.seeds.x,
            w_seed: expected.seeds.w,
            report: self.report.address(),
            bias_seed: expected.bias.unwrap_or_default(),
            residual_seed: expected.residual.unwrap_or_default(),
            row0,
            col0,
            rows,
            cols,
            k: problem.k(),
            segment,
            long_segments: problem
                .world()
                .ranks()
                .filter(|&source| problem.k_local(source) == segment)
                .count() as u32,
            segment_group: numerics.row_multiple(),
            scales: numerics.scales as u32,
            accumulation: accumulation_error(problem) as f32,
            own,
            m_shard: if owned { problem.m_shard() } else { 0 },
            full_shards: problem.full_shards(),
            fill: expected.fill as u32,
            operand: numerics.operand as u32,
            output: numerics.output as u32,
            bias: u32::from(expected.bias.is_some()),
            residual: u32::from(expected.residual.is_some()),
            activation: expected.activation as u32,
            gated: u32::from(expected.gates.is_some()),
            gate_step,
            up_offset,
            per_node,
            // A library's collective sums the op's type.
            f32_partials: u32::from(numerics.partials == Partials::F32 && !expected.unfused),
            rounded_additions: if expected.unfused { problem.world().get() } else { 0 },
        };
        let mut raw = RawReport { violations: 0, first: u64::MAX, max_error: 0, max_reference: 0 };
        // SAFETY: the report has the size of `raw`.
        unsafe { upload(self.report.address(), bytemuck::bytes_of(&raw), stream) }?;
        let grid =
            (cols.div_ceil(if expected.gates.is_some() { 16 } else { 32 }), rows.div_ceil(64));
        // A grid is not empty.
        if rows > 0 {
            let launch =
                Launch { grid, threads: 256, shared_bytes: 0, stream, programmatic: false };
            // SAFETY: the kernel takes `VerifyParams`; the caller answers for `y`, the report is
            // ours.
            unsafe { self.module.launch(self.verify, launch, &params) }?;
        }
        // SAFETY: the report has the size of `raw`.
        unsafe { download(self.report.address(), bytemuck::bytes_of_mut(&mut raw), stream) }?;
        Ok(VerifyReport {
            violations: raw.violations,
            first: (raw.violations > 0).then_some(((raw.first >> 32) as u32, raw.first as u32)),
            max_error: f32::from_bits(raw.max_error),
            max_reference: f32::from_bits(raw.max_reference),
        })
    }
}
