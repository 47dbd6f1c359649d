//! How surviving threads make a world of their own.
//!
//! Invariant: the first that finds all members waiting makes the new ends, and gives up all others
//! under the same lock. So no two groups go on side by side.

use super::state::{NewEnd, ThreadGroup};
use crate::bootstrap::control::error::{ControlError, REGROUPING, came_and_went};
use crate::bootstrap::control::inquiry::{mask_of, ranks_of};
use crate::sync::{locked, wait_timeout};
use flux_core::{Rank, WorldSize};
use std::time::Instant;

/// Waits for the other members, and takes this rank's end of the new world.
pub(super) fn meet(
    shared: &ThreadGroup,
    rank: Rank,
    without: &[Rank],
    deadline: Instant,
) -> Result<NewEnd, ControlError> {
    let mut state = locked(&shared.state);
    state.regroup.begin(rank);
    shared.changed.notify_all();
    let refused = loop {
        if let Some(at) = state.regroup.ends.iter().position(|(of, _)| *of == rank) {
            return Ok(state.regroup.ends.swap_remove(at).1);
        }
        if let Some(by) = state.regroup.left_out_by(rank) {
            break ControlError::GivenUp { by };
        }
        let members = state.here() & !mask_of(without.iter().copied()) | mask_of([rank]);
        let left = deadline.saturating_duration_since(Instant::now());
        match WorldSize::new(members.count_ones()) {
            Some(size) if members & !state.regroup.waiting == 0 => {
                state.regroup.make(rank, members, size);
                shared.changed.notify_all();
            }
            _ if left.is_zero() => {
                let missing = members & !state.regroup.came[rank.index()];
                break match missing {
                    0 => came_and_went(Rank::new(members.trailing_zeros())),
                    _ => ControlError::Timeout {
                        step: REGROUPING,
                        missing: ranks_of(missing).collect(),
                    },
                };
            }
            _ => {
                state = wait_timeout(&shared.changed, state, left);
            }
        }
    };
    state.regroup.waiting &= !mask_of([rank]);
    Err(refused)
}
