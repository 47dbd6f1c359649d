//! The portable kernel's tiles: every one with kernels, and what follows from its shape.
//!
//! Invariant: as of `hopper.rs`.

use super::{BARRIER_BYTES, TileShape};
use crate::numerics::SCALE_BLOCK;
use crate::{Numerics, Scales};

/// Threads of a warp.
const WARP: u32 = 32;
/// Consumer warps of the portable kernel.
pub const PORTABLE_WARPS: u32 = 8;
/// Fewest stages of the portable kernel: one is filled while another is multiplied.
const FEWEST_PORTABLE_STAGES: u32 = 2;
/// Most stages of the portable kernel's ring.
const MOST_PORTABLE_STAGES: u32 = 12;
/// Three words and the alignment of the first stage.
const PORTABLE_WORDS_AND_ALIGNMENT: u32 = 3 * BARRIER_BYTES + 1024;

/// Most sums of a thread of the portable kernel with 8-bit operands. Where `mma.sync` has none of
/// these, as on compute capability 10.0, their conversion takes registers, too.
const MOST_PORTABLE_SCALED_SUMS: u32 = 64;
/// Most of them that leave the tensor cores at a time.
const MOST_PORTABLE_SUMS_OF_PART: u32 = 32;

/// Barriers of a CTA of the portable kernel: of each stage, and four more.
pub const fn portable_barriers(stages: u32) -> u32 {
    2 * stages + 4
}

/// Rows and columns of the portable kernel's tiles; wide tiles first.
pub(super) const PORTABLE: [(u32, u32); 9] = [
    (256, 128),
    (128, 256),
    (128, 128),
    (64, 256),
    (64, 128),
    (32, 256),
    (32, 128),
    (16, 256),
    (16, 128),
];

impl TileShape {
    /// The portable kernel's warps along `m` and `n`, each with a block of the tile as square as it
    /// can be.
    pub const fn portable_warps(self) -> (u32, u32) {
        let along_m = match self.m {
            256.. => 4,
            64.. => 2,
            _ => 1,
        };
        (along_m, PORTABLE_WARPS / along_m)
    }

    /// Whether the portable kernel has registers for it with such numbers, and the tile's columns
    /// one scale of a block.
    pub(super) const fn has_portable_registers_for(self, numerics: Numerics) -> bool {
        let sums = self.portable_sums();
        match numerics.scales {
            Scales::None => true,
            Scales::Tensor | Scales::Row => sums <= MOST_PORTABLE_SCALED_SUMS,
            Scales::Block => {
                sums <= MOST_PORTABLE_SCALED_SUMS && SCALE_BLOCK.is_multiple_of(self.n)
            }
        }
    }

    /// Parts of a warp's columns that the portable kernel multiplies one after the other in a step:
    /// of one part there are registers for sums that leave the tensor cores.
    pub const fn portable_parts(self, numerics: Numerics) -> u32 {
        if numerics.promotes() {
            self.portable_sums().div_ceil(MOST_PORTABLE_SUMS_OF_PART)
        } else {
            1
        }
    }

    /// Sums of a thread of the portable kernel.
    const fn portable_sums(self) -> u32 {
        self.m * self.n / (WARP * PORTABLE_WARPS)
    }

    /// Elements that pass through shared memory for each one along `k` in the portable kernel.
    /// Producers write a column of both operands, and every warp reads those of its block. It reads
    /// the rows' anew for each part of its columns.
    pub(crate) const fn portable_shared_elements(self, numerics: Numerics) -> u32 {
        let (along_m, along_n) = self.portable_warps();
        self.m * (1 + along_n * self.portable_parts(numerics)) + self.n * (1 + along_m)
    }

    /// Operand stages of the portable kernel that fit in `shared_bytes` of shared memory; `None` if
    /// they are too few.
    ///
    /// ```
    /// use flux_core::{DType, TileShape};
    /// let (tile, bf16) = (TileShape::new(128, 256, 64), DType::Bf16.into());
    /// let stages = |kib: u32| tile.portable_stages(bf16, kib << 10);
    /// assert_eq!([99, 163, 227].map(stages), [Some(2), Some(3), Some(4)]);
    /// ```
    pub fn portable_stages(self, numerics: Numerics, shared_bytes: u32) -> Option<u32> {
        (FEWEST_PORTABLE_STAGES..=MOST_PORTABLE_STAGES)
            .rev()
            .find(|&stages| self.portable_shared_bytes(numerics, stages) <= shared_bytes)
    }

    /// Dynamic shared memory of a CTA of the portable kernel, in bytes: stages, barriers, three
    /// words and the alignment.
    pub const fn portable_shared_bytes(self, numerics: Numerics, stages: u32) -> u32 {
        stages * self.stage_bytes(numerics.operand)
            + portable_barriers(stages) * BARRIER_BYTES
            + PORTABLE_WORDS_AND_ALIGNMENT
    }
}
