//! Whether processes run: for tests of what kills them.
//!
//! Not part of any crate: unit tests of `flux-transport/src/topology/probe/child.rs` and of
//! flux-bench include it by `#[path]`.

use crate::lateness::scaled;
use std::time::{Duration, Instant};

/// Whether a process runs; one that is dead and not yet reaped by who adopted it does not.
pub(crate) fn runs(pid: i32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // The program's name before its state may contain anything.
    stat.rsplit_once(')').is_none_or(|(_, state)| !state.trim_start().starts_with(['Z', 'X']))
}

/// Whether none of them runs after `time`, which scales with how late the machine is. A killed
/// process is reaped soon by its adopter.
pub(crate) fn gone_within(pids: &[i32], time: Duration) -> bool {
    let began = Instant::now();
    while pids.iter().any(|&pid| runs(pid)) {
        if began.elapsed() >= time && began.elapsed() >= scaled(time) {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    true
}
