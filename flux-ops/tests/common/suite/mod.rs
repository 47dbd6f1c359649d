//! What must hold on every machine. Each function of the parts is one test; the modules that
//! run them give them their machine.
#![allow(unused_imports, reason = "each test binary uses its part")]

mod builds;
mod calls;
mod finish;
mod gated;
mod gathered;
mod invariance;
mod leaving;
mod many_calls;
mod messages;
mod norm;
mod partials;
mod quantized;
mod quantized_norm;
mod refusals;
mod residual;
mod results;
mod rows;
mod scaled;
mod sequential;
mod several;
mod uneven;
mod weights;

pub use builds::*;
pub use calls::*;
pub use finish::*;
pub use gated::*;
pub use gathered::*;
pub use invariance::*;
pub use leaving::*;
pub use many_calls::*;
pub use messages::*;
pub use norm::*;
pub use partials::*;
pub use quantized::*;
pub use quantized_norm::*;
pub use refusals::*;
pub use residual::*;
pub use results::*;
pub use rows::*;
pub use scaled::*;
pub use sequential::*;
pub use several::*;
pub use uneven::*;
pub use weights::*;

use super::{Case, Check, Machine, Node, build, build_case, build_several};
use flux_core::OpKind;
use flux_core::problem::Shape;
use flux_kernels::Element;
use flux_ops::{CallError, FusedLinear, Layout};
use flux_transport::Options;
use half::{bf16, f16};
use std::time::Duration;

/// Elements of the tests: on the host and on a device.
pub trait Number: Element + cudarc::driver::DeviceRepr {}
impl Number for bf16 {}
impl Number for f16 {}

/// Less than this is at once: on a device a call in progress ends first, and with NCCL its kernels.
pub(super) fn at_once(machine: Machine) -> Duration {
    Duration::from_secs(if machine == Machine::Host { 1 } else { 10 })
}

pub fn defaults(_: &mut Options) {}

/// Extents for a world: a row block of 128 in each shard and one of a single row in all but the
/// last, tails of columns and of the inner dimension. From three ranks on the first third of them
/// has 8 columns or elements of `k` more. On GPUs, where the tests are optimised,
/// several column blocks and pipeline stages too.
pub fn unaligned(machine: Machine, op: OpKind, world: u32) -> [usize; 3] {
    let [m, n, k] = equal_shards(machine, op, world);
    [m - usize::from(world > 1), n, k]
}

/// The same with a row more, so that all shards are equal.
pub fn equal_shards(machine: Machine, op: OpKind, world: u32) -> [usize; 3] {
    let (w, more) = (world as usize, world as usize / 3 * 8);
    match (op, machine) {
        (OpKind::AllGatherGemm, Machine::Host) => [129 * w, 40 * w + more, 72],
        (OpKind::GemmReduceScatter | OpKind::GemmAllReduce, Machine::Host) => {
            [129 * w, 136, 24 * w + more]
        }
        (OpKind::AllGatherGemm, _) => [129 * w, 328 * w + more, 456],
        (OpKind::GemmReduceScatter | OpKind::GemmAllReduce, _) => [129 * w, 584, 392 * w + more],
    }
}

/// The same with fewer rows in a shard than a tile has.
pub fn few_rows(machine: Machine, op: OpKind, world: u32) -> [usize; 3] {
    let [_, n, k] = unaligned(machine, op, world);
    [21 * world as usize - usize::from(world > 1), n, k]
}

/// Dense layouts of a rank's operands.
pub fn layouts<T: Number>(case: &Case<T>, rank: flux_core::Rank) -> (Layout, Layout, Layout) {
    let dense = |s: Shape| Layout::dense(s.rows as usize, s.cols as usize);
    (
        dense(case.problem.x_shape(rank)),
        dense(case.problem.w_shape(rank)),
        dense(case.y_shape(rank)),
    )
}

/// One call on fresh buffers.
pub fn call<T: Number>(op: &FusedLinear, case: &Case<T>, node: &Node) -> Result<Vec<T>, CallError> {
    let (lx, lw, ly) = layouts(case, node.rank);
    let (x, w) = (node.upload(&case.x(node.rank)), node.upload(&case.w(node.rank)));
    let mut y = node.poisoned(ly.span());
    let (bias, residual) = (
        case.bias(node.rank).map(|bias| node.upload(&bias)),
        case.residual(node.rank).map(|rows| node.upload(&rows)),
    );
    let cols = case.problem.n_local(node.rank) as usize;
    let (bias, residual) = (
        bias.as_ref().map(|bias| node.view(bias, (cols,))),
        residual.as_ref().map(|rows| node.view(rows, ly)),
    );
    {
        let (x, w, mut y) = (node.view(&x, lx), node.view(&w, lw), node.view_mut(&mut y, ly));
        let call = op.call(&x).weight(&w, &mut y);
        let call = if let Some(bias) = &bias { call.bias(bias) } else { call };
        let call = if let Some(residual) = &residual { call.residual(residual) } else { call };
        call.on(node.stream())?;
    }
    Ok(node.download(&y))
}
