//! The ops in torch's dispatcher: one kernel an op, which writes where the caller says.
//!
//! Invariant: a kernel owns its arguments and frees them, whatever happens; no panic and no Rust
//! error leaves it but as a RuntimeError with the error's message.

mod kernel;
mod quantize;
mod shim;

use crate::error::Error;
use crate::operand::further_inputs;
use crate::ops::Kind;
use kernel::kernel;
use quantize::quantize;
use std::ffi::{CStr, CString};
use std::sync::OnceLock;

const NAMESPACE: &CStr = c"flux_tp";

/// The quantising kernel's declaration: rows of `x`, normalised before where there is a gain, as
/// E4M3 with scales of the form of this number: in `out_scale`, `[groups, rows]`, or behind each row
/// in `out`. `scale` is the given one of a tensor.
const QUANTIZE: &CStr =
    c"quantize_rows(Tensor x, Tensor? gain, Tensor? scale, float eps, int scales, \
    int comm, Tensor(a!) out, Tensor(b!)? out_scale) -> ()";

/// Name and kernel of each op.
const OPS: [(&CStr, shim::Boxed); 3] = [
    (c"all_gather_matmul", kernel::<{ Kind::AllGather as u8 }>),
    (c"matmul_reduce_scatter", kernel::<{ Kind::ReduceScatter as u8 }>),
    (c"matmul_all_reduce", kernel::<{ Kind::AllReduce as u8 }>),
];

/// The schema of an op.
///
/// `weight`, `split` and `out` are of each weight; `split` is `n` of an op that gathers and `k` of
/// the others, of all ranks together. The other operands follow the weights. `activation` is a
/// number, `partials` 1 for fp32, else 0, `scales` the number of their form, `norm_scales` that of
/// normalised rows, `constant_weights` as [`Operands`](flux_ops::Operands) has it, and `comm` the
/// number of the communicator. With a gain `second` are the normalised rows, and their scales go to
/// `second_scale` or behind them; else it are the gathered rows.
fn schema(name: &CStr) -> CString {
    let further = further_inputs().map(|operand| {
        let list = if operand.is_of_weight() { "[]" } else { "" };
        format!("Tensor{list}? {}, ", operand.name(0))
    });
    let text = format!(
        "{}(Tensor x, Tensor[] weight, {}float eps, int activation, SymInt m, SymInt[]? split, int \
         partials, int scales, int norm_scales, bool constant_weights, int comm, Tensor(a!)[] out, \
         Tensor(b!)? second, Tensor(c!)? second_scale) -> ()",
        name.to_string_lossy(),
        further.collect::<String>()
    );
    CString::new(text).unwrap_or_default()
}

/// Registers the ops with the torch that has loaded these libraries. A second call returns the
/// first one's result: torch takes no declaration twice.
pub(crate) fn register(cpu: &str, cuda: Option<&str>) -> Result<(), Error> {
    static DONE: OnceLock<Result<(), Error>> = OnceLock::new();
    DONE.get_or_init(|| register_once(cpu, cuda)).clone()
}

fn register_once(cpu: &str, cuda: Option<&str>) -> Result<(), Error> {
    let shim = shim::load(cpu, cuda)?;
    let schemas = OPS.map(|(name, _)| schema(name));
    shim.declare(NAMESPACE, schemas.iter().map(CString::as_c_str).chain([QUANTIZE]))?;
    let kernels = || OPS.into_iter().chain([(c"quantize_rows", quantize as shim::Boxed)]);
    [c"CPU", c"CUDA"].into_iter().try_for_each(|key| shim.implement(NAMESPACE, key, kernels()))
}

pub(crate) use kernel::take_error;
