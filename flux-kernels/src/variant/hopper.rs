//! The numbers of a Hopper kernel: its tile's parts, and the memory that follows from them.
//!
//! Invariant: both consumers have equal parts of a tile, and whatever travels through the operand
//! ring fits in a stage.

use super::constants::constants;
use super::{Variant, WARPGROUP};
use crate::weights::WeightLayout;
use flux_core::layout::split_k_slot_bytes;
use flux_core::numerics::VECTOR_BYTES;
use flux_core::tile::{
    BARRIER_BYTES, CONSUMERS, ConsumerPart, ROW_GAP, STEP_BYTES, Staging, WGMMA_ROWS,
    hopper_barriers,
};
use flux_core::{Partials, TileShape};

/// Registers of a consumer's thread. The launch gives 168 to each, 64 K in all.
const CONSUMER_REGISTERS: u32 = 224;
/// Registers of the other roles' threads.
const PRODUCER_REGISTERS: u32 = 56;
/// Most registers of a thread for sums of a tile and of two steps; some 30 are for the rest.
const MOST_PROMOTED: u32 = 192;
/// Most columns of a consumer's m64 block beside which a kernel of sums loads ahead.
const MOST_SUMS: u32 = 128;
/// Most vectors of a piece that a thread adds from the ring, where its tile swaps operands.
const PIECE_VECTORS: u32 = 16;
/// The same of split-K partials.
const SPLIT_K_PIECE_VECTORS: u32 = 8;

constants! {
    /// What a Hopper kernel is compiled with besides its element types and options.
    struct HopperConstants {
        /// Whether the ring is filled two steps along k at once. A ring of fewer than three pairs
        /// would miss the stage that waits for its pair.
        pairs: bool,
        /// Warpgroups that multiply.
        consumers: u32,
        /// Warps that push what every tile waits for.
        mover_warps: u32,
        /// Rows of B are wgmma's m and rows of A its n: the accumulators hold the transpose.
        swap_ab: bool,
        /// Consumers split a tile by columns where its rows are one m64 block, or where a swap-AB
        /// tile has whole m64 blocks of columns for each. Else they split it by rows.
        split_columns: bool,
        /// Of one consumer.
        rows: u32,
        /// Of one consumer.
        cols: u32,
        /// m64 blocks of one consumer.
        blocks: u32,
        /// Rows of a block without swap-AB.
        block_rows: u32,
        /// wgmma's n.
        wgmma_n: u32,
        /// Of one block, in one thread.
        accumulators: u32,
        /// Whether the sums of each step leave the tensor cores, which add 8-bit products with
        /// fewer bits than fp32 has.
        promotes: bool,
        /// Steps whose promoted sums are on their way: two of one block, where registers allow. The
        /// products of one are issued before the sums of the step ahead are added.
        steps_in_flight: u32,
        /// Whether those of a step have scales of their own.
        scales_blocks: bool,
        /// Whether the sums of all steps have scales.
        scales_sums: bool,
        /// Words of a residual that a thread loads at once, as registers allow.
        residual_loads: u32,
        /// Whether constant weights are loaded while the launch ahead ends.
        loads_ahead: bool,
        /// Whether partial tiles are sent to slots and added from there.
        sends_partials: bool,
        /// Vectors of a thread's part of a slot.
        vectors: u32,
        producer_registers: u32,
        consumer_registers: u32,
        /// Of a stage's rows of A.
        bytes_a: u32,
        stage_bytes: u32,
        /// Of a consumer's part of a staged tile.
        out_bytes_per_consumer: u32,
        /// Unless the shard has fewer rows.
        slot_bytes: u32,
        slot_bytes_per_consumer: u32,
        /// Columns of y, of one consumer.
        out_cols: u32,
        /// Columns of y, of one block of a swap-AB tile.
        block_cols: u32,
        /// Columns of the boxes of the tensor store to y, swizzled over their whole width.
        box_cols: u32,
        box_row_bytes: u32,
        box_bytes: u32,
        /// Weights of `[k, n]` come in boxes of as many columns, a step along k high.
        weight_box_bytes: u32,
        /// Of one block of one consumer.
        boxes: u32,
        /// Staging buffers: one for each consumer, or one that they use in turn. Consumers that
        /// wait for the shared buffer fall half a tile apart, so one ends its tile while the other
        /// multiplies; large tiles run in lockstep instead.
        staging_buffers: u32,
        lockstep: bool,
        /// Groups in which a consumer commits the products of a stage. With two it holds a stage
        /// and a half on average, but waits twice a stage.
        wgmma_groups: u32,
        /// Whether rows go to several owners: they need the whole tile staged, in fp32 a part of
        /// its rows at a time.
        scatters: bool,
        /// Of a staged row with the gap that lets the rows of a store meet different banks.
        out_row_bytes: u32,
        /// Rows of a consumer that are staged at once: in fp32 every other eight of wgmma's m, or
        /// consecutive ones of its n, of which an odd count leaves a third part.
        part_rows: u32,
        scatter_parts: u32,
        /// Pieces in which a peer's partial tile travels through the ring, the last perhaps
        /// shorter. Each holds the same vectors of both consumers: as many as registers allow, and
        /// for swap-AB as many as the staging buffer holds.
        pieces: u32,
        piece_vectors: u32,
        /// Of the longest.
        piece_bytes_per_consumer: u32,
        /// Pieces that are added during the mainloop come into the staging buffers, idle then.
        in_mainloop_pieces: u32,
        /// Global staging memory of a CTA: see `Variant::epilogue_staging_bytes`.
        global_staging_bytes: u32,
        /// Vectors of a thread's split-K partial, in fp32, which travels through the ring too.
        split_k_vectors: u32,
        split_k_piece_vectors: u32,
        split_k_pieces: u32,
        split_k_slot_bytes: u32,
        /// Shared memory from a 1024-byte border on, as the swizzle needs: stages, staging buffers,
        /// barriers, two words.
        out_offset: u32,
        barrier_offset: u32,
        arrived_offset: u32,
        opened_offset: u32,
    }
}

/// Boxes in which a tile is stored to `y`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutBox {
    /// Bytes of a row: the widest swizzle that divides the columns.
    pub(crate) row_bytes: u32,
    pub(crate) rows: u32,
}

impl Variant {
    /// Of this kernel.
    pub(super) fn hopper(&self, staging: Staging) -> HopperConstants {
        let (tile, numerics) = (self.tile, self.numerics);
        let TileShape { m, n, .. } = tile;
        let (operand, output) = (numerics.operand.bytes() as u32, numerics.output.bytes() as u32);
        let partial = numerics.partial_bytes() as u32;
        // Partial sums have as many bytes as outputs, or this many times as many.
        let widening = partial / output;
        let (swap_ab, split_columns) = (tile.swaps_ab(), tile.splits_columns());
        let ConsumerPart { rows, cols, blocks, wgmma_n } = tile.consumer_part();
        // A thread has half as many accumulators.
        let sums = blocks * wgmma_n;
        let promotes = numerics.promotes();
        let has_registers = blocks == 1 && 3 * sums / 2 <= MOST_PROMOTED;
        let steps_in_flight = if promotes && has_registers { 2 } else { 1 };
        let reduces = self.op.reduces();
        let can_send = tile.sends_partials_from(staging, numerics.output);
        let vectors = sums / 2 * partial / VECTOR_BYTES;
        let stage_bytes = tile.stage_bytes(numerics.operand);
        let out_bytes_per_consumer = m * n * output / CONSUMERS;
        let per_thread = WARPGROUP * VECTOR_BYTES;
        let pieces = if !can_send {
            1
        } else if swap_ab {
            let room = stage_bytes.min(out_bytes_per_consumer) / (CONSUMERS * per_thread);
            vectors.div_ceil(room.min(PIECE_VECTORS))
        } else {
            widening
                * match sums {
                    257.. => 4,
                    _ if sums.is_multiple_of(32) => 2,
                    _ => 1,
                }
        };
        let piece_vectors = vectors.div_ceil(pieces);
        let piece_bytes_per_consumer = piece_vectors * per_thread;
        let staged = staging.buffers() * out_bytes_per_consumer;
        let split_k_vectors = sums / 2 * size_of::<f32>() as u32 / VECTOR_BYTES;
        let split_k_piece_vectors = if swap_ab {
            split_k_vectors.min(SPLIT_K_PIECE_VECTORS)
        } else {
            split_k_vectors * partial / (size_of::<f32>() as u32 * pieces)
        };
        let scatters = reduces && staging == Staging::PerConsumer;
        let part_rows = match numerics.partials {
            Partials::Output => rows,
            Partials::F32 if swap_ab => rows / 16 * 8,
            Partials::F32 => rows / 2,
        };
        let lockstep = blocks > 1 && !swap_ab;
        let out_cols = cols / self.columns_per_output();
        let block_cols = WGMMA_ROWS / self.columns_per_output();
        let out_box = self.out_box();
        let box_cols = out_box.row_bytes / output;
        let out_offset = self.stages * stage_bytes;
        let barrier_offset = out_offset + tile.staged_bytes(staging, numerics.output, reduces);
        let arrived_offset = barrier_offset + hopper_barriers(self.stages) * BARRIER_BYTES;
        HopperConstants {
            pairs: self.loads_pairs(),
            consumers: CONSUMERS,
            mover_warps: 3,
            swap_ab,
            split_columns,
            rows,
            cols,
            blocks,
            block_rows: WGMMA_ROWS,
            wgmma_n,
            accumulators: wgmma_n / 2,
            promotes,
            steps_in_flight,
            scales_blocks: numerics.scales.along_k().is_some(),
            scales_sums: numerics.scales.of_sums(),
            residual_loads: if sums > 256 { 4 } else { 16 },
            loads_ahead: self.loads_ahead(),
            sends_partials: reduces && can_send,
            vectors,
            producer_registers: PRODUCER_REGISTERS,
            consumer_registers: CONSUMER_REGISTERS,
            bytes_a: m * tile.k * operand,
            stage_bytes,
            out_bytes_per_consumer,
            slot_bytes: m * n * partial,
            slot_bytes_per_consumer: m * n * partial / CONSUMERS,
            out_cols,
            block_cols,
            box_cols,
            box_row_bytes: out_box.row_bytes,
            box_bytes: out_box.rows * out_box.row_bytes,
            weight_box_bytes: tile.k * out_box.row_bytes,
            boxes: if swap_ab { block_cols } else { out_cols } / box_cols,
            staging_buffers: staging.buffers(),
            lockstep,
            wgmma_groups: if lockstep || promotes { 1 } else { 2 },
            scatters,
            out_row_bytes: (n * output + ROW_GAP) * widening,
            part_rows,
            scatter_parts: if scatters { rows.div_ceil(part_rows) } else { 1 },
            pieces,
            piece_vectors,
            piece_bytes_per_consumer,
            in_mainloop_pieces: if can_send && staged >= 2 * CONSUMERS * piece_bytes_per_consumer {
                2
            } else {
                1
            },
            global_staging_bytes: self.epilogue_staging_bytes() as u32,
            split_k_vectors,
            split_k_piece_vectors,
            split_k_pieces: split_k_vectors.div_ceil(split_k_piece_vectors),
            split_k_slot_bytes: split_k_slot_bytes(tile) as u32,
            out_offset,
            barrier_offset,
            arrived_offset,
            opened_offset: arrived_offset + BARRIER_BYTES,
        }
    }

    /// The boxes in which a Hopper kernel stores a tile to `y`. One consumer's columns, or those of
    /// a block of a swap-AB tile, are whole boxes.
    pub(crate) fn out_box(&self) -> OutBox {
        let splits = self.tile.splits_columns();
        let cols = match splits {
            _ if self.tile.swaps_ab() => WGMMA_ROWS,
            true => self.tile.n / CONSUMERS,
            false => self.tile.n,
        };
        let bytes = cols / self.columns_per_output() * self.numerics.output.bytes() as u32;
        let widths = [STEP_BYTES, 64, 32, VECTOR_BYTES];
        let row_bytes = widths.into_iter().find(|&width| bytes.is_multiple_of(width));
        let rows = match self.tile.swaps_ab() {
            false => WGMMA_ROWS,
            true if splits => self.tile.m,
            true => self.tile.m / CONSUMERS,
        };
        OutBox { row_bytes: row_bytes.unwrap_or(VECTOR_BYTES), rows }
    }

    /// Whether constant weights are loaded while the launch ahead ends. With weights `[k, n]` or
    /// fp32 partial sums no register is left for it. Of sums, kernels whose consumers have few
    /// accumulators do not spill then, a power of two; 64x96 does.
    pub(super) const fn loads_ahead(&self) -> bool {
        let sums = self.tile.m * self.tile.n / (CONSUMERS * WGMMA_ROWS);
        let has_registers = !self.op.reduces() || sums <= MOST_SUMS && sums.is_power_of_two();
        matches!(self.weights, WeightLayout::Nk)
            && matches!(self.numerics.partials, Partials::Output)
            && has_registers
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::KernelTarget;
    use crate::nvrtc::Arch;
    use crate::variant::Form;
    use flux_core::program::IN_MAINLOOP_GAP;

    #[test]
    fn parts_of_a_tile_are_equal_and_fit_where_they_pass() {
        for variant in Variant::all(KernelTarget::of_arch(Arch::Sm90a)) {
            let Form::Hopper(staging) = variant.form else { unreachable!() };
            let (c, tile) = (variant.hopper(staging), variant.tile);
            let (partial, output) =
                (variant.numerics.partial_bytes() as u32, variant.numerics.output.bytes() as u32);
            assert_eq!(c.blocks * WGMMA_ROWS * c.wgmma_n * CONSUMERS, tile.m * tile.n, "{variant}");
            assert!(c.wgmma_n.is_multiple_of(if c.swap_ab { 8 } else { 16 }), "{variant}");
            assert!(c.wgmma_n <= 256 && c.blocks * c.wgmma_n <= 384, "{variant}");
            let boxes = c.blocks * c.boxes * c.box_bytes * variant.columns_per_output();
            assert_eq!(boxes, c.out_bytes_per_consumer, "{variant}");
            let staged_rows = c.part_rows * if c.split_columns { 1 } else { CONSUMERS };
            let staged = c.barrier_offset - c.out_offset;
            assert!(!c.scatters || staged_rows * c.out_row_bytes <= staged, "{variant}");
            if tile.sends_partials_from(staging, variant.numerics.output) {
                let piece = CONSUMERS * c.piece_bytes_per_consumer;
                assert!(c.accumulators.is_multiple_of(2), "{variant}");
                assert!(piece <= c.stage_bytes, "{variant}");
                assert!(piece <= c.staging_buffers * c.out_bytes_per_consumer, "{variant}");
            }
            // What flux-core plans for a partial tile.
            assert!(c.pieces <= IN_MAINLOOP_GAP * partial / output, "{variant}");
            let of_threads = WARPGROUP * VECTOR_BYTES * CONSUMERS;
            assert_eq!(c.split_k_slot_bytes, c.split_k_vectors * of_threads, "{variant}");
            assert!(c.accumulators.is_multiple_of(4), "{variant}");
            assert!(c.split_k_piece_vectors * of_threads <= c.stage_bytes, "{variant}");
            // From a border of 1024 bytes on.
            let end = c.opened_offset + BARRIER_BYTES + 1024;
            assert_eq!(end, variant.shared_bytes(), "{variant}");
        }
    }
}
