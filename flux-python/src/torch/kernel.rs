//! One call from torch's dispatcher.
//!
//! Invariant: [`Arguments::take`] and [`Several::take`] read the arguments in the order of the
//! schemas in `torch/mod.rs`.

use super::shim::{Meta, Shim, Tensor, shim};
use crate::error::Error;
use crate::member::{Member, here, named};
use crate::operand::{Dims, Library, Weight, activation, names, operand, weight};
use crate::ops::{Call, Kind, Norm, WeightOperands, epsilon};
use flux_ops::binding::Class;
use flux_ops::{DType, Epsilon, Location, Partials, RawTensor};
use flux_transport::Stream;
use std::cell::RefCell;
use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    /// The last error of a kernel on this thread: an exception of C++ carries its message alone,
    /// and is caught on the thread that ran the kernel.
    static LAST: RefCell<Option<Error>> = const { RefCell::new(None) };
}

/// Takes the error that a kernel has left on this thread with this message.
pub(crate) fn take_error(message: &str) -> Option<Error> {
    LAST.with_borrow_mut(|last| last.take_if(|error| message.contains(error.message())))
}

/// Which of an op's schemas a call follows.
#[derive(Clone, Copy)]
struct Form {
    kind: Kind,
    /// With a second result: the gathered rows of an op that gathers; else the normalised ones, of
    /// which gain and eps are arguments.
    pair: bool,
    /// Results go where the caller says.
    out: bool,
}

/// The kernel of an op: [`Kind`] by number, with or without a second result and `out`.
pub(super) extern "C-unwind" fn kernel<const KIND: u8, const PAIR: bool, const OUT: bool>(
    stack: *mut u64,
    arguments: u64,
    results: u64,
) {
    // SAFETY: the dispatcher gives room for all arguments and all results.
    let stack = unsafe { std::slice::from_raw_parts_mut(stack, arguments.max(results) as usize) };
    // SAFETY: these are the arguments of the op's schema, which the kernel owns.
    guarded(|shim| unsafe {
        run(shim, Form { kind: Kind::from_number(KIND), pair: PAIR, out: OUT }, stack)
    });
}

/// The kernel of an all_gather_matmul with `N` weights.
pub(super) extern "C-unwind" fn several<const N: usize>(
    stack: *mut u64,
    arguments: u64,
    _results: u64,
) {
    // SAFETY: the dispatcher gives all arguments.
    let stack = unsafe { std::slice::from_raw_parts(stack, arguments as usize) };
    // SAFETY: these are the arguments of the op's schema, which the kernel owns.
    guarded(|shim| unsafe { run_several::<N>(shim, stack) });
}

/// Runs a kernel, and throws its error.
fn guarded(run: impl FnOnce(&'static Shim) -> Result<(), Error>) {
    let Some(shim) = shim() else { return };
    let done = catch_unwind(AssertUnwindSafe(|| run(shim)));
    let error = match done {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error,
        Err(_panic) => {
            Error::new(Class::Other, "flux_tp panicked: see the message on standard error")
        }
    };
    let message = CString::new(error.message().replace('\0', " ")).unwrap_or_default();
    // A thread that ends has no one to take the error.
    let _previous = LAST.try_with(|last| last.replace(Some(error)));
    shim.throw(&message);
}

/// The arguments of a call.
struct Arguments {
    x: Tensor,
    weight: Tensor,
    bias: Option<Tensor>,
    residual: Option<Tensor>,
    norm: Option<(Tensor, Epsilon)>,
    partials: Partials,
    activation: u64,
    /// -1: not said.
    m: i64,
    /// `n` or `k` of all ranks together. -1: not said.
    split: i64,
    comm: u64,
    out: Option<Tensor>,
    out_second: Option<Tensor>,
}

impl Arguments {
    /// Takes what the kernel owns, before anything can fail.
    ///
    /// # Safety
    /// `stack` has the arguments of the form's schema, and they are taken once.
    unsafe fn take(shim: &'static Shim, form: Form, stack: &[u64]) -> Self {
        let mut arguments = stack.iter().copied();
        let mut next = || arguments.next().unwrap_or_default();
        let gathers = form.kind == Kind::AllGather;
        // SAFETY: the dispatcher has put a tensor there.
        let tensor = |argument| unsafe { Tensor::take(shim, argument) };
        // SAFETY: the dispatcher has put an optional tensor there.
        let optional = |argument| unsafe { shim.take_optional(argument) }.map(tensor);
        Self {
            x: tensor(next()),
            weight: tensor(next()),
            bias: optional(next()),
            residual: if gathers { None } else { optional(next()) },
            norm: (form.pair && !gathers)
                .then(|| (tensor(next()), epsilon(f64::from_bits(next())))),
            activation: if gathers { next() } else { 0 },
            m: if gathers { next().cast_signed() } else { -1 },
            split: next().cast_signed(),
            partials: if !gathers && next() != 0 { Partials::F32 } else { Partials::Output },
            comm: next(),
            out: form.out.then(|| tensor(next())),
            out_second: (form.pair && form.out).then(|| tensor(next())),
        }
    }
}

/// An extent that the caller may say; -1 where it does not.
fn extent(name: &str, value: i64) -> Result<Option<usize>, Error> {
    match value {
        -1 => Ok(None),
        said => usize::try_from(said)
            .map(Some)
            .map_err(|_| Error::operand(format!("{name} = {said}: give a number from 0 on"))),
    }
}

/// # Safety
/// `stack` has the arguments of the form's schema, and they are taken once.
unsafe fn run(shim: &'static Shim, form: Form, stack: &mut [u64]) -> Result<(), Error> {
    // SAFETY: as above.
    let arguments = unsafe { Arguments::take(shim, form, stack) };
    let kind = form.kind;
    let member = named(arguments.comm)?;
    let member = here(&*member)?;
    let (x, weight) = (arguments.x.meta()?, arguments.weight.meta()?);
    let m = kind.rows(extent("m", arguments.m)?, x.sizes[0], &member.comm);
    let place = Place { shim, member };
    let x_operand = place.operand("x", &x)?;
    let result = |given: Option<Tensor>, shape| match given {
        Some(given) => Ok(given),
        None => shim.empty(shape, x.dtype, x.device),
    };
    let activation = activation(arguments.activation)?;
    let shape = kind.result(m, activation.columns(weight.sizes[0]), &member.comm);
    let gathers = kind == Kind::AllGather;
    let y = result(arguments.out, shape)?;
    let of_second = if gathers { [m, x.sizes[1]] } else { shape };
    let second = form.pair.then(|| result(arguments.out_second, of_second)).transpose()?;
    let stream = place.stream(&x)?;
    let operand = |name, tensor: &Tensor| place.operand(name, &tensor.meta()?);
    let norm = match (&arguments.norm, &second) {
        (Some((gain, eps)), Some(rows)) => {
            Some(Norm { gain: operand("gain", gain)?, eps: *eps, rows: operand("y_norm", rows)? })
        }
        _ => None,
    };
    let of_weight = WeightOperands {
        weight: place.weight("weight", &weight)?,
        bias: arguments.bias.as_ref().map(|bias| operand("bias", bias)).transpose()?,
        y: operand("out", &y)?,
        split: extent(if gathers { "n" } else { "k" }, arguments.split)?,
    };
    let call = Call {
        kind,
        activation,
        m,
        x: x_operand,
        weights: &[of_weight],
        residual: arguments
            .residual
            .as_ref()
            .map(|residual| operand("residual", residual))
            .transpose()?,
        norm,
        partials: arguments.partials,
        gathered: second
            .as_ref()
            .filter(|_| gathers)
            .map(|rows| operand("x_full", rows))
            .transpose()?,
        stream,
    };
    // SAFETY: torch keeps the operands until the call has ended on the stream; results are new, or
    // the caller's to write.
    unsafe { member.call_in_kernel(&call) }?;
    if !form.out {
        for (place, made) in stack.iter_mut().zip([Some(y), second].into_iter().flatten()) {
            *place = made.into_result();
        }
    }
    Ok(())
}

/// The arguments of a call with `N` weights.
struct Several<const N: usize> {
    x: Tensor,
    weights: [Tensor; N],
    biases: [Option<Tensor>; N],
    activation: u64,
    /// -1: not said.
    m: i64,
    /// `n` of each weight, of all ranks together. -1: not said.
    split: [i64; N],
    comm: u64,
    out: [Tensor; N],
    x_full: Option<Tensor>,
}

impl<const N: usize> Several<N> {
    /// As [`Arguments::take`].
    ///
    /// # Safety
    /// `stack` has the arguments of the schema with `N` weights, and they are taken once.
    unsafe fn take(shim: &'static Shim, stack: &[u64]) -> Self {
        let mut arguments = stack.iter().copied();
        let mut next = || arguments.next().unwrap_or_default();
        // SAFETY: the dispatcher has put a tensor there.
        let tensor = |argument| unsafe { Tensor::take(shim, argument) };
        // SAFETY: the dispatcher has put an optional tensor there.
        let optional = |argument| unsafe { shim.take_optional(argument) }.map(tensor);
        Self {
            x: tensor(next()),
            weights: [(); N].map(|()| tensor(next())),
            biases: [(); N].map(|()| optional(next())),
            activation: next(),
            m: next().cast_signed(),
            split: [(); N].map(|()| next().cast_signed()),
            comm: next(),
            out: [(); N].map(|()| tensor(next())),
            x_full: optional(next()),
        }
    }
}

/// # Safety
/// `stack` has the arguments of the schema with `N` weights, and they are taken once.
unsafe fn run_several<const N: usize>(shim: &'static Shim, stack: &[u64]) -> Result<(), Error> {
    // SAFETY: as above.
    let arguments = unsafe { Several::<N>::take(shim, stack) };
    let member = named(arguments.comm)?;
    let member = here(&*member)?;
    let place = Place { shim, member };
    let operand = |name, tensor: &Tensor| place.operand(name, &tensor.meta()?);
    let optional = |name, tensor: &Option<Tensor>| {
        tensor.as_ref().map(|tensor| operand(name, tensor)).transpose()
    };
    let x = arguments.x.meta()?;
    let x_operand = place.operand("x", &x)?;
    let of_weight = |index: usize| {
        let [weight, bias, out] = names(index, N);
        Ok(WeightOperands {
            weight: place.weight(weight, &arguments.weights[index].meta()?)?,
            bias: optional(bias, &arguments.biases[index])?,
            y: operand(out, &arguments.out[index])?,
            split: extent("n", arguments.split[index])?,
        })
    };
    let kind = Kind::AllGather;
    let call = Call {
        kind,
        activation: activation(arguments.activation)?,
        m: kind.rows(extent("m", arguments.m)?, x.sizes[0], &member.comm),
        x: x_operand,
        weights: &(0..N).map(of_weight).collect::<Result<Vec<_>, Error>>()?,
        residual: None,
        norm: None,
        partials: Partials::Output,
        gathered: optional("x_full", &arguments.x_full)?,
        stream: place.stream(&x)?,
    };
    // SAFETY: torch keeps the operands until the call has ended on the stream; results are the
    // caller's to write.
    unsafe { member.call_in_kernel(&call) }
}

/// Where a call's tensors are.
struct Place<'m> {
    shim: &'static Shim,
    member: &'m Member,
}

impl Place<'_> {
    fn operand(&self, name: &'static str, meta: &Meta) -> Result<RawTensor, Error> {
        let (dtype, location, dims) = self.described(name, meta)?;
        operand(name, meta.address, dtype, location, &dims)
    }

    fn weight(&self, name: &'static str, meta: &Meta) -> Result<Weight, Error> {
        let (dtype, location, dims) = self.described(name, meta)?;
        weight(name, meta.address, dtype, location, &dims)
    }

    /// The stream of a call with this `x`, which is where the communicator works.
    fn stream(&self, x: &Meta) -> Result<Stream<'_>, Error> {
        Ok(match self.member.location() {
            Location::Host => Stream::Host,
            // SAFETY: torch's current stream, which torch keeps.
            Location::Cuda(_) => unsafe { Stream::from_raw(self.shim.current_stream(x.device.1)?) },
        })
    }

    fn described(&self, name: &str, meta: &Meta) -> Result<(DType, Location, Dims), Error> {
        let types = self.shim.types;
        let dtype = match meta.dtype {
            dtype if dtype == types.bf16 => DType::Bf16,
            dtype if dtype == types.f16 => DType::F16,
            _ => {
                return Err(Error::operand(format!(
                    "{name}: its dtype is neither torch.bfloat16 nor torch.float16: convert it"
                )));
            }
        };
        let location = match meta.device {
            (kind, _) if kind == types.cpu => Location::Host,
            (kind, index) if kind == types.cuda => {
                Location::Cuda(u32::try_from(index).unwrap_or(u32::MAX))
            }
            _ => {
                return Err(Error::operand(format!(
                    "{name}: it is on neither the CPU nor a CUDA device: move it"
                )));
            }
        };
        let expected = self.member.location();
        if location != expected {
            return Err(Error::operand(format!(
                "{name} is in {location}, but this rank's communicator works on {expected}: move \
                 it there, or take a communicator of another transport"
            )));
        }
        let [rows, cols] = meta.sizes;
        let Meta { dim, strides, .. } = *meta;
        Ok((dtype, location, Dims { dim, rows, cols, strides, library: Library::Torch }))
    }
}
