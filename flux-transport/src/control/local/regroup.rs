//! How threads that are left make a world of their own.
//!
//! Invariant: the ends of a new world are made once, by the first that finds all of its members waiting, and each member takes its own.

use super::{LocalControl, Presence, State, lock};
use crate::control::ControlError;
use flux_core::{Rank, WorldSize};
use std::sync::PoisonError;
use std::time::Instant;

/// Who has asked for a new world (and counts as asking until there is one), and the ends that nobody has taken yet, by old rank.
#[derive(Debug, Default)]
pub(super) struct Regroup {
    waiting: Vec<Rank>,
    ends: Vec<(Rank, LocalControl)>,
}

impl State {
    /// A rank that has left in good order, and is not in `without`.
    fn left(&self, without: &[Rank]) -> Option<Rank> {
        let left = |&(rank, presence): &(Rank, &Presence)| *presence == Presence::Left && !without.contains(&rank);
        (0..).map(Rank::new).zip(&self.presence).find(left).map(|(rank, _)| rank)
    }

    /// The ranks that are here and not in `without`.
    fn members(&self, without: &[Rank]) -> Vec<Rank> {
        let here = |&(rank, presence): &(Rank, &Presence)| *presence == Presence::Here && !without.contains(&rank);
        (0..).map(Rank::new).zip(&self.presence).filter(here).map(|(rank, _)| rank).collect()
    }
}

/// Waits for the other members, and takes this rank's end of the new world.
pub(super) fn meet(own: &LocalControl, without: &[Rank], deadline: Instant) -> Result<LocalControl, ControlError> {
    let mut state = lock(&own.shared.state);
    if !state.regroup.waiting.contains(&own.rank) {
        state.regroup.waiting.push(own.rank);
    }
    own.shared.changed.notify_all();
    loop {
        if let Some(at) = state.regroup.ends.iter().position(|(rank, _)| *rank == own.rank) {
            return Ok(state.regroup.ends.swap_remove(at).1);
        }
        if let Some(rank) = state.left(without) {
            return Err(ControlError::PeerLeft { rank });
        }
        let members = state.members(without);
        let missing: Vec<Rank> = members.iter().copied().filter(|rank| !state.regroup.waiting.contains(rank)).collect();
        let left = deadline.saturating_duration_since(Instant::now());
        match u32::try_from(members.len()).ok().and_then(WorldSize::new) {
            Some(size) if missing.is_empty() && members.contains(&own.rank) => {
                state.regroup.waiting.retain(|rank| !members.contains(rank));
                state.regroup.ends = members.into_iter().zip(LocalControl::world_of(size)).collect();
                own.shared.changed.notify_all();
            }
            _ if left.is_zero() => return Err(ControlError::Timeout { step: "regrouping", missing }),
            _ => state = own.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
        }
    }
}
