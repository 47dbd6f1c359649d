//! The arguments of a launch.

use super::trace::TraceBuffer;
use crate::epilogue::Activation;
use crate::operand::{Operand, OperandList};
use crate::weights::GateLayout;

/// A row-major matrix on the device.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// First element; a multiple of 16.
    pub address: u64,
    /// Bytes between rows; a multiple of 16.
    pub row_bytes: u64,
}

impl Matrix {
    /// That of an operand that is not there.
    const NONE: Self = Self { address: 0, row_bytes: 0 };
}

/// Consecutive rows of `y`.
#[derive(Clone, Copy, Debug)]
pub struct ResultRows {
    /// The first.
    pub first: u32,
    /// Their number.
    pub count: u32,
}

/// Pacing that keeps bursts off the links: gaps in the traffic of a CTA, and a limit of CTAs. Zero
/// sends as fast as the link takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pace {
    /// Nanoseconds between 2 KiB pieces of the caller's shard, from the second destination on.
    pub push_gap_ns: u32,
    /// Nanoseconds between 4 KiB pieces of a partial tile.
    pub send_gap_ns: u32,
    /// CTAs that scatter a tile's rows at once, each by one warp while its consumers multiply the
    /// next tile. With 0 the consumers scatter their rows.
    pub in_flight_limit: u32,
}

impl Pace {
    /// Bytes of a piece of the caller's shard.
    pub const PUSHED_BYTES: u32 = flux_core::machine::PUSHED_BYTES as u32;
    /// Bytes of a piece of a partial tile.
    pub const SENT_BYTES: u32 = crate::abi::SENT_BYTES;
}

/// When a launch begins, beside the launch ahead of it on its stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LaunchStart {
    /// When that has ended.
    #[default]
    Behind,
    /// While that ends, of whose work it reads nothing before. Only Hopper's kernels may.
    Early,
    /// The same, but for the first weights, which nothing ahead writes.
    WithWeights,
}

/// The operands and memory of one launch. Shapes are those of the program's problem.
#[derive(Clone, Copy, Debug)]
pub struct LaunchArgs<'a> {
    /// The caller's `x`, and `w`, `y` and what the epilogue reads for each weight; a residual may be
    /// `y`. Operands of the result's extents have the rows of `result_rows`.
    pub operands: OperandList<Matrix>,
    /// The rows of `y` that a residual has.
    pub result_rows: ResultRows,
    /// How gates and ups lie in `w` and the bias; given exactly for a kernel
    /// [with gates](crate::Variant::with_gates). `y` then has half as many columns.
    pub gates: Option<GateLayout>,
    /// The activation of `y`, or of gates; one of [`Activation::of`] the op.
    pub activation: Activation,
    /// Every rank's data region, as mapped on this device.
    pub data: &'a [u64],
    /// Every rank's pad, as mapped on this device.
    pub pads: &'a [u64],
    /// The buffer of peers' scattered rows: this rank's data region, unless peers cannot reach it.
    pub scatter_buffer: u64,
    /// This rank's control block.
    pub control: u64,
    /// This rank's fault block, as the device sees it.
    pub fault: u64,
    /// Bytes between the halves of a data region.
    pub half_stride: u64,
    /// The op's number, or the op-sequence hash of the calls up to this one, that ranks compare on
    /// each other's pads. 0 where the transport compares.
    pub op_hash: u32,
    /// Whether a library's collective comes before or behind the kernel: an abort of the host then
    /// fails the call, and the kernel stamps that it has closed it.
    pub sequential: bool,
    /// Longest wait for another rank, in nanoseconds.
    pub deadline_ns: u64,
    /// Whether a mover outside the kernel reads `x`, and reports its end in the control block.
    pub await_pushed: bool,
    /// CTAs of this launch.
    pub workers: u32,
    /// Whether the kernel is the mover, which pushes the caller's shard.
    pub push: bool,
    /// Pacing of the traffic.
    pub pace: Pace,
    /// Where the call records its time stamps.
    pub trace: Option<&'a TraceBuffer>,
    /// When it begins.
    pub start: LaunchStart,
    /// The stream.
    pub stream: usize,
}

impl LaunchArgs<'_> {
    /// An operand of a weight, or with 0 of the call; address 0 where there is none.
    pub(super) fn operand(&self, operand: Operand, weight: usize) -> Matrix {
        self.operands.get(operand, weight).copied().unwrap_or(Matrix::NONE)
    }
}
