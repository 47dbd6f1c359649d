//! A kernel for rows of either type of outputs.

use flux_core::DType;
use flux_cuda::Function;

/// An entry point for each of [`DType::OUTPUTS`], in their order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Functions(pub(super) [Function; DType::OUTPUTS.len()]);

impl Functions {
    /// That of rows of this type.
    ///
    /// # Panics
    /// If it is none of outputs.
    pub(super) fn of(&self, dtype: DType) -> Function {
        let place = DType::OUTPUTS.iter().position(|&of| of == dtype);
        self.0[place.expect("rows have a type of outputs")]
    }
}
