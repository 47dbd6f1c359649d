//! The numbers of a portable kernel: its warps' parts of a tile, and the memory that follows.
//!
//! Invariant: eight consumer warps have equal parts of a tile.

use super::Variant;
use super::constants::constants;
use flux_core::layout::split_k_slot_bytes;
use flux_core::numerics::VECTOR_BYTES;
use flux_core::tile::{BARRIER_BYTES, CONSUMERS, PORTABLE_WARPS, portable_barriers};
use flux_core::{Partials, TileShape};

/// Rows of mma's operand A.
const BLOCK: u32 = 16;
/// Columns that a warp multiplies at once: two of mma's blocks.
const PAIR: u32 = 16;

constants! {
    /// What a portable kernel is compiled with besides its element types and options.
    struct PortableConstants {
        sends_partials: bool,
        scatters: bool,
        /// A multiprocessor's four parts have 16 K registers each, so three warps on each have 168
        /// a thread.
        consumer_warps: u32,
        /// Consumers in groups of 128 threads.
        consumers: u32,
        producer_warps: u32,
        mover_warps: u32,
        signaller_warp: u32,
        /// A tile's warps along n.
        warps_n: u32,
        /// Of one warp.
        rows: u32,
        /// Of one warp.
        cols: u32,
        /// m16 blocks of one warp.
        blocks: u32,
        /// Pairs of n8 blocks of one warp.
        pairs: u32,
        block_rows: u32,
        /// Of one m16 block, in one thread.
        accumulators: u32,
        /// Whether the sums of each step leave the tensor cores, which add 8-bit products with
        /// fewer bits than fp32 has.
        promotes: bool,
        /// Pairs of n8 blocks whose sums leave at a time.
        part_pairs: u32,
        /// Whether those of a step have scales of their own.
        scales_blocks: bool,
        /// Whether the sums of all steps have scales.
        scales_sums: bool,
        /// Columns of y, of one warp.
        out_cols: u32,
        /// Words of a residual that a thread loads at once, as registers allow.
        residual_loads: u32,
        /// Whether consumers stamp items. Large tiles that send fp32 have no registers for that.
        stamps_items: bool,
        /// The accumulators lie as a Hopper tile's whose columns are split: see `epilogue.cuh`.
        swap_ab: bool,
        split_columns: bool,
        /// Of a stage's rows of A.
        bytes_a: u32,
        stage_bytes: u32,
        /// Weights of `[k, n]` lie in strips of 16 columns, a row for each element along k. Its two
        /// chunks change places every four rows, so eight rows of a chunk meet different banks.
        weight_strip_bytes: u32,
        /// Vectors of a thread, of one m16 block in a slot.
        block_vectors: u32,
        /// The same of all accumulators in fp32.
        split_k_vectors: u32,
        split_k_slot_bytes: u32,
        /// Of a strip of 16 rows in a slot of partial sums.
        strip_bytes: u32,
        /// Shared memory from a 1024-byte border on: stages, barriers and three words.
        barrier_offset: u32,
        arrived_offset: u32,
    }
}

impl Variant {
    /// Of this kernel.
    pub(super) fn portable(&self) -> PortableConstants {
        let (tile, numerics) = (self.tile, self.numerics);
        let TileShape { m, n, .. } = tile;
        let partial = numerics.partial_bytes() as u32;
        let (warps_m, warps_n) = tile.portable_warps();
        let (rows, cols) = (m / warps_m, n / warps_n);
        let (blocks, accumulators) = (rows / BLOCK, cols / 2);
        let producer_warps = 2;
        let stage_bytes = tile.stage_bytes(numerics.operand);
        let barrier_offset = self.stages * stage_bytes;
        PortableConstants {
            sends_partials: self.op.reduces(),
            scatters: self.op.reduces(),
            consumer_warps: PORTABLE_WARPS,
            consumers: CONSUMERS,
            producer_warps,
            mover_warps: 1,
            signaller_warp: PORTABLE_WARPS + producer_warps,
            warps_n,
            rows,
            cols,
            blocks,
            pairs: cols / PAIR,
            block_rows: BLOCK,
            accumulators,
            promotes: numerics.promotes(),
            part_pairs: cols / PAIR / tile.portable_parts(numerics),
            scales_blocks: numerics.scales.along_k().is_some(),
            scales_sums: numerics.scales.of_sums(),
            out_cols: cols / self.columns_per_output(),
            residual_loads: if blocks * accumulators > 64 { 4 } else { 16 },
            stamps_items: numerics.partials == Partials::Output || blocks * accumulators <= 64,
            swap_ab: false,
            split_columns: true,
            bytes_a: m * tile.k * numerics.operand.bytes() as u32,
            stage_bytes,
            weight_strip_bytes: tile.k * PAIR * numerics.operand.bytes() as u32,
            block_vectors: accumulators * partial / VECTOR_BYTES,
            split_k_vectors: blocks * accumulators * size_of::<f32>() as u32 / VECTOR_BYTES,
            split_k_slot_bytes: split_k_slot_bytes(tile) as u32,
            strip_bytes: BLOCK * n * partial,
            barrier_offset,
            arrived_offset: barrier_offset + portable_barriers(self.stages) * BARRIER_BYTES,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::KernelTarget;
    use crate::nvrtc::Arch;
    use crate::variant::WARP;

    #[test]
    fn parts_of_a_tile_are_equal_and_fit_registers() {
        let all = |arch| Variant::all(KernelTarget::of_arch(arch));
        for variant in [Arch::Sm80, Arch::Sm89].into_iter().flat_map(all) {
            let (c, tile) = (variant.portable(), variant.tile);
            let warps_m = c.consumer_warps / c.warps_n;
            assert_eq!(c.blocks * BLOCK * warps_m, tile.m, "{variant}");
            assert_eq!(c.pairs * PAIR * c.warps_n, tile.n, "{variant}");
            let (sums, of_part) = (c.blocks * c.accumulators, c.blocks * c.part_pairs * PAIR / 2);
            assert!(sums <= 128 && (!c.promotes || sums + of_part <= 96), "{variant}");
            assert!(c.pairs.is_multiple_of(c.part_pairs), "{variant}");
            let of_threads = c.consumer_warps * WARP * VECTOR_BYTES;
            assert_eq!(c.split_k_slot_bytes, c.split_k_vectors * of_threads, "{variant}");
            assert_eq!(Variant::THREADS, WARP * (c.signaller_warp + 1 + c.mover_warps));
            // Three words, from a border of 1024 bytes on.
            let end = c.arrived_offset + 3 * BARRIER_BYTES + 1024;
            assert_eq!(end, variant.shared_bytes(), "{variant}");
        }
    }
}
