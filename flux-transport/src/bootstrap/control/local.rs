//! The control plane of ranks that are threads of one process.
//!
//! Invariant: a rank posts step `g + 1` only after it has taken all posts of step `g`. So steps `g`
//! and `g + 2` share their slots.

mod regroup;
mod state;

use super::error::ControlError;
use super::hosts::Hosts;
use super::inquiry::{Answer, Answerer, GaveUp, mask_of, ranks_of};
use super::plane::{ControlPlane, Given, Launch, Notice, Regrouped, Watcher};
use super::steps::Steps;
use crate::sync::{locked, wait_timeout};
use flux_core::signal::Epoch;
use flux_core::{Rank, WorldSize};
use state::{Content, NewEnd, Post, PostSlot, Presence, ThreadGroup};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::Instant;

#[derive(Debug)]
pub(crate) struct LocalControl {
    rank: Rank,
    shared: Arc<ThreadGroup>,
}

impl LocalControl {
    /// The ends of a world, by rank.
    pub(crate) fn world_of(world: WorldSize) -> Vec<Self> {
        let shared = Arc::new(ThreadGroup::new(world));
        world.ranks().map(|rank| Self { rank, shared: Arc::clone(&shared) }).collect()
    }

    fn steps(&self) -> &Steps {
        &self.shared.steps[self.rank.index()]
    }

    fn step(
        &self,
        communicator: u32,
        content: Content,
        deadline: Instant,
    ) -> Result<Vec<Content>, ControlError> {
        self.steps().take(self.rank, content.step(), communicator, deadline, |step| {
            self.meet(step, communicator, content, deadline)
        })
    }

    fn meet(
        &self,
        step: u64,
        communicator: u32,
        content: Content,
        deadline: Instant,
    ) -> Result<Vec<Content>, ControlError> {
        let slot = usize::from(step % 2 == 1);
        let doing = content.step();
        let mut state = locked(&self.shared.state);
        state.slots[slot].posts[self.rank.index()] = Some(Post { step, content });
        self.shared.changed.notify_all();
        loop {
            let posts = &state.slots[slot].posts;
            let came =
                |rank: Rank| posts[rank.index()].as_ref().is_some_and(|post| post.step == step);
            let missing: Vec<Rank> =
                self.shared.world.ranks().filter(|&rank| !came(rank)).collect();
            if missing.is_empty() {
                break;
            }
            let awaited = mask_of(missing.iter().copied().chain([self.rank]));
            if let Some(aborted) = self.steps().aborted(communicator, awaited) {
                return Err(aborted);
            }
            for &rank in &missing {
                match state.presence[rank.index()] {
                    Presence::Here => {}
                    Presence::Left => return Err(ControlError::PeerLeft { rank }),
                    Presence::Lost => return Err(ControlError::PeerLost { rank }),
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ControlError::Timeout { step: doing, missing });
            }
            self.steps().awaits(missing);
            state = wait_timeout(&self.shared.changed, state, left);
        }
        let PostSlot { posts, taken } = &mut state.slots[slot];
        let all: Vec<Content> = posts.iter().flatten().map(|post| post.content.clone()).collect();
        *taken += 1;
        if *taken == posts.len() {
            *taken = 0;
            // descriptors are closed now, not two steps later
            posts.fill_with(|| None);
        }
        for (rank, other) in self.shared.world.ranks().zip(&all) {
            if other.step() != doing {
                let detail = format!("it is at: {}, this rank is at: {doing}", other.step());
                return Err(ControlError::Protocol { rank, detail });
            }
        }
        Ok(all)
    }

    /// Tells the peers' watchers.
    fn notify(&self, notice: Notice) {
        self.notify_if(notice, |rank| rank != self.rank);
    }

    /// Tells some ranks' watchers, outside the lock.
    fn notify_if(&self, notice: Notice, hears: impl Fn(Rank) -> bool) {
        let state = locked(&self.shared.state);
        let told: Vec<_> = (self.shared.world.ranks().zip(&state.watchers))
            .filter(|&(rank, _)| hears(rank))
            .flat_map(|(_, watchers)| watchers.iter().filter_map(Weak::upgrade))
            .collect();
        drop(state);
        for watcher in told {
            watcher(notice);
        }
    }

    fn leave(&self, as_what: Presence) -> bool {
        let mut state = locked(&self.shared.state);
        let presence = &mut state.presence[self.rank.index()];
        let was_here = *presence == Presence::Here;
        if was_here {
            *presence = as_what;
            self.shared.changed.notify_all();
        }
        was_here
    }
}

impl ControlPlane for LocalControl {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world(&self) -> WorldSize {
        self.shared.world
    }

    fn kind(&self) -> Launch {
        Launch::Threads
    }

    fn hosts(&self) -> &Hosts {
        &self.shared.hosts
    }

    fn exchange_in(
        &self,
        communicator: u32,
        payload: &[u8],
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, ControlError> {
        let all = self.step(communicator, Content::Bytes(payload.into()), deadline)?;
        Ok(all
            .iter()
            .map(
                |content| {
                    if let Content::Bytes(bytes) = content { bytes.to_vec() } else { Vec::new() }
                },
            )
            .collect())
    }

    fn exchange_with_fds(
        &self,
        communicator: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> Result<Vec<Given>, ControlError> {
        let io = |source| ControlError::Io { step: "exchange of descriptors", source };
        let own: Vec<OwnedFd> =
            fds.iter().map(BorrowedFd::try_clone_to_owned).collect::<Result<_, _>>().map_err(io)?;
        let content = Content::Descriptors(payload.into(), own.into());
        let all = self.step(communicator, content, deadline)?;
        let duplicate = |(rank, content): (Rank, &Content)| {
            let Content::Descriptors(bytes, fds) = content else {
                return Ok(Given::default());
            };
            let fds = if rank == self.rank { &[] } else { &**fds };
            Ok(Given {
                payload: bytes.to_vec(),
                fds: fds.iter().map(OwnedFd::try_clone).collect::<Result<_, _>>().map_err(io)?,
                cut: false,
            })
        };
        self.shared.world.ranks().zip(&all).map(duplicate).collect()
    }

    fn watch(&self, watcher: Weak<Watcher>) {
        let mut state = locked(&self.shared.state);
        let watchers = &mut state.watchers[self.rank.index()];
        watchers.retain(|watcher| watcher.strong_count() > 0);
        watchers.push(Weak::clone(&watcher));
        let lost: Vec<Rank> = self
            .shared
            .world
            .ranks()
            .filter(|rank| state.presence[rank.index()] == Presence::Lost)
            .collect();
        drop(state);
        if let Some(watcher) = watcher.upgrade() {
            for rank in lost {
                watcher(Notice::Lost(rank));
            }
        }
    }

    fn goodbye(&self) {
        self.leave(Presence::Left);
    }

    fn abort(&self, communicator: u32, reason: u32) {
        // In this order: whose step ends finds the fault.
        self.notify(Notice::Aborted { by: self.rank, communicator, reason });
        for steps in &self.shared.steps {
            steps.abort(communicator, self.rank, reason);
        }
        // Under the lock: whoever has looked waits by now.
        drop(locked(&self.shared.state));
        self.shared.changed.notify_all();
    }

    fn depart(&self, communicator: u32, last: Epoch) {
        self.notify(Notice::Departed { by: self.rank, communicator, last });
    }

    fn give_up(&self, what: &GaveUp) {
        self.notify(Notice::GaveUp { by: self.rank, what: *what });
    }

    fn tell(&self, to: Rank, communicator: u32, words: [u32; 4]) -> bool {
        self.notify_if(Notice::Told { by: self.rank, communicator, words }, |rank| rank == to);
        true
    }

    fn settle(&self) {
        // who has something to say calls the watchers itself
    }

    fn answer_with(&self, answerer: Weak<Answerer>) {
        let answerers = &mut locked(&self.shared.state).answerers[self.rank.index()];
        answerers.retain(|answerer| answerer.strong_count() > 0);
        answerers.push(answerer);
    }

    fn ask(&self, communicator: u32, _deadline: Instant) -> Vec<Answer> {
        let state = locked(&self.shared.state);
        let asked = |(&presence, answerers): (&Presence, &Vec<Weak<Answerer>>)| {
            (presence, answerers.iter().filter_map(Weak::upgrade).collect::<Vec<_>>())
        };
        let asked: Vec<_> = state.presence.iter().zip(&state.answerers).map(asked).collect();
        drop(state);
        let answer = |(presence, answerers): (Presence, Vec<Arc<Answerer>>)| match presence {
            Presence::Left => Answer::Left,
            Presence::Lost => Answer::Lost,
            Presence::Here => answerers
                .iter()
                .find_map(|answerer| answerer(communicator))
                .map_or(Answer::Silent, Answer::Reply),
        };
        asked.into_iter().map(answer).collect()
    }

    fn regroup(&self, without: &[Rank], deadline: Instant) -> Result<Regrouped, ControlError> {
        let NewEnd { rank, shared, members } =
            regroup::meet(&self.shared, self.rank, without, deadline)?;
        Ok(Regrouped {
            control: Arc::new(Self { rank, shared }),
            members: ranks_of(members).collect(),
        })
    }

    fn left_out_by(&self) -> Option<Rank> {
        locked(&self.shared.state).regroup.left_out_by(self.rank)
    }
}

impl Drop for LocalControl {
    fn drop(&mut self) {
        if self.leave(Presence::Lost) {
            self.notify(Notice::Lost(self.rank));
        }
    }
}

/// The control planes of `n` ranks that are threads, by rank; `None` if no world is that large.
pub fn local_planes(n: u32) -> Option<Vec<Arc<dyn ControlPlane>>> {
    let ends = LocalControl::world_of(WorldSize::new(n)?);
    Some(ends.into_iter().map(|end| Arc::new(end) as Arc<dyn ControlPlane>).collect())
}

#[cfg(test)]
mod tests;
