//! Kernels that take a CTA for each row.

use super::error::LaunchError;
use flux_core::DType;
use flux_cuda::{Function, Launch, Module};
use std::ffi::CStr;

/// Most threads of a CTA: the kernels' launch bound.
const THREADS: u32 = 512;

/// A launch of so many CTAs, with a thread for each vector of a row up to the bound. It may begin
/// before the launch ahead on the stream has ended if it is `programmatic`.
pub(super) fn row_wise(rows: u32, vectors: u32, stream: usize, programmatic: bool) -> Launch {
    let threads = vectors.next_multiple_of(32).clamp(32, THREADS);
    Launch { grid: (rows, 1), threads, shared_bytes: 0, stream, programmatic }
}

/// A loaded kernel for rows of either type of outputs.
#[derive(Debug)]
pub(super) struct RowKernel {
    module: Module,
    functions: [Function; DType::OUTPUTS.len()],
}

impl RowKernel {
    /// Loads its entry points, one for each of [`DType::OUTPUTS`] in their order, into the current
    /// context.
    pub(super) fn load(
        cubin: &[u8],
        [bf16, fp16]: [&CStr; DType::OUTPUTS.len()],
    ) -> Result<Self, LaunchError> {
        let module = Module::load(cubin)?;
        let functions = [module.function(bf16, 0)?, module.function(fp16, 0)?];
        Ok(Self { module, functions })
    }

    /// Enqueues it for rows of this type.
    ///
    /// # Safety
    /// As for [`Module::launch`].
    ///
    /// # Panics
    /// If the type is none of outputs.
    pub(super) unsafe fn launch<P: Copy>(
        &self,
        dtype: DType,
        launch: Launch,
        params: &P,
    ) -> Result<(), LaunchError> {
        let number = DType::OUTPUTS.iter().position(|&of| of == dtype);
        let function = self.functions[number.expect("rows have a type of outputs")];
        // SAFETY: the caller answers for the parameters.
        Ok(unsafe { self.module.launch(function, launch, params) }?)
    }
}
