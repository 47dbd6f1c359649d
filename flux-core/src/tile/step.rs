//! How long a tile's steps along `k` take for their operations.
//!
//! Invariant: it depends on the tile's extents alone, and is 100 % where a kernel's multiplication
//! is bound by nothing else.

use super::TileShape;

/// Rows of wgmma's operand that comes in blocks of so many; of the other it takes any multiple
/// of 8.
const BLOCK: u64 = 64;
/// Operations of a multiprocessor in a cycle.
const OPERATIONS: u64 = 4096;
/// Bytes of shared memory that it reads and writes in a cycle.
const SHARED: u64 = 128;
/// The part of a step's extra shared-memory time that is seen, in percent: waiting for operands
/// draws less power, so the clock is higher.
const SEEN: u64 = 50;

impl TileShape {
    /// Whether columns take the place of rows in its multiplication: rows come in blocks of 64
    /// there, of which two consumers cannot have as many each. A single block they share by
    /// columns.
    ///
    /// ```
    /// use flux_core::TileShape;
    /// let swaps = |m| TileShape::new(m, 256, 64).swaps_ab();
    /// assert_eq!([64, 128, 256, 136, 192].map(swaps), [false, false, false, true, true]);
    /// ```
    pub const fn swaps_ab(self) -> bool {
        self.m != BLOCK as u32 && !self.m.is_multiple_of(2 * BLOCK as u32)
    }

    /// The time of a step relative to its operations, in percent: more than 100 where shared memory
    /// bounds it, which is read by every product of 64 rows and all columns, and written to by the
    /// loads. Tiles that no kernel has take what their operations do.
    ///
    /// ```
    /// use flux_core::TileShape;
    /// let percent = |m, n| TileShape::new(m, n, 64).step_percent();
    /// assert_eq!([percent(128, 256), percent(256, 192), percent(176, 256)], [100, 100, 100]);
    /// assert_eq!([percent(128, 192), percent(128, 128), percent(136, 128), percent(104, 256)],
    /// [104, 112, 111, 112]); assert_eq!(percent(160, 192), 113);
    /// ```
    pub const fn step_percent(self) -> u64 {
        let (m, n) = (self.m as u64, self.n as u64);
        let (blocked, other) = if self.swaps_ab() { (n, m) } else { (m, n) };
        if self.k == 0 || blocked == 0 || !blocked.is_multiple_of(BLOCK) {
            return 100;
        }
        // Of one block, and of three, two consumers have half of the other side each.
        let blocks = blocked / BLOCK;
        let products = if blocks % 2 == 1 { 2 * blocks * (BLOCK + other / 2) } else { blocks * (BLOCK + other) };
        // Both in bytes of a step of one element along k, of 16 bits.
        let (moved, free) = ((products + m + n) * 2, 2 * m * n * SHARED / OPERATIONS);
        let longer = if moved > free { (moved - free) * SEEN / free } else { 0 };
        100 + longer
    }
}
