//! Generations of the fused kernel, and the tiles that each has.
//!
//! Invariant: the kernels of a generation are compiled from its tiles, and plans take theirs from
//! the generation of their machine.

use super::{Staging, TileShape, hopper, portable, step_of};
use crate::Numerics;
use std::fmt;

/// A kernel of its own, for the devices whose instructions it uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Generation {
    /// Compute capability 9.0: wgmma and bulk tensor copies.
    Hopper,
    /// Compute capability 8.0 and up: mma.sync and cp.async.
    Portable,
    /// Compute capability 8.9 and up: the same kernel, whose mma.sync also multiplies 8-bit
    /// operands.
    Ada,
}

impl Generation {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::Hopper, Self::Portable, Self::Ada];

    /// Its name in tables and reports: the architecture that its instructions came with.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hopper => "sm_90a",
            Self::Portable => "sm_80",
            Self::Ada => "sm_89",
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
        let (hopper, portable): (&[_], &[_]) = match self {
            Self::Hopper => (&hopper::HOPPER, &[]),
            Self::Portable if numerics.operand.is_quantized() => (&[], &[]),
            Self::Portable | Self::Ada => (&[], &portable::PORTABLE),
        };
        let hopper = hopper.iter().map(|&(m, n, _)| (m, n));
        hopper
            .chain(portable.iter().copied())
            .map(move |(m, n)| TileShape::new(m, n, step_of(numerics.operand)))
            .filter(move |tile| match self {
                Self::Hopper => tile.has_registers_for(numerics),
                Self::Portable | Self::Ada => tile.has_portable_registers_for(numerics),
            })
    }

    /// Whether a kernel of it multiplies such operands.
    pub fn multiplies(self, numerics: Numerics) -> bool {
        self.tiles(numerics).next().is_some()
    }

    /// Elements that pass through an SM's shared memory for each one along `k`, where that can
    /// limit the tile: mma.sync takes operands from registers, wgmma from shared memory.
    pub(crate) fn shared_elements(self, tile: TileShape, numerics: Numerics) -> Option<u32> {
        match self {
            Self::Hopper => None,
            Self::Portable | Self::Ada => Some(tile.portable_shared_elements(numerics)),
        }
    }

    /// Whether a kernel of this tile scatters rows to several owners, as a GEMM-ReduceScatter with
    /// flattened rows needs.
    pub fn scatters(self, tile: TileShape, numerics: Numerics) -> bool {
        match self {
            // It stages the whole tile.
            Self::Hopper => tile.stagings(numerics).any(|staging| staging == Staging::PerConsumer),
            Self::Portable | Self::Ada => self.tiles(numerics).any(|t| t == tile),
        }
    }

    /// Whether a kernel of this tile sends partial tiles, as a GEMM-ReduceScatter with rows per
    /// shard needs.
    pub fn sends_partials(self, tile: TileShape, numerics: Numerics) -> bool {
        match self {
            Self::Hopper => tile
                .stagings(numerics)
                .any(|staging| tile.sends_partials_from(staging, numerics.output)),
            Self::Portable | Self::Ada => self.tiles(numerics).any(|t| t == tile),
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
    use crate::numerics::SCALE_BLOCK;
    use crate::{DType, Scales};

    #[test]
    fn eight_bit_operands_need_the_instructions_of_ada_or_hopper() {
        let sums = |tile: TileShape| tile.m * tile.n / (32 * portable::PORTABLE_WARPS);
        for scales in Scales::OF_QUANTIZED {
            let numerics = Numerics::e4m3(scales, DType::Bf16);
            let multiply = Generation::ALL.map(|generation| generation.multiplies(numerics));
            assert_eq!(multiply, [true, false, true], "{numerics}");
            for tile in Generation::Ada.tiles(numerics) {
                assert!(sums(tile) <= 64 && tile.k == 128, "{tile} {numerics}");
                assert!(scales != Scales::Block || tile.n == SCALE_BLOCK, "{tile}");
            }
        }
        let [of_16_bits, of_ada] =
            [Generation::Portable, Generation::Ada].map(|of| of.tiles(DType::Bf16.into()));
        assert!(of_16_bits.eq(of_ada), "of 16-bit operands it is the same kernel");
    }

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
