//! The translation unit of a variant.

use super::{Form, Variant};
use crate::sources::Source;
use crate::weights::WeightLayout;
use flux_core::tile::Staging;
use flux_core::{DType, Partials, SumsTo, TileShape};

impl Variant {
    /// The translation unit that instantiates the kernel.
    pub fn source(&self) -> Source {
        let name = self.entry();
        let (bf16, rs) = (self.numerics.operand == DType::Bf16, self.op.sums_to() == SumsTo::Rows);
        let (stages, shared, threads) = (self.stages, self.shared_bytes(), Self::THREADS);
        let (f32, gated, kn) =
            (self.numerics.partials == Partials::F32, self.gated, self.weights == WeightLayout::Kn);
        let TileShape { m, n, k, .. } = self.tile;
        let (folder, numbers, check) = match self.form {
            Form::Hopper(staging) => (
                "sm90",
                format!("{m}, {n}, {}, {stages}", staging.buffers()),
                self.hopper_check(staging),
            ),
            Form::Portable => ("sm80", format!("{m}, {n}, {stages}"), self.portable_check()),
        };
        let text = format!(
            "#include \"{folder}/fused_gemm.cuh\"\n\
             using C = flux::Config<{numbers}, {bf16}, {rs}, {f32}, {gated}, {kn}>;\n\
             static_assert(C::kSharedBytes == {shared} && C::kThreads == {threads} && C::kTileK == \
             {k}, \"variant/source.rs\");\n\
             {check}\
             extern \"C\" __global__ void __launch_bounds__({threads}, 1) {name}(const \
             __grid_constant__ flux::Params p) {{\n    flux::fused_gemm<C>(p);\n}}\n"
        );
        Source { name, text }
    }

    /// That a portable kernel has the warps that are assumed in plans.
    fn portable_check(&self) -> String {
        let (along_m, along_n) = self.tile.portable_warps();
        format!(
            "static_assert(C::kWarpsM == {along_m} && C::kWarpsN == {along_n}, \"table.rs\");\n"
        )
    }

    /// That a Hopper kernel has the boxes and the form that are assumed here.
    fn hopper_check(&self, staging: Staging) -> String {
        format!(
            "static_assert(C::kPairs == {pairs} && C::kBoxRowBytes == {box_row_bytes} && C::kBoxRows == \
             {box_rows}, \"variant/source.rs\");\n\
             static_assert(C::kGlobalStagingBytes == {staged}, \"variant/source.rs\");\n\
             static_assert(C::kCanSendPartials == {sends} && C::kSwapAB == {swaps}, \
             \"table.rs\");\n",
            staged = self.epilogue_staging_bytes(),
            pairs = self.loads_pairs(),
            box_row_bytes = self.box_row_bytes(),
            box_rows = self.box_rows(),
            sends = self.tile.sends_partials_from(staging, self.numerics.output),
            swaps = self.tile.swaps_ab(),
        )
    }
}
