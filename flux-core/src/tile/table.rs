//! The tile table: every tile with kernels, and what follows from its shape.
//!
//! Invariant: the kernels are compiled from this list (`flux-kernels/src/variant.rs`), and plans
//! take their tiles from it. `flux-kernels/cuda/sm90/config.cuh` computes the same bytes.

use super::TileShape;
use Kernels::{Both, PerConsumer, Shared};

/// Shared memory of a CTA on Hopper, in bytes (CUDA C++ Programming Guide, table of technical
/// specifications, compute capability 9.0).
pub const HOPPER_SHARED_BYTES: u32 = 227 << 10;

/// Consumer warpgroups of a CTA.
const CONSUMERS: u32 = 2;
/// Fewest stages that keep the tensor cores fed.
const FEWEST_STAGES: u32 = 3;
/// Most stages of a ring; stages are loaded in pairs, so it is even.
const MOST_STAGES: u32 = 12;
/// Bytes between staged rows, so that the rows of a matrix store meet different banks.
const ROW_GAP: u32 = 16;
/// Two words and the alignment of the first stage.
const WORDS_AND_ALIGNMENT: u32 = 16 + 1024;

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
enum Kernels {
    PerConsumer,
    Shared,
    Both,
}

/// Rows, columns, kernels; wide tiles first.
const TABLE: [(u32, u32, Kernels); 27] = [
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
];
/// Step along `k` of every tile: one swizzled row of 128 bytes.
const STEP: u32 = 64;

impl TileShape {
    /// Every tile with kernels.
    ///
    /// ```
    /// use flux_core::TileShape;
    /// assert!(TileShape::all().any(|tile| tile == TileShape::new(128, 256, 64)));
    /// assert!(TileShape::all().all(|tile| tile.scatters() || tile.sends_partials()));
    /// ```
    pub fn all() -> impl Iterator<Item = Self> + Clone {
        TABLE.iter().map(|&(m, n, _)| Self::new(m, n, STEP))
    }

    /// The staging forms of this tile's kernels; none outside the table.
    pub fn stagings(self) -> impl Iterator<Item = Staging> {
        let kernels = TABLE.iter().find(|&&(m, n, _)| (m, n, STEP) == (self.m, self.n, self.k)).map(|&(.., kernels)| kernels);
        let per_consumer = matches!(kernels, Some(PerConsumer | Both)).then_some(Staging::PerConsumer);
        per_consumer.into_iter().chain(matches!(kernels, Some(Shared | Both)).then_some(Staging::Shared))
    }

    /// Whether a kernel of this tile scatters rows to several owners, as a GEMM-ReduceScatter with
    /// flattened rows needs. It stages the whole tile.
    pub fn scatters(self) -> bool {
        self.stagings().any(|staging| staging == Staging::PerConsumer)
    }

    /// Whether a kernel of this tile sends partial tiles, as a GEMM-ReduceScatter with rows per
    /// shard needs.
    pub fn sends_partials(self) -> bool {
        self.stagings().any(|staging| self.sends_partials_from(staging))
    }

    /// Whether this form sends partial tiles: `kCanSendPartials` of `config.cuh`. Swap-AB tiles
    /// need a shared buffer, and 16-byte vectors of rounded accumulators in each thread.
    pub const fn sends_partials_from(self, staging: Staging) -> bool {
        let whole_vectors = (self.m * self.n).is_multiple_of(8 * 128 * CONSUMERS);
        !self.swaps_ab() || matches!(staging, Staging::Shared) && whole_vectors
    }

    /// Operand stages that fit in `shared_bytes` of shared memory beside the staging buffers;
    /// `None` if they are too few.
    ///
    /// ```
    /// use flux_core::TileShape;
    /// use flux_core::tile::{HOPPER_SHARED_BYTES, Staging};
    /// let stages = |staging| TileShape::new(128, 256, 64).stages(staging, HOPPER_SHARED_BYTES);
    /// assert_eq!([Staging::PerConsumer, Staging::Shared].map(stages), [Some(3), Some(4)]);
    /// ```
    pub fn stages(self, staging: Staging, shared_bytes: u32) -> Option<u32> {
        // An eighth stage of 64x128 fits, but no record measures it.
        let most = if (self.m, self.n) == (64, 128) { 7 } else { MOST_STAGES };
        // All kernels of a form have the stages of the scattering one, whose rows have gaps.
        (FEWEST_STAGES..=most).rev().find(|&stages| self.shared_bytes(staging, stages, true) <= shared_bytes)
    }

    /// Dynamic shared memory of a CTA, in bytes: stages, staging buffers, barriers, two words and
    /// the alignment. Staged rows of scattering kernels have gaps.
    pub const fn shared_bytes(self, staging: Staging, stages: u32, scatters: bool) -> u32 {
        let stage = (self.m + self.n) * self.k * 2;
        let gaps = if scatters && matches!(staging, Staging::PerConsumer) { self.m * ROW_GAP } else { 0 };
        let staged = self.m * self.n * 2 * staging.buffers() / CONSUMERS + gaps;
        let barriers = 2 * stages + 2 * CONSUMERS + 6;
        stages * stage + staged + barriers * 8 + WORDS_AND_ALIGNMENT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_fill_the_memory_that_the_staged_tile_leaves() {
        let stages = |m, n, staging| TileShape::new(m, n, 64).stages(staging, HOPPER_SHARED_BYTES);
        assert_eq!(stages(256, 192, Staging::PerConsumer), None, "two stages are too few");
        assert_eq!(stages(256, 192, Staging::Shared), Some(3));
        assert_eq!(stages(128, 256, Staging::PerConsumer), Some(3));
        assert_eq!(stages(128, 256, Staging::Shared), Some(4));
        assert_eq!(stages(128, 128, Staging::PerConsumer), Some(5), "a sixth fits only without gaps between rows");
        assert_eq!(stages(64, 64, Staging::PerConsumer), Some(12));
    }

    #[test]
    fn every_form_fits_its_budget_and_none_fits_too_small_a_one() {
        for (tile, staging) in TileShape::all().flat_map(|tile| tile.stagings().map(move |staging| (tile, staging))) {
            let stages = tile.stages(staging, HOPPER_SHARED_BYTES).unwrap();
            assert!(tile.shared_bytes(staging, stages, true) <= HOPPER_SHARED_BYTES, "{tile}");
            assert!(tile.stages(staging, 100 << 10).is_none_or(|fewer| fewer < stages), "{tile}");
            assert_eq!(tile.stages(staging, 16 << 10), None, "{tile}");
        }
    }

    #[test]
    fn tiles_outside_the_table_have_no_kernels() {
        for tile in [TileShape::new(128, 256, 32), TileShape::new(128, 160, 64)] {
            assert_eq!((tile.stagings().count(), tile.scatters(), tile.sends_partials()), (0, false, false));
        }
    }
}
