//! Offsets in the control block.

use super::LINE;

/// The number of the call in progress, or of the next one between calls. It advances when no worker
/// waits for peers.
pub const EPOCH: u64 = 0;
/// Workers that have left the call; the last one closes it.
pub const TICKET: u64 = LINE;
/// Non-zero after a wait of this rank has failed: every other wait gives up.
pub const POISON: u64 = 2 * LINE;
/// The last epoch whose transfers an external mover has read from the caller's `x`.
pub const PUSHED: u64 = 3 * LINE;
/// Stores through host memory that workers have begun, over all calls. The in-flight limit keeps
/// them from delaying loads.
pub const STORES_BEGUN: u64 = 4 * LINE;
/// Stores that have ended.
pub const STORES_ENDED: u64 = 5 * LINE;
/// First chunk counter, 4 bytes each.
pub const COUNTERS: u64 = 6 * LINE;

/// Bytes of a control block of `counters` counters.
pub const fn bytes(counters: u32) -> u64 {
    COUNTERS + counters as u64 * 4
}
