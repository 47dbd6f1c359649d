//! A call as its caller spells it out.
//!
//! Invariant: nothing happens before [`Call::on`]; until then the call borrows its operands.

use super::FusedLinear;
use crate::error::CallError;
use crate::operands::Operands;
use crate::tensor::{TensorMut, TensorRef, View};
use flux_core::problem::MAX_WEIGHTS;
use flux_kernels::{Element, Operand};
use flux_transport::Stream;
use std::marker::PhantomData;

/// One call of an op, begun by [`FusedLinear::call`]: operands of element type `X`, outputs of `Y`.
///
/// ```
/// use flux_ops::{Activation, AllGatherGemm, TensorMut, TensorRef};
/// use flux_transport::{Communicator, Select, Stream, World};
/// use half::bf16;
///
/// let (m, n, k) = (4, 16, 8);
/// let comm = Communicator::connect_blocking(&World::single(), Select::Host)?;
/// let builder = AllGatherGemm::<bf16>::builder(m, n, k).bias(true);
/// let op = builder.activation(Activation::Relu).build(&comm)?;
///
/// let (x, w, mut y) = (vec![bf16::ONE; m * k], vec![bf16::ONE; n * k], vec![bf16::NAN; m * n]);
/// let bias: Vec<_> = (0..n).map(|column| bf16::from_f32(-(column as f32))).collect();
/// op.call(&TensorRef::host(&x, (m, k))?)
///     .weight(&TensorRef::host(&w, (n, k))?, &mut TensorMut::host(&mut y, (m, n))?)
///     .bias(&TensorRef::host(&bias, (n,))?)
///     .on(Stream::Host)?;
/// assert_eq!(y[..n].iter().map(|y| y.to_f32()).sum::<f32>(), 36.0, "8, 7, ..., 1, 0, 0, ...");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "a call does nothing until it is put on a stream"]
pub struct Call<'a, X, Y = X> {
    op: &'a FusedLinear,
    operands: Operands<View>,
    /// An operand of a weight that was given before any.
    stray: Option<Operand>,
    residual_in_y: bool,
    memory: PhantomData<(&'a mut [X], &'a mut [Y])>,
}

impl<'a, X: Element, Y: Element> Call<'a, X, Y> {
    pub(super) fn new(op: &'a FusedLinear, x: View) -> Self {
        let operands = Operands::new(x);
        Self { op, operands, stray: None, residual_in_y: false, memory: PhantomData }
    }

    fn with(mut self, operand: Operand, view: View) -> Self {
        self.operands.set(operand, 0, view);
        self
    }

    /// A weight and its result, with shapes as [`FusedLinear`] says. An op with
    /// [several weights](crate::Builder::several_weights) takes all of them, in their order.
    ///
    /// ```
    /// use flux_ops::{AllGatherGemm, TensorMut, TensorRef};
    /// use flux_transport::{Communicator, Select, Stream, World};
    /// use half::bf16;
    ///
    /// // Queries of 32 features, keys and values of 16.
    /// let (m, k, columns) = (4, 8, [32, 16, 16]);
    /// let comm = Communicator::connect_blocking(&World::single(), Select::Host)?;
    /// let op = AllGatherGemm::<bf16>::builder(m, 64, k).several_weights(&columns).build(&comm)?;
    ///
    /// let x = vec![bf16::ONE; m * k];
    /// let w = columns.map(|n| vec![bf16::ONE; n * k]);
    /// let mut y = columns.map(|n| vec![bf16::NAN; m * n]);
    /// let [q, keys, values] = &mut y;
    /// op.call(&TensorRef::host(&x, (m, k))?)
    ///     .weight(&TensorRef::host(&w[0], (32, k))?, &mut TensorMut::host(q, (m, 32))?)
    ///     .weight(&TensorRef::host(&w[1], (16, k))?, &mut TensorMut::host(keys, (m, 16))?)
    ///     .weight(&TensorRef::host(&w[2], (16, k))?, &mut TensorMut::host(values, (m, 16))?)
    ///     .on(Stream::Host)?;
    /// assert!(y.iter().flatten().all(|&y| y == bf16::from_f32(8.0)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn weight(mut self, w: &'a TensorRef<'_, X>, y: &'a mut TensorMut<'_, Y>) -> Self {
        self.operands.add_weight(w.view(), y.view());
        self
    }

    /// The bias of the weight before it, of an op built with
    /// [`Builder::bias`](crate::Builder::bias): a view of shape `(cols,)` or `(1, cols)` for the
    /// columns of `y`, with [gates](crate::Builder::gated) for the rows of `w`. It is added once to
    /// every row of the result.
    pub fn bias(self, bias: &'a TensorRef<'_, Y>) -> Self {
        self.of_last_weight(Operand::Bias, bias.view())
    }

    fn of_last_weight(mut self, operand: Operand, view: View) -> Self {
        match self.operands.weight_count() {
            0 => self.stray = Some(operand),
            weights @ 1..=MAX_WEIGHTS => self.operands.set(operand, weights - 1, view),
            // Too many weights are found by their number.
            _ => {}
        }
        self
    }

    /// Of an op with [8-bit operands](crate::TypedLinear::scaled): the scales of `x`, `(1, 1)`, or
    /// with a row for each of `x`. Those of gathered rows lie behind them, as
    /// [`TensorRef::with_scales`] says.
    pub fn scale_x(self, scale: &'a TensorRef<'_, f32>) -> Self {
        self.with(Operand::ScaleX, scale.view())
    }

    /// The scales of the weight before it: `(1, 1)`, one for each row of `w` as `(1, n_r)`, or
    /// `(n_r / 128, k_r / 128)`.
    pub fn scale_w(self, scale: &'a TensorRef<'_, f32>) -> Self {
        self.of_last_weight(Operand::ScaleW, scale.view())
    }

    /// Of an op built with [`Builder::residual`](crate::Builder::residual): a view of the shape of
    /// `y`, which is added to it. Of a [`GemmAllReduce`](crate::GemmAllReduce) it holds the same on
    /// every rank.
    pub fn residual(self, residual: &'a TensorRef<'_, Y>) -> Self {
        self.with(Operand::Residual, residual.view())
    }

    /// As [`residual`](Self::residual), where `y` itself holds it before the call.
    pub const fn residual_in_y(mut self) -> Self {
        self.residual_in_y = true;
        self
    }

    /// Of an op built with [`Builder::rms_norm`](crate::Builder::rms_norm): `gain` is a view of
    /// shape `(cols,)` for the columns of `y`, and `y_norm` of the shape and type of `y`. With
    /// [`Builder::quantized_rms_norm`](crate::Builder::quantized_rms_norm) `y_norm` has rows of
    /// [`F8E4M3`](crate::F8E4M3), with their scales behind them.
    pub fn norm<Z: Element>(
        self,
        gain: &'a TensorRef<'_, Y>,
        y_norm: &'a mut TensorMut<'_, Z>,
    ) -> Self {
        self.with(Operand::Gain, gain.view()).with(Operand::YNorm, y_norm.view())
    }

    /// The scale of all normalised rows, `(1, 1)`, which is read when the stream comes to it. Of an
    /// op with [`quantized_rms_norm`](crate::Builder::quantized_rms_norm) and one scale of all.
    pub fn norm_scale(self, scale: &'a TensorRef<'_, f32>) -> Self {
        self.with(Operand::NormScale, scale.view())
    }

    /// Of an op built with [`Builder::quantized_rms_norm`](crate::Builder::quantized_rms_norm) and
    /// scales of rows or blocks: writes them here, and none behind the codes, so that `y_norm` has
    /// the shape of `y`. `(1, rows)` of rows and `(cols / 128, rows)` of blocks, with any row
    /// stride, and a column where there are no rows. Each rank decides for itself.
    pub fn norm_scales_to(self, scales: &'a mut TensorMut<'_, f32>) -> Self {
        self.with(Operand::YNormScale, scales.view())
    }

    /// Of an [`AllGatherGemm`](crate::AllGatherGemm): copies the gathered rows to `x_full[m, k]`,
    /// for other consumers of them, as the weight's gradient.
    ///
    /// `x_full` shares no memory with other operands, and rows of it may have gaps. The copy
    /// follows the op's kernel on the stream. Each rank decides for itself whether it wants the
    /// rows. Rows with scales of their own are not returned.
    ///
    /// ```
    /// use flux_ops::{AllGatherGemm, TensorMut, TensorRef};
    /// use flux_transport::{Communicator, Select, Stream, World};
    /// use half::bf16;
    ///
    /// let (m, n, k) = (4, 16, 8);
    /// let rank = |world: World| {
    ///     let comm = Communicator::connect_blocking(&world, Select::Host)?;
    ///     let op = AllGatherGemm::<bf16>::builder(m, n, k).build(&comm)?;
    ///
    ///     let shard = vec![bf16::from_f32(comm.rank().get() as f32); m / 2 * k];
    ///     let (w, mut y) = (vec![bf16::ONE; n / 2 * k], vec![bf16::NAN; m * n / 2]);
    ///     let mut x_full = vec![bf16::NAN; m * k];
    ///     let (w, mut y) =
    ///         (TensorRef::host(&w, (n / 2, k))?, TensorMut::host(&mut y, (m, n / 2))?);
    ///     op.call(&TensorRef::host(&shard, (m / 2, k))?)
    ///         .weight(&w, &mut y)
    ///         .gathered(&mut TensorMut::host(&mut x_full, (m, k))?)
    ///         .on(Stream::Host)?;
    ///     assert!(x_full[..m / 2 * k].iter().all(|&x| x == bf16::ZERO));
    ///     assert!(x_full[m / 2 * k..].iter().all(|&x| x == bf16::ONE));
    ///     Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
    /// };
    ///
    /// std::thread::scope(|scope| {
    ///     let spawn = |world| scope.spawn(move || rank(world));
    ///     let ranks: Vec<_> = World::local(2)?.into_iter().map(spawn).collect();
    ///     ranks.into_iter().try_for_each(|rank| rank.join().expect("no assertion fails"))
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
    /// ```
    pub fn gathered(self, x_full: &'a mut TensorMut<'_, X>) -> Self {
        self.with(Operand::XFull, x_full.view())
    }

    /// Says that the weights are there before the work ahead of the call on its stream begins. On
    /// Hopper the call then loads the first of them while the kernel ahead ends. Whoever changes
    /// weights waits for the device before the next call of this kind. It does not change the
    /// result, and ranks need not say the same.
    ///
    /// ```
    /// use flux_ops::{AllGatherGemm, CallError, TensorMut, TensorRef, bf16};
    /// use flux_transport::Stream;
    ///
    /// fn decode(
    ///     op: &AllGatherGemm<bf16>,
    ///     (x, w): (&TensorRef<'_, bf16>, &TensorRef<'_, bf16>),
    ///     y: &mut TensorMut<'_, bf16>,
    ///     stream: Stream<'_>,
    /// ) -> Result<(), CallError> {
    ///     op.call(x).weight(w, y).constant_weights().on(stream)
    /// }
    /// ```
    pub const fn constant_weights(mut self) -> Self {
        self.operands.constant_weights = true;
        self
    }

    /// Makes the call, as [`FusedLinear::forward`] says.
    ///
    /// # Errors
    /// As [`FusedLinear::forward`]. [`CallError::Weights`] for another number of weights than the
    /// op has, [`CallError::Stray`] for a weight's operand before it.
    pub fn on<'s>(mut self, stream: impl Into<Stream<'s>>) -> Result<(), CallError> {
        if let Some(operand) = self.stray {
            return Err(CallError::Stray { operand: operand.name(0) });
        }
        if let Some(&y) = self.operands.get(Operand::Y, 0).filter(|_| self.residual_in_y) {
            self.operands.set(Operand::Residual, 0, y);
        }
        self.op.run_checked(&self.operands, stream.into())
    }
}
