//! Upper limits of options.
//!
//! Invariant: what is within the limits fits memory and the clock's range.

use flux_core::rank::MAX_WORLD;

/// Rounds at one shape: every rank keeps the times of all ranks, 400 MiB of 16. Also calls of a
/// trace.
pub(crate) const SAMPLES: i64 = 100_000;
/// Calls in a row.
pub(crate) const CALLS: u64 = 1_000_000;
/// Faults of a kind; all are put in order before the first.
pub(crate) const FAULTS: i64 = 10_000;
/// Seconds after which something is ended: a day.
pub(crate) const SECONDS: u64 = 86_400;
/// Milliseconds of a deadline: an hour.
pub(crate) const DEADLINE_MS: u64 = 3_600_000;
/// Ranks that share a GPU, as no world has more.
#[expect(clippy::cast_possible_wrap, reason = "it is 16")]
pub(crate) const RANKS_PER_GPU: i64 = MAX_WORLD as i64;
