//! The ops in torch's dispatcher.
//!
//! Invariant: a kernel owns its arguments and frees them, whatever happens; no panic and no Rust
//! error leaves it but as a RuntimeError with the error's message.

mod kernel;
mod shim;

use crate::error::Error;
use crate::ops::Kind;
use flux_ops::MAX_WEIGHTS;
use flux_ops::binding::Class;
use kernel::{kernel, several};
use std::ffi::{CStr, CString};
use std::sync::OnceLock;

const NAMESPACE: &CStr = c"flux_tp";

type Op<'a> = (&'a CStr, &'a CStr, shim::Boxed);

/// Name, schema and kernel of an op with results of its own, then with `out`.
macro_rules! op {
    ($name:literal, $overload:literal, $out:literal, $kind:ident, $pair:literal, $arguments:literal, $results:literal, $outs:literal) => {
        [
            (
                c_str(concat!($name, $overload, "\0")),
                c_str(concat!($name, $overload, "(", $arguments, ") -> ", $results, "\0")),
                kernel::<{ Kind::$kind as u8 }, $pair, false> as shim::Boxed,
            ),
            (
                c_str(concat!($name, $out, "\0")),
                c_str(concat!($name, $out, "(", $arguments, ", *, ", $outs, ") -> ()\0")),
                kernel::<{ Kind::$kind as u8 }, $pair, true> as shim::Boxed,
            ),
        ]
    };
}

/// A column-parallel op: activation by number, `m` or -1, `n` or -1, the number of the
/// communicator.
macro_rules! gathers {
    ($name:literal, $kind:ident) => {
        op!(
            $name,
            "",
            ".out",
            $kind,
            false,
            "Tensor x, Tensor weight, Tensor? bias, int activation, SymInt m, SymInt n, int comm",
            "Tensor",
            "Tensor(a!) out"
        )
    };
}

/// A column-parallel op with the gathered rows as its second result.
macro_rules! hands_out {
    ($name:literal, $kind:ident) => {
        op!(
            $name,
            ".gathered",
            ".gathered_out",
            $kind,
            true,
            "Tensor x, Tensor weight, Tensor? bias, int activation, SymInt m, SymInt n, int comm",
            "(Tensor, Tensor)",
            "Tensor(a!) out, Tensor(b!) x_full"
        )
    };
}

/// A row-parallel op: `k` or -1, `partials` 1 for fp32, else 0, the number of the communicator.
macro_rules! reduces {
    ($name:literal, $kind:ident) => {
        op!(
            $name,
            "",
            ".out",
            $kind,
            false,
            "Tensor x, Tensor weight, Tensor? bias, Tensor? residual, SymInt k, int partials, int \
             comm",
            "Tensor",
            "Tensor(a!) out"
        )
    };
}

/// A row-parallel op with the normalised rows as its second result.
macro_rules! normalises {
    ($name:literal, $kind:ident) => {
        op!(
            $name,
            ".norm",
            ".norm_out",
            $kind,
            true,
            "Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor gain, float eps, \
             SymInt k, int partials, int comm",
            "(Tensor, Tensor)",
            "Tensor(a!) out, Tensor(b!) out_norm"
        )
    };
}

const OPS: [[Op<'static>; 2]; 6] = [
    gathers!("all_gather_matmul", AllGather),
    hands_out!("all_gather_matmul", AllGather),
    reduces!("matmul_reduce_scatter", ReduceScatter),
    reduces!("matmul_all_reduce", AllReduce),
    normalises!("matmul_reduce_scatter", ReduceScatter),
    normalises!("matmul_all_reduce", AllReduce),
];

/// Name, schema and kernel of a column-parallel op with 2, 3 and 4 weights, whose results go where
/// the caller says: torch's interface passes no lists of tensors.
fn several_weights() -> Result<Vec<(CString, CString, shim::Boxed)>, Error> {
    const KERNELS: [shim::Boxed; MAX_WEIGHTS - 1] = [several::<2>, several::<3>, several::<4>];
    let of_count = |(count, kernel): (usize, shim::Boxed)| {
        let list = |of: &dyn Fn(usize) -> String| (0..count).map(of).collect::<Vec<_>>().join(", ");
        let weights = list(&|i| format!("Tensor weight{i}"));
        let biases = list(&|i| format!("Tensor? bias{i}"));
        let columns = list(&|i| format!("SymInt n{i}"));
        // Each output is of an alias set of its own.
        let outs = list(&|i| format!("Tensor(a{i}!) out{i}"));
        let name = format!("all_gather_matmul.weights{count}");
        let schema = format!(
            "{name}(Tensor x, {weights}, {biases}, int activation, SymInt m, {columns}, int comm, \
             *, {outs}, Tensor(b!)? x_full) -> ()"
        );
        let c_string = |text: String| {
            CString::new(text).map_err(|error| Error::new(Class::Other, error.to_string()))
        };
        Ok((c_string(name)?, c_string(schema)?, kernel))
    };
    (2..).zip(KERNELS).map(of_count).collect()
}

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
    let several = several_weights()?;
    let several =
        several.iter().map(|(name, schema, kernel)| (name.as_c_str(), schema.as_c_str(), *kernel));
    let ops: Vec<Op<'_>> = OPS.into_iter().flatten().chain(several).collect();
    shim.declare(NAMESPACE, ops.iter().map(|op| op.1))?;
    [c"CPU", c"CUDA"]
        .into_iter()
        .try_for_each(|key| shim.implement(NAMESPACE, key, ops.iter().map(|op| (op.0, op.2))))
}

pub(crate) use kernel::take_error;
