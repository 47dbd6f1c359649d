//! Calls of an AllGather-GEMM with several weights.

use super::AllGatherGemm;
use crate::error::CallError;
use crate::operands::{MoreOperands, Operands};
use crate::tensor::{TensorMut, TensorRef, View};
use flux_core::problem::MAX_WEIGHTS;
use flux_kernels::Element;
use flux_transport::Stream;
use std::marker::PhantomData;

/// One of the weights of [`forward_several`](AllGatherGemm::forward_several), with its result.
#[derive(Debug)]
#[must_use = "operands do nothing until they are given to a call"]
pub struct WeightOperands<'a, T> {
    operands: MoreOperands,
    memory: PhantomData<&'a mut [T]>,
}

impl<'a, T> WeightOperands<'a, T> {
    /// A weight `w[n_r, k]` and its result `y[m, n_r]`, for this rank's
    /// [columns](crate::FusedLinear::weight_columns) of the weight.
    pub const fn new(w: &'a TensorRef<'_, T>, y: &'a mut TensorMut<'_, T>) -> Self {
        Self {
            operands: MoreOperands { w: w.view(), bias: None, y: y.view() },
            memory: PhantomData,
        }
    }

    /// Of an op built with [`Builder::bias`](crate::Builder::bias): a view of shape `(n_r,)`.
    pub const fn bias(mut self, bias: &'a TensorRef<'_, T>) -> Self {
        self.operands.bias = Some(bias.view());
        self
    }
}

impl<T: Element> AllGatherGemm<T> {
    /// As [`forward`](Self::forward), of an op built with
    /// [`several_weights`](crate::Builder::several_weights): one gather of `x` for all of them, in
    /// one kernel. Where there is an `x_full[m, k]`, the gathered rows are copied to it.
    ///
    /// ```
    /// use flux_ops::{AllGatherGemm, TensorMut, TensorRef, WeightOperands};
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
    /// op.forward_several(
    ///     &TensorRef::host(&x, (m, k))?,
    ///     &[
    ///         WeightOperands::new(&TensorRef::host(&w[0], (32, k))?, &mut TensorMut::host(q, (m, 32))?),
    ///         WeightOperands::new(&TensorRef::host(&w[1], (16, k))?, &mut TensorMut::host(keys, (m, 16))?),
    ///         WeightOperands::new(&TensorRef::host(&w[2], (16, k))?, &mut TensorMut::host(values, (m, 16))?),
    ///     ],
    ///     None,
    ///     Stream::Host,
    /// )?;
    /// assert!(y.iter().flatten().all(|&y| y == bf16::from_f32(8.0)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and [`CallError::Weights`] for another number of weights.
    pub fn forward_several<'s>(
        &self,
        x: &TensorRef<'_, T>,
        weights: &[WeightOperands<'_, T>],
        x_full: Option<&mut TensorMut<'_, T>>,
        stream: impl Into<Stream<'s>>,
    ) -> Result<(), CallError> {
        let takes = self.largest.weight_count();
        let (first, further) = match weights {
            [first, further @ ..] if weights.len() == takes => (&first.operands, further),
            _ => return Err(CallError::Weights { takes, given: weights.len() }),
        };
        let mut more = [None; MAX_WEIGHTS - 1];
        for (to, weight) in more.iter_mut().zip(further) {
            *to = Some(weight.operands);
        }
        let x_full: Option<View> = x_full.map(|rows| rows.view());
        let &MoreOperands { w, bias, y } = first;
        self.call_with(
            &Operands { x: x.view(), w, bias, residual: None, y, norm: None, x_full, more },
            stream.into(),
        )
    }
}
