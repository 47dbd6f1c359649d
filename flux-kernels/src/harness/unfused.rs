//! The epilogue of a layer that a library computed.

use super::Harness;
use crate::abi::UnfusedEpilogueParams;
use crate::cuda::{LaunchError, Matrix, RmsNormArgs};
use crate::epilogue::Activation;
use crate::weights::GateLayout;
use flux_core::DType;

/// The epilogue of a layer whose sums were rounded before it.
#[derive(Clone, Copy, Debug)]
pub struct UnfusedEpilogue {
    /// The rows that it makes, and their norm; a gain of 0 for none.
    pub norm: RmsNormArgs,
    /// The rounded sums; with gates twice as many columns as `y` has.
    pub sums: Matrix,
    /// Address of the bias, one element for each column of the sums.
    pub bias: Option<u64>,
    /// Address of the residual, which lies like `y`.
    pub residual: Option<u64>,
    /// What is applied to the sum with both.
    pub activation: Activation,
    /// How gates and ups lie in the columns of the sums, where there are any.
    pub gates: Option<GateLayout>,
}

impl Harness {
    /// Enqueues what follows an unfused layer, as one kernel: `y` of the sums, and where there is a
    /// gain its norm.
    ///
    /// # Safety
    /// Every address is valid on the current device for the rows of `args.norm`, until the launch
    /// has completed. `y` overlaps nothing but `sums`, and these only where there are no gates;
    /// the normalised rows overlap nothing.
    ///
    /// # Errors
    /// [`LaunchError`] if the kernel cannot be enqueued.
    pub unsafe fn unfused_epilogue(
        &self,
        args: &UnfusedEpilogue,
        dtype: DType,
    ) -> Result<(), LaunchError> {
        let (gate_step, up_offset) =
            args.gates.map_or((0, 0), |layout| layout.steps(2 * args.norm.cols));
        let params = UnfusedEpilogueParams {
            norm: args.norm.params(),
            sums: args.sums.address,
            sums_row_bytes: args.sums.row_bytes,
            bias: args.bias.unwrap_or_default(),
            residual: args.residual.unwrap_or_default(),
            activation: args.activation as u32,
            gate_step,
            up_offset,
            dtype: dtype as u32,
        };
        let launch = args.norm.launch(dtype);
        // SAFETY: the kernel takes `UnfusedEpilogueParams`; the caller answers for the addresses.
        Ok(unsafe { self.module.launch(self.unfused_epilogue, launch, &params) }?)
    }
}
