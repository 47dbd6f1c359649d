//! Time of a Hopper tile's steps along `k` relative to their operations, for the simulator.
//!
//! Invariant: it depends on the tile's extents alone, and is never below 100 %.

use super::TileShape;
use crate::DType;

/// Bytes that pass through an SM's shared memory in a cycle: 32 banks of 4 bytes (CUDA C++
/// Programming Guide, "Compute Capabilities", from 5.x on).
pub(crate) const SHARED_BYTES_PER_CYCLE: u64 = 128;
/// Rows of wgmma's operand A.
const BLOCK: u64 = 64;
/// Dense 16-bit operations of an SM in a cycle (H100 data sheet).
const OPERATIONS: u64 = 4096;
/// Percent of the excess shared-memory time that shows: waiting for operands draws less power, so
/// the clock is higher. Fitted by hand to times for equal area, relative to 128x256: tiles of
/// 104x256 took 1.16, those of 152x128 1.06 to 1.10. All of the excess would make 1.24 and 1.17.
const EXCESS_PERCENT: u64 = 50;

impl TileShape {
    /// Time of a step in percent of its operations: above 100 if shared memory bounds it. Each
    /// product of 64 rows reads them and all columns; loads write both operands.
    pub(crate) const fn wgmma_step_percent(self, operand: DType) -> u64 {
        let (m, n) = (self.m as u64, self.n as u64);
        let (blocked, other) = if self.swaps_ab() { (n, m) } else { (m, n) };
        if self.k == 0 || blocked == 0 || !blocked.is_multiple_of(BLOCK) {
            return 100;
        }
        // With an odd number of blocks two consumers take half of the other side each.
        let blocks = blocked / BLOCK;
        let products = if blocks % 2 == 1 {
            2 * blocks * (BLOCK + other / 2)
        } else {
            blocks * (BLOCK + other)
        };
        // Bytes of one element along `k`, and those that there is time for.
        let moved = (products + m + n) * operand.bytes() as u64;
        let free = 2 * m * n * SHARED_BYTES_PER_CYCLE / (OPERATIONS * operand.relative_rate());
        100 + if moved > free { (moved - free) * EXCESS_PERCENT / free } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_tiles_are_bound_by_shared_memory() {
        let percent = |m, n| TileShape::new(m, n, 64).wgmma_step_percent(DType::Bf16);
        assert_eq!([percent(128, 256), percent(256, 192), percent(176, 256)], [100, 100, 100]);
        assert_eq!([percent(128, 192), percent(128, 128), percent(136, 128)], [104, 112, 111]);
        assert_eq!([percent(104, 256), percent(160, 192)], [112, 113]);
    }
}
