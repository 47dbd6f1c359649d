//! One call from torch's dispatcher.
//!
//! Invariant: [`Arguments::take`] reads the arguments in the order of the schema in `torch/mod.rs`.

use super::shim::{Meta, Shim, Tensor, shim};
use crate::error::Error;
use crate::member::{Member, here, named};
use crate::operand::{
    Dims, Library, Weight, activation, further_inputs, name, numerics, operand, rows_and_scales,
    scales, weight,
};
use crate::ops::{Call, CallWeight, Kind, epsilon};
use flux_ops::binding::Class;
use flux_ops::{
    DType, ElementType, Epsilon, Location, MAX_WEIGHTS, NormSpec, Operand, Operands, Partials,
    RawTensor,
};
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

/// The kernel of an op: [`Kind`] by number.
pub(super) extern "C-unwind" fn kernel<const KIND: u8>(
    stack: *mut u64,
    arguments: u64,
    _results: u64,
) {
    // SAFETY: the dispatcher gives this many arguments, and keeps them until the kernel returns.
    let stack = unsafe { std::slice::from_raw_parts(stack, arguments as usize) };
    guarded(|shim| {
        // SAFETY: these are the arguments of the op's schema, which the kernel owns.
        let arguments = unsafe { Arguments::take(shim, stack) }?;
        arguments.call(shim, Kind::from_number(KIND))
    });
}

/// Runs a kernel; throws what goes wrong.
pub(super) fn guarded(run: impl FnOnce(&'static Shim) -> Result<(), Error>) {
    let Some(shim) = shim() else { return };
    let error = match catch_unwind(AssertUnwindSafe(|| run(shim))) {
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
    weights: Vec<Tensor>,
    /// One of the call, or one of each weight.
    further: Vec<(Operand, Vec<Tensor>)>,
    eps: Epsilon,
    activation: u64,
    m: i64,
    /// `n` of each weight, or `k`, of all ranks together.
    split: Option<Vec<i64>>,
    partials: Partials,
    scales: u64,
    norm_scales: u64,
    constant_weights: bool,
    comm: u64,
    out: Vec<Tensor>,
    /// With a gain the normalised rows, else the gathered ones.
    second: Option<Tensor>,
    /// Of normalised rows.
    second_scale: Option<Tensor>,
}

impl Arguments {
    /// Takes what the kernel owns, before anything else can fail.
    ///
    /// # Safety
    /// `stack` has the arguments of the schema, and they are taken once.
    unsafe fn take(shim: &'static Shim, stack: &[u64]) -> Result<Self, Error> {
        let mut arguments = stack.iter().copied();
        let mut next = || arguments.next().unwrap_or_default();
        // SAFETY: the schema has a tensor at each place that this is called for.
        let tensor = |argument| unsafe { Tensor::take(shim, argument) };
        // SAFETY: the schema has an optional argument at each place that this is called for.
        let optional = |argument| unsafe { shim.take_optional(argument) };
        // SAFETY: the schema has a list at each place that this is called for.
        let list = |argument| unsafe { shim.take_list(argument) };
        let tensors = |argument| {
            let of = list(argument)?;
            Ok::<Vec<_>, Error>(of.into_iter().map(tensor).collect())
        };
        let integers = |argument| {
            let of = list(argument)?;
            Ok::<Vec<_>, Error>(of.into_iter().map(u64::cast_signed).collect())
        };
        let (x, weights) = (tensor(next()), tensors(next())?);
        let mut further = Vec::new();
        for operand in further_inputs() {
            let Some(given) = optional(next()) else { continue };
            let of_weight = operand.is_of_weight();
            let list = if of_weight { tensors(given)? } else { vec![tensor(given)] };
            further.push((operand, list));
        }
        Ok(Self {
            x,
            weights,
            further,
            eps: epsilon(f64::from_bits(next())),
            activation: next(),
            m: next().cast_signed(),
            split: optional(next()).map(integers).transpose()?,
            partials: if next() == 0 { Partials::Output } else { Partials::F32 },
            scales: next(),
            norm_scales: next(),
            constant_weights: next() != 0,
            comm: next(),
            out: tensors(next())?,
            second: optional(next()).map(tensor),
            second_scale: optional(next()).map(tensor),
        })
    }

    fn call(&self, shim: &'static Shim, kind: Kind) -> Result<(), Error> {
        let count = self.weights.len();
        let of_weights = self.further.iter().filter(|(operand, _)| operand.is_of_weight());
        let others = [Some(self.out.len()), self.split.as_ref().map(Vec::len)];
        let mut others = others.into_iter().flatten().chain(of_weights.map(|(_, of)| of.len()));
        if !(1..=MAX_WEIGHTS).contains(&count) || others.any(|n| n != count) {
            return Err(Error::operand(format!(
                "there are {count} weights: give 1 to {MAX_WEIGHTS}, and as many of bias, split \
                 and out"
            )));
        }
        let member = named(self.comm)?;
        let member = here(&*member)?;
        let place = Place { shim, member };
        let operand = |kind: Operand, index, tensor: &Tensor| {
            place.operand(kind, name(kind, index, count), &tensor.meta()?)
        };
        let x = self.x.meta()?;
        let output = self.out[0].meta()?;
        let form = scales(self.scales)?;
        let numerics = numerics(place.dtype("x", &x)?, form, place.dtype("out", &output)?)
            .with_partials(self.partials);
        let given = place.operand(Operand::X, "x", &x)?;
        let mut operands = Operands::new(given);
        if kind == Kind::AllGather && form.of_row(1) > 0 {
            let [_, k] = self.weights[0].meta()?.sizes;
            let (x, scale) = rows_and_scales(given, k, numerics)?;
            operands = Operands::new(x);
            operands.set(Operand::ScaleX, 0, scale);
        }
        let mut weights = Vec::new();
        for (index, tensor) in self.weights.iter().enumerate() {
            let split_name = if kind == Kind::AllGather { "n" } else { "k" };
            let weight = place.weight(name(Operand::W, index, count), &tensor.meta()?)?;
            operands.add_weight(weight.stored, operand(Operand::Y, index, &self.out[index])?);
            let split = self.split.as_ref().map(|of| extent(split_name, of[index])).transpose()?;
            weights.push(CallWeight { weight, split });
        }
        for (kind, list) in &self.further {
            for (index, tensor) in list.iter().enumerate() {
                operands.set(*kind, index, operand(*kind, index, tensor)?);
            }
        }
        let has_norm = operands.get(Operand::Gain, 0).is_some();
        if let Some(second) = &self.second {
            let kind = if has_norm { Operand::YNorm } else { Operand::XFull };
            operands.set(kind, 0, operand(kind, 0, second)?);
        }
        if let Some(scale) = &self.second_scale {
            operands.set(Operand::YNormScale, 0, operand(Operand::YNormScale, 0, scale)?);
        }
        let norm = NormSpec { eps: self.eps, scales: scales(self.norm_scales)? };
        operands.constant_weights = self.constant_weights;
        let call = Call {
            kind,
            activation: activation(self.activation)?,
            m: extent("m", self.m)?,
            operands,
            numerics,
            weights: &weights,
            norm: has_norm.then_some(norm),
            stream: place.stream(&x)?,
        };
        // SAFETY: torch keeps the operands until the call has ended on the stream; results are the
        // caller's to write.
        unsafe { member.call_in_kernel(&call) }
    }
}

/// An extent of all ranks together.
fn extent(name: &str, value: i64) -> Result<usize, Error> {
    usize::try_from(value)
        .map_err(|_| Error::operand(format!("{name} = {value}: give a number from 0 on")))
}

/// Where a call's tensors are.
pub(super) struct Place<'m> {
    pub(super) shim: &'static Shim,
    pub(super) member: &'m Member,
}

impl Place<'_> {
    pub(super) fn operand(
        &self,
        kind: Operand,
        name: &'static str,
        meta: &Meta,
    ) -> Result<RawTensor, Error> {
        let (dtype, location, dims) = self.described(name, meta)?;
        operand(kind, name, meta.address, dtype, location, &dims)
    }

    fn weight(&self, name: &'static str, meta: &Meta) -> Result<Weight, Error> {
        let (dtype, location, dims) = self.described(name, meta)?;
        weight(name, meta.address, dtype, location, &dims)
    }

    /// The stream of a call with this `x`, which is where the communicator works.
    pub(super) fn stream(&self, x: &Meta) -> Result<Stream<'_>, Error> {
        Ok(match self.member.location() {
            Location::Host => Stream::Host,
            // SAFETY: torch's current stream, which torch keeps.
            Location::Cuda(_) => unsafe { Stream::from_raw(self.shim.current_stream(x.device.1)?) },
        })
    }

    fn dtype(&self, name: &str, meta: &Meta) -> Result<DType, Error> {
        let types = self.shim.types;
        match meta.dtype {
            dtype if dtype == types.bf16 => Ok(DType::Bf16),
            dtype if dtype == types.f16 => Ok(DType::F16),
            dtype if dtype == types.e4m3 => Ok(DType::E4m3),
            _ => Err(Error::operand(format!(
                "{name}: its dtype is neither torch.bfloat16 nor torch.float16: convert it"
            ))),
        }
    }

    fn described(&self, name: &str, meta: &Meta) -> Result<(ElementType, Location, Dims), Error> {
        let types = self.shim.types;
        let dtype =
            if meta.dtype == types.f32 { ElementType::F32 } else { self.dtype(name, meta)?.into() };
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
