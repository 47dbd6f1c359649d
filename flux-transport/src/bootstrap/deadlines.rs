//! How long the steps of a rendezvous may take.

use std::time::{Duration, Instant};

/// How long the ranks of a launch may take to start: a program may load a large framework first.
pub(crate) const START: Duration = Duration::from_mins(1);
/// How long one answer may take to send. A rank reads its answers at once; a slow one goes without.
pub(crate) const ANSWER: Duration = Duration::from_millis(100);
pub(crate) const WAITING_FOR_RANKS: &str = "waiting for all ranks to start";

/// When ranks that have `patience` must have come.
pub(crate) fn start_by(patience: Duration) -> Instant {
    // Longer waits are a mistake, and their ends could not be computed.
    Instant::now() + patience.min(Duration::from_hours(24))
}
