//! The quantising kernel, from torch's dispatcher.

use super::kernel::{Place, guarded};
use super::shim::{Shim, Tensor};
use crate::error::Error;
use crate::member::{here, named};
use crate::operand::scales;
use crate::ops::epsilon;
use flux_ops::{Operand, QuantizeOperands};

/// The kernel.
pub(super) extern "C-unwind" fn quantize(stack: *mut u64, arguments: u64, _results: u64) {
    // SAFETY: the dispatcher gives this many arguments, and keeps them until the kernel returns.
    let stack = unsafe { std::slice::from_raw_parts(stack, arguments as usize) };
    // SAFETY: these are the arguments of the schema, which the kernel owns.
    guarded(|shim| unsafe { run(shim, stack) });
}

/// # Safety
/// `stack` has the arguments of the schema, and they are taken once.
unsafe fn run(shim: &'static Shim, stack: &[u64]) -> Result<(), Error> {
    let mut arguments = stack.iter().copied();
    let mut next = || arguments.next().unwrap_or_default();
    // SAFETY: the schema has a tensor at each place that this is called for.
    let tensor = |argument| unsafe { Tensor::take(shim, argument) };
    // SAFETY: the schema has an optional argument at each place that this is called for.
    let optional = |argument| unsafe { shim.take_optional(argument) }.map(tensor);
    let (x, gain, scale) = (tensor(next()), optional(next()), optional(next()));
    let (eps, form, comm) = (epsilon(f64::from_bits(next())), next(), next());
    let (out, out_scale) = (tensor(next()), optional(next()));
    let member = named(comm)?;
    let member = here(&*member)?;
    let place = Place { shim, member };
    let operand = |kind, name, tensor: &Tensor| place.operand(kind, name, &tensor.meta()?);
    let of = |kind, name, tensor: Option<Tensor>| {
        tensor.map(|tensor| operand(kind, name, &tensor)).transpose()
    };
    let operands = QuantizeOperands {
        x: operand(Operand::X, "x", &x)?,
        norm: of(Operand::Gain, "gain", gain)?.map(|gain| (gain, eps)),
        scales: scales(form)?,
        scale: of(Operand::ScaleX, "scale", scale)?,
        out: operand(Operand::X, "out", &out)?,
        out_scale: of(Operand::ScaleX, "out_scale", out_scale)?,
    };
    let stream = place.stream(&x.meta()?)?;
    // SAFETY: torch keeps the operands until the call has ended on the stream; outputs are
    // the caller's to write.
    Ok(unsafe { member.quantizer()?.run(&operands, stream) }?)
}
