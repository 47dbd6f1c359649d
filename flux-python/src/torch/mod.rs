//! The ops in torch's dispatcher.
//!
//! Invariant: a kernel owns its arguments and frees them, whatever happens; no panic and no Rust
//! error leaves it but as a RuntimeError with the error's message.

mod kernel;
mod shim;

use crate::error::Error;
use crate::ops::Kind;
use kernel::kernel;
use std::ffi::CStr;

const NAMESPACE: &CStr = c"flux_tp";

/// Names, schemas and kernels: each op with a result of its own, and with `out`.
const OPS: [(&CStr, &CStr, shim::Boxed); 4] = [
    (
        c"all_gather_matmul",
        c"all_gather_matmul(Tensor x, Tensor weight, Tensor? bias, int activation, SymInt m, int comm) -> Tensor",
        kernel::<{ Kind::AllGather as u8 }, false>,
    ),
    (
        c"all_gather_matmul.out",
        c"all_gather_matmul.out(Tensor x, Tensor weight, Tensor? bias, int activation, SymInt m, int comm, *, Tensor(a!) out) -> ()",
        kernel::<{ Kind::AllGather as u8 }, true>,
    ),
    (
        c"matmul_reduce_scatter",
        c"matmul_reduce_scatter(Tensor x, Tensor weight, Tensor? bias, int activation, SymInt m, int comm) -> Tensor",
        kernel::<{ Kind::ReduceScatter as u8 }, false>,
    ),
    (
        c"matmul_reduce_scatter.out",
        c"matmul_reduce_scatter.out(Tensor x, Tensor weight, Tensor? bias, int activation, SymInt m, int comm, *, Tensor(a!) out) -> ()",
        kernel::<{ Kind::ReduceScatter as u8 }, true>,
    ),
];

/// Registers the ops with the torch that has loaded these libraries; once a process.
pub(crate) fn register(cpu: &str, cuda: Option<&str>) -> Result<(), Error> {
    if !shim::load(cpu, cuda)? {
        return Ok(());
    }
    let Some(shim) = shim::shim() else { return Ok(()) };
    shim.declare(NAMESPACE, OPS.iter().map(|op| op.1))?;
    [c"CPU", c"CUDA"].into_iter().try_for_each(|key| shim.implement(NAMESPACE, key, OPS.iter().map(|op| (op.0, op.2))))
}

pub(crate) use kernel::take_error;
