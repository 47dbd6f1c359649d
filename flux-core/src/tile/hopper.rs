//! Hopper's tiles: every one with kernels, and what follows from its shape.
//!
//! Invariant: the kernels are compiled from this list (`flux-kernels/src/variant/choice.rs`), and
//! plans take their tiles from it. The kernels' shared memory is laid out by what is here.

use super::{BARRIER_BYTES, TileShape, step_of};
use crate::numerics::{SCALE_BLOCK, VECTOR_BYTES};
use crate::{DType, Numerics, Scales};
use Kernels::{Both, PerConsumer, Shared};

/// Shared memory of a CTA on Hopper, in bytes (CUDA C++ Programming Guide, table of technical
/// specifications, compute capability 9.0).
pub const HOPPER_SHARED_BYTES: u32 = 227 << 10;

/// Consumer warpgroups of a CTA.
pub const CONSUMERS: u32 = 2;
/// Fewest stages that keep the tensor cores fed.
const FEWEST_STAGES: u32 = 3;
/// Most stages of a ring, as many as of the smallest tile fit.
const MOST_STAGES: u32 = 18;
/// Rings of more stages have whole pairs, which are loaded together.
const MOST_SINGLE_STAGES: u32 = 8;
/// Bytes between staged rows, so that the rows of a matrix store meet different banks.
pub const ROW_GAP: u32 = VECTOR_BYTES;
/// Two words and the alignment of the first stage.
const WORDS_AND_ALIGNMENT: u32 = 2 * BARRIER_BYTES + 1024;

/// Barriers of a CTA on Hopper: of each stage, of each consumer's staging buffer, and seven more.
pub const fn hopper_barriers(stages: u32) -> u32 {
    2 * stages + 2 * CONSUMERS + 7
}

/// Epilogue staging buffers of a CTA in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Staging {
    /// One buffer for each consumer, which holds the whole tile.
    PerConsumer,
    /// One buffer for all consumers, which often leaves room for one more stage.
    Shared,
}

impl Staging {
    /// Number of epilogue staging buffers.
    pub const fn buffers(self) -> u32 {
        match self {
            Self::PerConsumer => CONSUMERS,
            Self::Shared => 1,
        }
    }
}

/// The [`Staging`] forms that a tile's kernels are compiled with.
#[derive(Clone, Copy)]
pub(super) enum Kernels {
    PerConsumer,
    Shared,
    Both,
}

/// Rows, columns, kernels of Hopper; wide tiles first.
pub(super) const HOPPER: [(u32, u32, Kernels); 29] = [
    (256, 192, Shared),
    (192, 256, Shared),
    (128, 256, Both),
    (256, 128, PerConsumer),
    (128, 224, Both),
    (128, 192, PerConsumer),
    (184, 256, Shared),
    (176, 256, Shared),
    (168, 256, Shared),
    (160, 256, Shared),
    (152, 256, Shared),
    (144, 256, Shared),
    (136, 256, PerConsumer),
    (160, 192, Both),
    (144, 192, Both),
    (240, 128, Both),
    (208, 128, PerConsumer),
    (176, 128, PerConsumer),
    (152, 128, PerConsumer),
    (128, 128, PerConsumer),
    (128, 96, PerConsumer),
    (128, 64, PerConsumer),
    (64, 256, PerConsumer),
    (64, 192, PerConsumer),
    (64, 128, PerConsumer),
    (64, 96, PerConsumer),
    (64, 64, PerConsumer),
    (32, 128, PerConsumer),
    (32, 64, PerConsumer),
];

/// Most registers of a consumer's thread for sums that leave the tensor cores: those of the tile,
/// and of one m64 block on its way there.
const MOST_PROMOTED_SUMS: u32 = 192;
/// Most sums of a thread that it multiplies by scales of rows and columns without a spill.
const MOST_SCALED_SUMS: u32 = 184;
/// The same of promoted sums.
const MOST_SCALED_PROMOTED_SUMS: u32 = 120;
/// Most rows of a swap-AB tile with scales of blocks, of which a warp reads one a lane.
const MOST_SWAPPED_BLOCK_ROWS: u32 = 32;
/// Rows of wgmma's operand A.
pub const WGMMA_ROWS: u32 = 64;

/// What a consumer of a Hopper tile multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConsumerPart {
    /// Rows of the tile.
    pub rows: u32,
    /// Columns of the tile.
    pub cols: u32,
    /// Blocks of [`WGMMA_ROWS`].
    pub blocks: u32,
    /// The other extent of a block's product.
    pub wgmma_n: u32,
}

impl TileShape {
    /// Whether Hopper's consumers split a tile by columns instead of rows.
    pub const fn splits_columns(self) -> bool {
        self.m == WGMMA_ROWS || self.swaps_ab() && self.n.is_multiple_of(WGMMA_ROWS * CONSUMERS)
    }

    /// One consumer's part of a Hopper tile.
    pub const fn consumer_part(self) -> ConsumerPart {
        let (rows, cols) = if self.splits_columns() {
            (self.m, self.n / CONSUMERS)
        } else {
            (self.m / CONSUMERS, self.n)
        };
        let (of_m, wgmma_n) = if self.swaps_ab() { (cols, rows) } else { (rows, cols) };
        ConsumerPart { rows, cols, blocks: of_m / WGMMA_ROWS, wgmma_n }
    }

    /// Whether a Hopper kernel of such numbers has registers for it. Sums of 8-bit products leave
    /// the tensor cores block by block, unless accumulation is fast. With a scale for each block of
    /// `w`, a tile's columns have one. Each warp of a swap-AB tile then reads the scales of all rows
    /// in every step, so such a tile has few.
    pub(super) const fn has_registers_for(self, numerics: Numerics) -> bool {
        let ConsumerPart { blocks, wgmma_n, .. } = self.consumer_part();
        let (sums, in_flight) = (blocks * wgmma_n / 2, wgmma_n / 2);
        let promoted = sums + in_flight <= MOST_PROMOTED_SUMS;
        match numerics.scales {
            Scales::None => true,
            Scales::Block => {
                let few = !self.swaps_ab() || self.m <= MOST_SWAPPED_BLOCK_ROWS;
                promoted && few && SCALE_BLOCK.is_multiple_of(self.n)
            }
            // Scales of rows and columns lie in registers, too.
            Scales::Tensor | Scales::Row if numerics.promotes() => {
                promoted && sums <= MOST_SCALED_PROMOTED_SUMS
            }
            Scales::Tensor | Scales::Row => sums <= MOST_SCALED_SUMS,
        }
    }

    /// The staging forms of this tile's kernels on Hopper; none outside the table.
    pub fn stagings(self, numerics: Numerics) -> impl Iterator<Item = Staging> {
        let kernels = HOPPER
            .iter()
            .find(|&&(m, n, _)| TileShape::new(m, n, step_of(numerics.operand)) == self)
            .filter(|_| self.has_registers_for(numerics))
            .map(|&(.., kernels)| kernels);
        let per_consumer =
            matches!(kernels, Some(PerConsumer | Both)).then_some(Staging::PerConsumer);
        per_consumer
            .into_iter()
            .chain(matches!(kernels, Some(Shared | Both)).then_some(Staging::Shared))
    }

    /// Whether this form sends partial tiles. Swap-AB tiles need a shared buffer, and whole vectors
    /// of rounded accumulators in each thread. Partial sums in fp32 have the same tiles.
    pub const fn sends_partials_from(self, staging: Staging, rounded: DType) -> bool {
        let whole_vectors =
            (self.m * self.n).is_multiple_of(rounded.per_vector() * 128 * CONSUMERS);
        !self.swaps_ab() || matches!(staging, Staging::Shared) && whole_vectors
    }

    /// Operand stages that fit in `shared_bytes` of shared memory beside the staging buffers;
    /// `None` if they are too few.
    ///
    /// ```
    /// use flux_core::tile::{HOPPER_SHARED_BYTES, Staging};
    /// use flux_core::{DType, TileShape};
    /// let (tile, bf16) = (TileShape::new(128, 256, 64), DType::Bf16.into());
    /// let stages = |staging| tile.stages(staging, bf16, HOPPER_SHARED_BYTES);
    /// assert_eq!([Staging::PerConsumer, Staging::Shared].map(stages), [Some(3), Some(4)]);
    /// ```
    pub fn stages(self, staging: Staging, numerics: Numerics, shared_bytes: u32) -> Option<u32> {
        // All kernels of a form have the stages of the scattering one, whose rows have gaps.
        (FEWEST_STAGES..=MOST_STAGES)
            .rev()
            .filter(|&stages| stages <= MOST_SINGLE_STAGES || stages.is_multiple_of(2))
            .find(|&stages| self.shared_bytes(staging, numerics, stages, true) <= shared_bytes)
    }

    /// Dynamic shared memory of a CTA, in bytes: stages, staging buffers, barriers, two words and
    /// the alignment. Staged rows of scattering kernels have gaps.
    pub const fn shared_bytes(
        self,
        staging: Staging,
        numerics: Numerics,
        stages: u32,
        scatters: bool,
    ) -> u32 {
        let staged = self.staged_bytes(staging, numerics.output, scatters);
        stages * self.stage_bytes(numerics.operand)
            + staged
            + hopper_barriers(stages) * BARRIER_BYTES
            + WORDS_AND_ALIGNMENT
    }

    /// Bytes of the epilogue staging buffers of a CTA on Hopper.
    pub const fn staged_bytes(self, staging: Staging, output: DType, scatters: bool) -> u32 {
        let gaps =
            if scatters && matches!(staging, Staging::PerConsumer) { self.m * ROW_GAP } else { 0 };
        self.m * self.n * output.bytes() as u32 * staging.buffers() / CONSUMERS + gaps
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tile::Generation;

    fn bf16() -> Numerics {
        DType::Bf16.into()
    }

    #[test]
    fn stages_fill_the_memory_that_the_staged_tile_leaves() {
        let stages =
            |m, n, staging| TileShape::new(m, n, 64).stages(staging, bf16(), HOPPER_SHARED_BYTES);
        assert_eq!(stages(256, 192, Staging::PerConsumer), None, "two stages are too few");
        assert_eq!(stages(256, 192, Staging::Shared), Some(3));
        assert_eq!(stages(128, 256, Staging::PerConsumer), Some(3));
        assert_eq!(stages(128, 256, Staging::Shared), Some(4));
        assert_eq!(
            stages(128, 128, Staging::PerConsumer),
            Some(5),
            "a sixth fits only without gaps between rows"
        );
        assert_eq!(stages(64, 64, Staging::PerConsumer), Some(12));
    }

    #[test]
    fn every_form_fits_its_budget_and_none_fits_too_small_a_one() {
        for (tile, staging) in Generation::Hopper
            .tiles(bf16())
            .flat_map(|tile| tile.stagings(bf16()).map(move |staging| (tile, staging)))
        {
            let stages = tile.stages(staging, bf16(), HOPPER_SHARED_BYTES).unwrap();
            assert!(
                tile.shared_bytes(staging, bf16(), stages, true) <= HOPPER_SHARED_BYTES,
                "{tile}"
            );
            assert!(
                tile.stages(staging, bf16(), 100 << 10).is_none_or(|fewer| fewer < stages),
                "{tile}"
            );
            assert_eq!(tile.stages(staging, bf16(), 16 << 10), None, "{tile}");
        }
    }

    #[test]
    fn tiles_outside_the_table_have_no_kernels() {
        for tile in [TileShape::new(128, 256, 32), TileShape::new(128, 160, 64)] {
            let has = Generation::ALL.map(|generation| {
                generation.scatters(tile, bf16()) || generation.sends_partials(tile, bf16())
            });
            assert_eq!((tile.stagings(bf16()).count(), has), (0, [false; 3]));
        }
    }
}
