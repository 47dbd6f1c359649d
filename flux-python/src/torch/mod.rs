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

type Op = (&'static CStr, &'static CStr, shim::Boxed);

/// Name, schema and kernel of an op with a result of its own, then with `out`.
macro_rules! op {
    ($name:literal, $kind:ident) => {
        [
            (
                c_str(concat!($name, "\0")),
                c_str(concat!($name, "(Tensor x, Tensor weight, Tensor? bias, int activation, SymInt m, int comm) -> Tensor\0")),
                kernel::<{ Kind::$kind as u8 }, false> as shim::Boxed,
            ),
            (
                c_str(concat!($name, ".out\0")),
                c_str(concat!(
                    $name,
                    ".out(Tensor x, Tensor weight, Tensor? bias, int activation, SymInt m, int comm, *, Tensor(a!) out) -> ()\0"
                )),
                kernel::<{ Kind::$kind as u8 }, true> as shim::Boxed,
            ),
        ]
    };
}

const OPS: [[Op; 2]; 3] =
    [op!("all_gather_matmul", AllGather), op!("matmul_reduce_scatter", ReduceScatter), op!("matmul_all_reduce", AllReduce)];

const fn c_str(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("the text ends with its only zero"),
    }
}

/// Registers the ops with the torch that has loaded these libraries; once a process.
pub(crate) fn register(cpu: &str, cuda: Option<&str>) -> Result<(), Error> {
    if !shim::load(cpu, cuda)? {
        return Ok(());
    }
    let Some(shim) = shim::shim() else { return Ok(()) };
    shim.declare(NAMESPACE, OPS.iter().flatten().map(|op| op.1))?;
    [c"CPU", c"CUDA"].into_iter().try_for_each(|key| shim.implement(NAMESPACE, key, OPS.iter().flatten().map(|op| (op.0, op.2))))
}

pub(crate) use kernel::take_error;
