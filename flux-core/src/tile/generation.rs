//! Generations of the fused kernel, and the tiles that each has.
//!
//! Invariant: the kernels of a generation are compiled from its tiles, and plans take theirs from
//! the generation of their machine.

use super::TileShape;
use super::table::{self, Staging};
use crate::{DType, Numerics};
use std::fmt;

/// A kernel of its own, for the devices whose instructions it uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Generation {
    /// Compute capability 9.0: wgmma and bulk tensor copies.
    Hopper,
    /// Compute capability 8.0 and up: mma.sync and cp.async.
    Portable,
}

impl Generation {
    /// Every one.
    pub const ALL: [Self; 2] = [Self::Hopper, Self::Portable];

    /// Its name in tables and reports: the architecture that its instructions came with.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hopper => "sm_90a",
            Self::Portable => "sm_80",
        }
    }

    /// Every tile with kernels for such numbers, wide tiles first.
    ///
    /// ```
    /// use flux_core::{DType, TileShape};
    /// use flux_core::tile::Generation;
    /// let tile = TileShape::new(128, 256, 64);
    /// let has = |generation: Generation| generation.tiles(DType::Bf16.into()).any(|t| t == tile);
    /// assert!(Generation::ALL.into_iter().all(has));
    /// ```
    pub fn tiles(self, numerics: Numerics) -> impl Iterator<Item = TileShape> + Clone {
        let of = |generation| if self == generation { usize::MAX } else { 0 };
        let hopper = table::HOPPER.iter().take(of(Self::Hopper)).map(|&(m, n, _)| (m, n));
        // Tensor cores multiply 8-bit operands from compute capability 8.9 on.
        let portable = if numerics.operand == DType::E4m3 { 0 } else { of(Self::Portable) };
        hopper
            .chain(table::PORTABLE.iter().take(portable).copied())
            .map(move |(m, n)| TileShape::new(m, n, table::step(numerics.operand)))
            .filter(move |tile| self == Self::Portable || tile.has_registers_for(numerics))
    }

    /// Elements that pass through an SM's shared memory for each one along `k`, where that can
    /// limit the tile: mma.sync takes operands from registers, wgmma from shared memory.
    pub(crate) fn shared_elements(self, tile: TileShape) -> Option<u32> {
        match self {
            Self::Hopper => None,
            Self::Portable => Some(tile.portable_shared_elements()),
        }
    }

    /// Whether a kernel of this tile scatters rows to several owners, as a GEMM-ReduceScatter with
    /// flattened rows needs.
    pub fn scatters(self, tile: TileShape, numerics: Numerics) -> bool {
        match self {
            // It stages the whole tile.
            Self::Hopper => tile.stagings(numerics).any(|staging| staging == Staging::PerConsumer),
            Self::Portable => self.tiles(numerics).any(|t| t == tile),
        }
    }

    /// Whether a kernel of this tile sends partial tiles, as a GEMM-ReduceScatter with rows per
    /// shard needs.
    pub fn sends_partials(self, tile: TileShape, numerics: Numerics) -> bool {
        match self {
            Self::Hopper => tile
                .stagings(numerics)
                .any(|staging| tile.sends_partials_from(staging, numerics.output)),
            Self::Portable => self.tiles(numerics).any(|t| t == tile),
        }
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_of_another_generation_have_no_kernels() {
        let [hopper, portable] = [TileShape::new(136, 256, 64), TileShape::new(16, 128, 64)];
        let bf16 = DType::Bf16.into();
        assert!(Generation::Hopper.scatters(hopper, bf16));
        assert!(!Generation::Portable.scatters(hopper, bf16));
        assert!(Generation::Portable.sends_partials(portable, bf16));
        assert!(!Generation::Hopper.sends_partials(portable, bf16));
    }
}
