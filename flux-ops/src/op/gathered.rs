//! Calls of an AllGather-GEMM that hand out the gathered rows.

use super::AllGatherGemm;
use crate::epilogue::EpilogueArgs;
use crate::error::CallError;
use crate::tensor::{TensorMut, TensorRef};
use flux_kernels::Element;
use flux_transport::Stream;

impl<T: Element> AllGatherGemm<T> {
    /// As [`forward_with`](Self::forward_with), and copies the gathered rows to `x_full[m, k]`, for
    /// other consumers of them: the weight's gradient, or another weight.
    ///
    /// `x_full` shares no memory with other operands, and rows of it may have gaps. The copy
    /// follows the op's kernel on the stream. Each rank decides for itself whether it wants the
    /// rows.
    ///
    /// ```
    /// use flux_ops::{AllGatherGemm, EpilogueArgs, TensorMut, TensorRef};
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
    ///     op.forward_gathered(
    ///         &TensorRef::host(&shard, (m / 2, k))?,
    ///         &TensorRef::host(&w, (n / 2, k))?,
    ///         EpilogueArgs::new(),
    ///         &mut TensorMut::host(&mut y, (m, n / 2))?,
    ///         &mut TensorMut::host(&mut x_full, (m, k))?,
    ///         Stream::Host,
    ///     )?;
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
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    #[expect(clippy::needless_pass_by_value, reason = "the borrows of a call end with it")]
    pub fn forward_gathered<'s>(
        &self,
        x: &TensorRef<'_, T>,
        w: &TensorRef<'_, T>,
        epilogue: EpilogueArgs<'_, T>,
        y: &mut TensorMut<'_, T>,
        x_full: &mut TensorMut<'_, T>,
        stream: impl Into<Stream<'s>>,
    ) -> Result<(), CallError> {
        self.call((x, w), &epilogue, y, Some(x_full), stream.into())
    }
}
