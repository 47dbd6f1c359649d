//! How threads that are left make a world of their own.
//!
//! Invariant: the ends of a new world are made once, by the first that finds all of its members
//! waiting, and each member takes its own. Whoever is not a member is given up under the same lock,
//! and is in no world that is made of this one; so no two go on side by side.

use super::{LocalControl, Presence, State, lock};
use crate::bootstrap::control::{ControlError, REGROUPING, came_and_went, mask_of, ranks_of};
use flux_core::{Rank, WorldSize};
use std::sync::PoisonError;
use std::time::Instant;

/// Who waits for a new world, and the ends that nobody has taken yet, by old rank.
#[derive(Debug)]
pub(super) struct Regroup {
    /// Ranks (bits) that wait.
    waiting: u32,
    /// For each rank, those (bits) that have waited since it began to.
    came: Vec<u32>,
    ends: Vec<(Rank, End)>,
    /// Who has gone on without a rank, by rank.
    given_up_by: Vec<Option<Rank>>,
}

/// A rank's end of a new world.
#[derive(Debug)]
pub(super) struct End {
    pub(super) control: LocalControl,
    /// Old ranks (bits) of the new world.
    pub(super) members: u32,
}

impl Regroup {
    pub(super) fn new(world: WorldSize) -> Self {
        Self { waiting: 0, came: vec![0; world.index()], ends: Vec::new(), given_up_by: vec![None; world.index()] }
    }

    fn begin(&mut self, rank: Rank) {
        self.waiting |= mask_of([rank]);
        for came in &mut self.came {
            *came |= mask_of([rank]);
        }
        self.came[rank.index()] = self.waiting;
    }

    /// Who has made a world without this rank.
    pub(super) fn left_out_by(&self, rank: Rank) -> Option<Rank> {
        self.given_up_by[rank.index()]
    }

    /// Makes the world of those who wait, and leaves all others out.
    fn make(&mut self, by: Rank, members: u32, size: WorldSize) {
        self.waiting &= !members;
        let ends = LocalControl::world_of(size).into_iter().map(|control| End { control, members });
        self.ends = ranks_of(members).zip(ends).collect();
        for (rank, given_up_by) in (0..).map(Rank::new).zip(&mut self.given_up_by) {
            if members & mask_of([rank]) == 0 {
                *given_up_by = given_up_by.or(Some(by));
            }
        }
    }
}

impl State {
    /// The ranks (bits) that are here.
    fn here(&self) -> u32 {
        mask_of((0..).map(Rank::new).zip(&self.presence).filter(|(_, presence)| **presence == Presence::Here).map(|(rank, _)| rank))
    }
}

/// Waits for the other members, and takes this rank's end of the new world.
pub(super) fn meet(own: &LocalControl, without: &[Rank], deadline: Instant) -> Result<End, ControlError> {
    let mut state = lock(&own.shared.state);
    state.regroup.begin(own.rank);
    own.shared.changed.notify_all();
    let refused = loop {
        if let Some(at) = state.regroup.ends.iter().position(|(rank, _)| *rank == own.rank) {
            return Ok(state.regroup.ends.swap_remove(at).1);
        }
        if let Some(by) = state.regroup.left_out_by(own.rank) {
            break ControlError::GivenUp { by };
        }
        let members = state.here() & !mask_of(without.iter().copied()) | mask_of([own.rank]);
        let left = deadline.saturating_duration_since(Instant::now());
        match WorldSize::new(members.count_ones()) {
            Some(size) if members & !state.regroup.waiting == 0 => {
                state.regroup.make(own.rank, members, size);
                own.shared.changed.notify_all();
            }
            _ if left.is_zero() => {
                let missing = members & !state.regroup.came[own.rank.index()];
                break match missing {
                    0 => came_and_went(Rank::new(members.trailing_zeros())),
                    _ => ControlError::Timeout { step: REGROUPING, missing: ranks_of(missing).collect() },
                };
            }
            _ => state = own.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
        }
    };
    state.regroup.waiting &= !mask_of([own.rank]);
    Err(refused)
}
