//! One call from torch's dispatcher.
//!
//! Arguments: `x`, `weight`, `bias` or none, the number of the activation, `m` or -1, the number of
//! the communicator; then `out`, where the op has it.

use super::shim::{Meta, Shim, Tensor, shim};
use crate::error::Error;
use crate::member::{Member, named};
use crate::operand::{Dims, activation, operand};
use crate::ops::{Call, Kind};
use flux_ops::{DType, Location, RawTensor};
use flux_transport::Stream;
use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

/// The last error of a kernel: an exception of C++ carries its message alone.
static LAST: Mutex<Option<Error>> = Mutex::new(None);

/// Takes the error that a kernel has left with this message.
pub(crate) fn take_error(message: &str) -> Option<Error> {
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    last.take_if(|error| message.contains(&error.message))
}

/// The kernel of an op, [`Kind`] by number, with or without `out`.
pub(super) extern "C-unwind" fn kernel<const KIND: u8, const OUT: bool>(stack: *mut u64, arguments: u64, results: u64) {
    let Some(shim) = shim() else { return };
    let done = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the dispatcher gives room for all arguments and all results.
        let stack = unsafe { std::slice::from_raw_parts_mut(stack, arguments.max(results) as usize) };
        // SAFETY: these are the arguments of the op's schema, which the kernel owns.
        unsafe { run(shim, Kind::from_number(KIND), OUT, stack) }
    }));
    let error = match done {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error,
        Err(_panic) => Error::new("FluxError", "flux_tp panicked: see the message on standard error"),
    };
    let message = CString::new(error.message.replace('\0', " ")).unwrap_or_default();
    *LAST.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    shim.throw(&message);
}

/// # Safety
/// `stack` has the arguments of the op's schema, and they are taken once.
unsafe fn run(shim: &'static Shim, kind: Kind, has_out: bool, stack: &mut [u64]) -> Result<(), Error> {
    // SAFETY: as above; everything that is owned is taken before anything can fail.
    let (x, weight, bias, out) = unsafe {
        let bias = shim.take_optional(stack[2]).map(|bias| Tensor::take(shim, bias));
        (Tensor::take(shim, stack[0]), Tensor::take(shim, stack[1]), bias, has_out.then(|| Tensor::take(shim, stack[6])))
    };
    let (number, m, comm) = (stack[3], stack[4].cast_signed(), stack[5]);
    let member = named(comm)?;
    let member = member.get()?;
    let (x, weight) = (x.meta()?, weight.meta()?);
    let m = kind.rows(usize::try_from(m).ok(), x.sizes[0], &member.comm);
    let place = Place { shim, member };
    let x_operand = place.operand("x", &x)?;
    let made = match &out {
        Some(_) => None,
        None => Some(shim.empty(kind.result(m, weight.sizes[0], &member.comm), x.dtype, x.device)?),
    };
    let y = if let Some(y) = out.as_ref().or(made.as_ref()) { y.meta()? } else { return Ok(()) };
    let stream = match x_operand.location {
        Location::Host => Stream::Host,
        // SAFETY: torch's current stream, which torch keeps.
        Location::Cuda(_) => unsafe { Stream::from_raw(shim.current_stream(x.device.1)?) },
    };
    let bias = bias.map(|bias| place.operand("bias", &bias.meta()?)).transpose()?;
    let (weight, y) = (place.operand("weight", &weight)?, place.operand("out", &y)?);
    let call = Call { kind, activation: activation(number)?, m, x: x_operand, weight, bias, y, stream };
    // SAFETY: torch keeps the operands until the call has ended on the stream; the result is new,
    // or the caller's to write.
    unsafe { member.ops.call(&call) }?;
    if let Some(made) = made {
        stack[0] = made.into_result();
    }
    Ok(())
}

/// Where a call's tensors are.
struct Place<'m> {
    shim: &'static Shim,
    member: &'m Member,
}

impl Place<'_> {
    fn operand(&self, name: &'static str, meta: &Meta) -> Result<RawTensor, Error> {
        let types = self.shim.types;
        let dtype = match meta.dtype {
            dtype if dtype == types.bf16 => DType::Bf16,
            dtype if dtype == types.f16 => DType::F16,
            _ => return Err(Error::operand(format!("{name}: its dtype is neither torch.bfloat16 nor torch.float16: convert it"))),
        };
        let location = match meta.device {
            (kind, _) if kind == types.cpu => Location::Host,
            (kind, index) if kind == types.cuda => Location::Cuda(u32::try_from(index).unwrap_or(u32::MAX)),
            _ => return Err(Error::operand(format!("{name}: it is on neither the CPU nor a CUDA device: move it"))),
        };
        let expected = self.member.location();
        if location != expected {
            return Err(Error::operand(format!(
                "{name} is in {location}, but this rank's communicator works on {expected}: move it there, or take a communicator of \
                 another transport"
            )));
        }
        let [rows, cols] = meta.sizes;
        let dims = Dims { dim: meta.dim, rows, cols, strides: meta.strides };
        operand(name, meta.address, dtype, location, &dims)
    }
}
