//! What the threads of a world share.

use crate::bootstrap::control::hosts::Hosts;
use crate::bootstrap::control::inquiry::{Answerer, mask_of, ranks_of};
use crate::bootstrap::control::plane::Watcher;
use crate::bootstrap::control::steps::Steps;
use flux_core::{Rank, WorldSize};
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, Weak};

/// What the ends of a world share.
pub(super) struct ThreadGroup {
    pub(super) world: WorldSize,
    pub(super) hosts: Hosts,
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
    /// By rank.
    pub(super) steps: Vec<Steps>,
}

pub(super) struct State {
    /// What was posted for even and odd steps.
    pub(super) slots: [PostSlot; 2],
    pub(super) presence: Vec<Presence>,
    pub(super) watchers: Vec<Vec<Weak<Watcher>>>,
    pub(super) answerers: Vec<Vec<Weak<Answerer>>>,
    pub(super) regroup: Regroup,
}

#[derive(Default)]
pub(super) struct PostSlot {
    pub(super) posts: Vec<Option<Post>>,
    pub(super) taken: usize,
}

pub(super) struct Post {
    pub(super) step: u64,
    pub(super) content: Content,
}

#[derive(Clone)]
pub(super) enum Content {
    Bytes(Arc<[u8]>),
    Descriptors(Arc<[u8]>, Arc<[OwnedFd]>),
}

impl Content {
    pub(super) const fn step(&self) -> &'static str {
        match self {
            Self::Bytes(_) => "exchange",
            Self::Descriptors(..) => "exchange of descriptors",
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Presence {
    Here,
    Left,
    Lost,
}

impl ThreadGroup {
    pub(super) fn new(world: WorldSize) -> Self {
        let slot = || PostSlot { posts: world.ranks().map(|_| None).collect(), taken: 0 };
        let state = State {
            slots: [slot(), slot()],
            presence: vec![Presence::Here; world.index()],
            watchers: world.ranks().map(|_| Vec::new()).collect(),
            answerers: world.ranks().map(|_| Vec::new()).collect(),
            regroup: Regroup::new(world),
        };
        Self {
            world,
            hosts: Hosts::one(world),
            state: Mutex::new(state),
            changed: Condvar::new(),
            steps: world.ranks().map(|_| Steps::default()).collect(),
        }
    }
}

impl fmt::Debug for ThreadGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadGroup").field("world", &self.world).finish_non_exhaustive()
    }
}

/// Who waits for a new world, and the ends that nobody has taken yet, by old rank.
#[derive(Debug)]
pub(super) struct Regroup {
    pub(super) waiting: u32,
    /// For each rank, those (bits) that have waited since it began to.
    pub(super) came: Vec<u32>,
    pub(super) ends: Vec<(Rank, NewEnd)>,
    given_up_by: Vec<Option<Rank>>,
}

/// A rank's end of a new world.
#[derive(Debug)]
pub(super) struct NewEnd {
    pub(super) rank: Rank,
    pub(super) shared: Arc<ThreadGroup>,
    /// Old ranks (bits) of the new world.
    pub(super) members: u32,
}

impl Regroup {
    pub(super) fn new(world: WorldSize) -> Self {
        Self {
            waiting: 0,
            came: vec![0; world.index()],
            ends: Vec::new(),
            given_up_by: vec![None; world.index()],
        }
    }

    pub(super) fn begin(&mut self, rank: Rank) {
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
    pub(super) fn make(&mut self, by: Rank, members: u32, size: WorldSize) {
        self.waiting &= !members;
        let shared = Arc::new(ThreadGroup::new(size));
        let ends = size.ranks().map(|rank| NewEnd { rank, shared: Arc::clone(&shared), members });
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
    pub(super) fn here(&self) -> u32 {
        mask_of(
            (0..)
                .map(Rank::new)
                .zip(&self.presence)
                .filter(|(_, presence)| **presence == Presence::Here)
                .map(|(rank, _)| rank),
        )
    }
}
