//! How long a tile's steps along `k` take relative to their operations.
//!
//! Invariant: it depends on the tile's extents alone, and is 100 % where nothing but the tensor
//! cores bounds a step.

use super::TileShape;

/// Rows of wgmma's m operand come in blocks of so many; the n operand takes any multiple of 8.
const BLOCK: u64 = 64;
/// Operations of a multiprocessor in a cycle.
const OPERATIONS: u64 = 4096;
/// Bytes of shared memory that it reads and writes in a cycle.
const SHARED: u64 = 128;
/// The part of a step's extra shared-memory time that is seen, in percent: waiting for operands
/// draws less power, so the clock is higher.
const SEEN: u64 = 50;

impl TileShape {
    /// Whether its multiplication exchanges the operands. wgmma takes rows in blocks of 64, of
    /// which two consumers need as many each; they split a single block by columns.
    ///
    /// ```
    /// use flux_core::TileShape;
    /// let swaps = |m| TileShape::new(m, 256, 64).swaps_ab();
    /// assert_eq!([64, 128, 256, 136, 192].map(swaps), [false, false, false, true, true]);
    /// ```
    pub const fn swaps_ab(self) -> bool {
        self.m != BLOCK as u32 && !self.m.is_multiple_of(2 * BLOCK as u32)
    }

    /// The time of a step relative to its operations, in percent: above 100 where shared memory
    /// bounds it. Every product reads 64 rows and all columns from there, and the loads write
    /// there. Tiles without a kernel are 100.
    ///
    /// ```
    /// use flux_core::TileShape;
    /// let percent = |m, n| TileShape::new(m, n, 64).step_percent();
    /// assert_eq!([percent(128, 256), percent(256, 192), percent(176, 256)], [100, 100, 100]);
    /// assert_eq!([percent(128, 192), percent(128, 128)], [104, 112]);
    /// assert_eq!([percent(136, 128), percent(104, 256), percent(160, 192)], [111, 112, 113]);
    /// ```
    pub const fn step_percent(self) -> u64 {
        let (m, n) = (self.m as u64, self.n as u64);
        let (blocked, other) = if self.swaps_ab() { (n, m) } else { (m, n) };
        if self.k == 0 || blocked == 0 || !blocked.is_multiple_of(BLOCK) {
            return 100;
        }
        // Of an odd number of blocks, two consumers take half of the other side each.
        let blocks = blocked / BLOCK;
        let products = if blocks % 2 == 1 { 2 * blocks * (BLOCK + other / 2) } else { blocks * (BLOCK + other) };
        // Bytes of a step of one element along k, of 16 bits.
        let (moved, free) = ((products + m + n) * 2, 2 * m * n * SHARED / OPERATIONS);
        let longer = if moved > free { (moved - free) * SEEN / free } else { 0 };
        100 + longer
    }
}
