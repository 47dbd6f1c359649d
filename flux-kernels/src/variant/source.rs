//! The translation unit of a variant.

use super::constants::{declaration, element};
use super::{Form, Variant};
use crate::sources::Source;
use crate::weights::WeightLayout;
use flux_core::tile::STEP_BYTES;
use flux_core::{Partials, TileShape};

/// Bytes of an operand's row that one matrix instruction multiplies.
const PRODUCT_BYTES: u32 = 32;

impl Variant {
    /// The translation unit that instantiates the kernel.
    pub fn source(&self) -> Source {
        let (name, threads) = (self.entry(), Self::THREADS);
        let (folder, constants) = match self.form {
            Form::Hopper(staging) => ("sm90", self.hopper(staging).declare()),
            Form::Portable => ("sm80", self.portable().declare()),
        };
        let text = format!(
            "#include \"{folder}/fused_gemm.cuh\"\n\
             // Computed and explained in flux-kernels/src/variant/.\n\
             struct Numbers {{\n{}{constants}}};\n\
             extern \"C\" __global__ void __launch_bounds__({threads}, 1) {name}(const \
             __grid_constant__ flux::Params p) {{\n    \
             flux::fused_gemm<flux::Config<Numbers>>(p);\n}}\n",
            self.options(),
        );
        Source { name, text, ptx: self.ptx() }
    }

    /// Declarations of what both generations are compiled for.
    fn options(&self) -> String {
        let (TileShape { m, n, k }, numerics) = (self.tile, self.numerics);
        [
            element("Operand", numerics.operand),
            element("Output", numerics.output),
            declaration("partials_f32", numerics.partials == Partials::F32),
            declaration("partial_bytes", numerics.partial_bytes() as u32),
            declaration("tile_m", m),
            declaration("tile_n", n),
            declaration("tile_k", k),
            declaration("step_bytes", STEP_BYTES),
            declaration("products", STEP_BYTES / PRODUCT_BYTES),
            declaration("stages", self.stages),
            declaration("reduce_scatter", self.op.reduces()),
            declaration("gated", self.gated),
            declaration("cols_per_out", self.columns_per_output()),
            declaration("weights_kn", self.weights == WeightLayout::Kn),
        ]
        .concat()
    }
}
