//! The ops in torch's dispatcher: one kernel an op, which writes where the caller says.
//!
//! Invariant: a kernel owns its arguments and frees them, whatever happens; no panic and no Rust
//! error leaves it but as a RuntimeError with the error's message.

mod kernel;
mod shim;

use crate::error::Error;
use crate::ops::Kind;
use kernel::kernel;
use std::ffi::CStr;
use std::sync::OnceLock;

const NAMESPACE: &CStr = c"flux_tp";

/// Name, schema and kernel of an op.
///
/// `weight`, `bias`, `split` and `out` are of each weight; `split` is `n` of an op that gathers and
/// `k` of the others, of all ranks together. `activation` is a number, `partials` 1 for fp32, else
/// 0, `constant_weights` as [`Operands`](flux_ops::Operands) has it, and `comm` the number of the
/// communicator. With a gain `second` are the normalised rows, else
/// the gathered ones.
macro_rules! op {
    ($name:literal, $kind:ident) => {
        (
            c_str(concat!($name, "\0")),
            c_str(concat!(
                $name,
                "(Tensor x, Tensor[] weight, Tensor[]? bias, Tensor? residual, Tensor? gain, float \
                 eps, int activation, SymInt m, SymInt[]? split, int partials, bool \
                 constant_weights, int comm, Tensor(a!)[] out, Tensor(b!)? second) -> ()\0"
            )),
            kernel::<{ Kind::$kind as u8 }>,
        )
    };
}

const OPS: [(&CStr, &CStr, shim::Boxed); 3] = [
    op!("all_gather_matmul", AllGather),
    op!("matmul_reduce_scatter", ReduceScatter),
    op!("matmul_all_reduce", AllReduce),
];

const fn c_str(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("the text ends with its only zero"),
    }
}

/// Registers the ops with the torch that has loaded these libraries. A second call returns the
/// first one's result: torch takes no declaration twice.
pub(crate) fn register(cpu: &str, cuda: Option<&str>) -> Result<(), Error> {
    static DONE: OnceLock<Result<(), Error>> = OnceLock::new();
    DONE.get_or_init(|| register_once(cpu, cuda)).clone()
}

fn register_once(cpu: &str, cuda: Option<&str>) -> Result<(), Error> {
    let shim = shim::load(cpu, cuda)?;
    shim.declare(NAMESPACE, OPS.map(|(_, schema, _)| schema))?;
    [c"CPU", c"CUDA"]
        .into_iter()
        .try_for_each(|key| shim.implement(NAMESPACE, key, OPS.map(|(name, _, run)| (name, run))))
}

pub(crate) use kernel::take_error;
