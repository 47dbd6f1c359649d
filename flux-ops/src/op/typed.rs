//! The ops with their kind and element types in the type: thin faces over [`FusedLinear`].
//!
//! Invariant: an op of such a type was built with its kind and element types, so a call with other
//! operands does not compile. Of normalised rows, whose type is an option, it is refused.

use super::kind::{self, OpMarker};
use super::{Builder, Call, FusedLinear};
use crate::error::{BuildError, CallError};
use crate::spec::OpSpec;
use crate::tensor::{TensorMut, TensorRef};
use flux_core::{Numerics, Scales};
use flux_kernels::{Element, QuantizedElement};
use flux_transport::{Communicator, Stream};
use std::marker::PhantomData;
use std::ops::Deref;

/// `y = act(gather(x) * transpose(w) + bias)`: the column-parallel linear layer of a
/// tensor-parallel model, with rows of `x` split over the ranks.
///
/// Each rank gives its rows `x[m_r, k]` and gets all rows of its columns `y[m, n_r]`, or with
/// [gates](Builder::gated) `y[m, n_r/2]`. Bias, activation and gates are applied in fp32, before
/// the one rounding.
///
/// ```
/// use flux_ops::{AllGatherGemm, TensorMut, TensorRef};
/// use flux_transport::{Communicator, Select, Stream, World};
/// use half::bf16;
///
/// let (m, n, k) = (4, 16, 8);
/// let comm = Communicator::connect_blocking(&World::single(), Select::Host)?;
/// let op = AllGatherGemm::<bf16>::builder(m, n, k).build(&comm)?;
///
/// let (x, w, mut y) = (vec![bf16::ONE; m * k], vec![bf16::ONE; n * k], vec![bf16::NAN; m * n]);
/// op.forward(
///     &TensorRef::host(&x, (m, k))?,
///     &TensorRef::host(&w, (n, k))?,
///     &mut TensorMut::host(&mut y, (m, n))?,
///     Stream::Host,
/// )?;
/// assert!(y.iter().all(|&y| y == bf16::from_f32(8.0)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type AllGatherGemm<X, Y = X> = TypedLinear<kind::AllGather, X, Y>;

/// `y = scatter(sum over ranks of x * transpose(w)) + bias`: the row-parallel linear layer of a
/// tensor-parallel model, with rows of `y` split over the ranks.
///
/// Each rank gives all rows of its part of the inner dimension, `x[m, k_r]`, and gets its rows
/// `y[m_r, n]` of the sum. Partial sums travel in the type of `y` and are added in fp32. The
/// plan and the nodes fix the order, so every run has the same bits. There is no activation.
///
/// ```
/// use flux_ops::{GemmReduceScatter, TensorMut, TensorRef};
/// use flux_transport::{Communicator, Select, Stream, World};
/// use half::bf16;
///
/// let (m, n, k) = (4, 16, 8);
/// let rank = |world: World| {
///     let comm = Communicator::connect_blocking(&world, Select::Host)?;
///     let op = GemmReduceScatter::<bf16>::builder(m, n, 2 * k).build(&comm)?;
///
///     let (x, w) = (vec![bf16::ONE; m * k], vec![bf16::ONE; n * k]);
///     let mut y = vec![bf16::NAN; m / 2 * n];
///     op.forward(
///         &TensorRef::host(&x, (m, k))?,
///         &TensorRef::host(&w, (n, k))?,
///         &mut TensorMut::host(&mut y, (m / 2, n))?,
///         Stream::Host,
///     )?;
///
///     // 8 from each of 2 ranks.
///     assert!(y.iter().all(|&y| y == bf16::from_f32(16.0)));
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
pub type GemmReduceScatter<X, Y = X> = TypedLinear<kind::ReduceScatter, X, Y>;

/// `y = sum over ranks of x * transpose(w) + bias`: the row-parallel linear layer of a
/// tensor-parallel model whose activations are replicated, as in serving.
///
/// Each rank gives all rows of its part of the inner dimension, `x[m, k_r]`, and gets the whole sum
/// `y[m, n]`: the same bits on every rank and in every run. Partial sums travel in the type of
/// `y` and are added in rank order in fp32. There is no activation. A library's collective
/// (`comm=sequential`) adds in its own order and type.
///
/// ```
/// use flux_ops::{GemmAllReduce, TensorMut, TensorRef};
/// use flux_transport::{Communicator, Select, Stream, World};
/// use half::bf16;
///
/// let (m, n, k) = (4, 16, 8);
/// let rank = |world: World| {
///     let comm = Communicator::connect_blocking(&world, Select::Host)?;
///     let op = GemmAllReduce::<bf16>::builder(m, n, 2 * k).build(&comm)?;
///
///     let (x, w) = (vec![bf16::ONE; m * k], vec![bf16::ONE; n * k]);
///     let mut y = vec![bf16::NAN; m * n];
///     op.forward(
///         &TensorRef::host(&x, (m, k))?,
///         &TensorRef::host(&w, (n, k))?,
///         &mut TensorMut::host(&mut y, (m, n))?,
///         Stream::Host,
///     )?;
///
///     // 8 from each of 2 ranks.
///     assert!(y.iter().all(|&y| y == bf16::from_f32(16.0)));
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
pub type GemmAllReduce<X, Y = X> = TypedLinear<kind::AllReduce, X, Y>;

/// A [`FusedLinear`] of this kind, with operands of element type `X` and outputs of `Y`. It has the
/// methods of that op.
#[derive(Debug)]
pub struct TypedLinear<K, X, Y = X> {
    op: FusedLinear,
    types: PhantomData<(K, X, Y)>,
}

impl<K: OpMarker, T: Element> TypedLinear<K, T> {
    /// Starts an op of global extents, for calls with at most `max_m` rows. `n` and `k` are
    /// multiples of 8, and what is split is at least 8 for each rank.
    pub fn builder(max_m: usize, n: usize, k: usize) -> Builder<Self> {
        Builder::new(OpSpec::new(K::OP, max_m, n, k, T::DTYPE))
    }
}

impl<K: OpMarker, X: QuantizedElement, Y: Element> TypedLinear<K, X, Y> {
    /// Starts an op of global extents with 8-bit operands and such scales, for calls with at most
    /// `max_m` rows. `n` and `k` are multiples of 16, with [`Scales::Block`] of 128, and what is
    /// split is at least as much for each rank.
    ///
    /// ```
    /// use flux_ops::{AllGatherGemm, F8E4M3, Scales, TensorMut, TensorRef, bf16};
    /// use flux_transport::{Communicator, Select, Stream, World};
    ///
    /// let (m, n, k) = (4, 16, 64);
    /// let comm = Communicator::connect_blocking(&World::single(), Select::Host)?;
    /// let op = AllGatherGemm::<F8E4M3, bf16>::scaled(m, n, k, Scales::Tensor).build(&comm)?;
    ///
    /// let one = F8E4M3::from_f32(1.0);
    /// let (x, w, mut y) = (vec![one; m * k], vec![one; n * k], vec![bf16::NAN; m * n]);
    /// let (of_x, of_w) = ([0.5_f32], [0.25_f32]);
    /// op.call(&TensorRef::host(&x, (m, k))?)
    ///     .scale_x(&TensorRef::host(&of_x, (1, 1))?)
    ///     .weight(&TensorRef::host(&w, (n, k))?, &mut TensorMut::host(&mut y, (m, n))?)
    ///     .scale_w(&TensorRef::host(&of_w, (1, 1))?)
    ///     .on(Stream::Host)?;
    /// assert!(y.iter().all(|&y| y == bf16::from_f32(8.0)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn scaled(max_m: usize, n: usize, k: usize, scales: Scales) -> Builder<Self> {
        let numerics = Numerics::scaled(X::DTYPE, scales, Y::DTYPE);
        Builder::new(OpSpec::new(K::OP, max_m, n, k, numerics))
    }
}

impl<K: OpMarker, X: Element, Y: Element> TypedLinear<K, X, Y> {
    /// As [`FusedLinear::build`], of a spec with this kind and these types.
    pub(super) fn build(spec: OpSpec, comm: &Communicator) -> Result<Self, BuildError> {
        Ok(Self { op: FusedLinear::build(spec, comm)?, types: PhantomData })
    }

    /// As [`FusedLinear::forward`].
    ///
    /// # Errors
    /// As [`FusedLinear::forward`].
    pub fn forward<'s>(
        &self,
        x: &TensorRef<'_, X>,
        w: &TensorRef<'_, X>,
        y: &mut TensorMut<'_, Y>,
        stream: impl Into<Stream<'s>>,
    ) -> Result<(), CallError> {
        self.op.forward(x, w, y, stream)
    }

    /// As [`FusedLinear::call`].
    pub fn call<'a>(&'a self, x: &'a TensorRef<'_, X>) -> Call<'a, X, Y> {
        self.op.call(x)
    }

    /// As [`FusedLinear::rebuild`].
    ///
    /// # Errors
    /// As [`FusedLinear::rebuild`].
    pub fn rebuild(&self, comm: &Communicator) -> Result<Self, BuildError> {
        Ok(Self { op: self.op.rebuild(comm)?, types: PhantomData })
    }
}

impl<K, X, Y> From<TypedLinear<K, X, Y>> for FusedLinear {
    fn from(typed: TypedLinear<K, X, Y>) -> Self {
        typed.op
    }
}

impl<K, X, Y> Deref for TypedLinear<K, X, Y> {
    type Target = FusedLinear;

    fn deref(&self) -> &FusedLinear {
        &self.op
    }
}
