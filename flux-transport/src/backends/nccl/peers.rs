//! What ranks tell each other of their calls over the control plane: the op-sequence hash of the
//! last call that each has made, and whether its calls have failed.
//!
//! Invariant: a hash covers all calls before it, so one message stands for many calls, and ranks
//! that made other calls differ from then on. Nothing of it travels with data: a rank that wants to
//! read an output [asks](PeerCalls::ask) whether the peers' calls up to it are whole.

use crate::backends::device::calls::{OpHash, OpHashes};
use crate::bootstrap::control::ControlPlane;
use crate::bootstrap::world::World;
use crate::sync::locked;
use flux_core::layout::{FaultRecord, fault};
use flux_core::signal::Epoch;
use flux_core::{Rank, WorldSize};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError, Weak};
use std::time::Duration;

/// How long answers are waited for: a peer that is stopped does not answer.
const MOMENT: Duration = Duration::from_millis(100);

/// What a message is about, besides the sender's last call.
mod about {
    /// Nothing else.
    pub(super) const CALLS: u32 = 0;
    /// Whether the receiver's calls up to this one are whole.
    pub(super) const ASKED: u32 = 1;
    /// The sender's calls up to this one are whole.
    pub(super) const WHOLE: u32 = 2;
    /// The sender's calls have failed, for this reason.
    pub(super) const FAILED: u32 = 3;
}

/// The calls of this rank and of its peers, as far as they are known on the host.
#[derive(Debug)]
pub(crate) struct PeerCalls {
    /// Not held: the rank's presence ends with its communicators.
    control: Weak<dyn ControlPlane>,
    communicator: u32,
    rank: Rank,
    world: WorldSize,
    /// [`OpHashes`] of this rank.
    own: Vec<AtomicU64>,
    /// By rank, the last [`OpHash`] that it has told.
    last: Vec<AtomicU64>,
    answers: Mutex<Answers>,
    answered: Condvar,
}

#[derive(Debug)]
struct Answers {
    /// By rank, the last call up to which its calls are whole.
    whole: Vec<Epoch>,
    failed: Option<(Rank, u32)>,
    /// The last call that was asked about: nobody is waited for twice.
    asked: Epoch,
}

impl PeerCalls {
    /// For calls from `first` on of the communicator that `world` connects.
    pub(crate) fn new(world: &World, first: Epoch) -> Self {
        Self::over(
            world.control_handle(),
            world.communicator(),
            (world.rank(), world.size()),
            first,
        )
    }

    fn over(
        control: Weak<dyn ControlPlane>,
        communicator: u32,
        (rank, world): (Rank, WorldSize),
        first: Epoch,
    ) -> Self {
        let words = |count: usize| {
            (0..count).map(|_| AtomicU64::new(OpHash::before(first).word())).collect()
        };
        let before = first.before(1);
        let whole = vec![before; world.index()];
        Self {
            control,
            communicator,
            rank,
            world,
            own: words(OpHashes::WORDS),
            last: words(world.index()),
            answers: Mutex::new(Answers { whole, failed: None, asked: before }),
            answered: Condvar::new(),
        }
    }

    fn own(&self) -> OpHashes<'_> {
        OpHashes::new(&self.own)
    }

    fn peers(&self) -> impl Iterator<Item = Rank> {
        let own = self.rank;
        self.world.ranks().filter(move |&rank| rank != own)
    }

    /// Notes which op this rank's call `epoch` is of, before anything of it is enqueued.
    pub(crate) fn say(&self, epoch: Epoch, op: u32) {
        self.own().say(epoch, op);
    }

    /// Tells each peer of the last call, unless it is what `told` says that it knows.
    pub(super) fn tell(&self, told: &mut [OpHash]) {
        let last = self.own().last();
        if told.iter().all(|&told| told == last) {
            return;
        }
        for (peer, told) in self.peers().zip(told) {
            if *told != last && self.send(peer, about::CALLS, 0) {
                *told = last;
            }
        }
    }

    /// What no peer knows of yet, for [`tell`](Self::tell).
    pub(super) fn untold(&self) -> Vec<OpHash> {
        vec![self.own().last(); self.world.peers() as usize]
    }

    /// Tells all peers that this rank makes no call any more, all of which are whole.
    pub(super) fn close(&self) {
        let last = self.own().last().epoch();
        self.peers().for_each(|peer| {
            self.send(peer, about::WHOLE, last.get());
        });
    }

    fn send(&self, to: Rank, kind: u32, value: u32) -> bool {
        let last = self.own().last();
        let words = [last.epoch().get(), last.history(), kind, value];
        self.control.upgrade().is_some_and(|control| control.tell(to, self.communicator, words))
    }

    /// Takes what peer `by` tells, and answers where it asks; `failed`: why one of this rank's
    /// calls up to the given one has failed, if so. On a thread that brings notices.
    pub(super) fn hear(
        &self,
        by: Rank,
        words: [u32; 4],
        failed: impl FnOnce(Epoch) -> Option<u32>,
    ) {
        let [call, history, kind, value] = words;
        let said = OpHash::from_word(u64::from(history) << 32 | u64::from(call));
        let Some(last) = self.last.get(by.index()) else { return };
        // Several threads of a peer may tell: the later call's word stays.
        let newer = |last| OpHash::from_word(last).precedes(said.epoch()).then_some(said.word());
        let _ = last.fetch_update(Ordering::AcqRel, Ordering::Acquire, newer);
        match kind {
            about::ASKED => {
                let (kind, value) = failed(Epoch::new(value))
                    .map_or((about::WHOLE, value), |reason| (about::FAILED, reason));
                self.send(by, kind, value);
            }
            about::WHOLE => locked(&self.answers).whole[by.index()] = Epoch::new(value),
            about::FAILED => {
                let failed = &mut locked(&self.answers).failed;
                *failed = failed.or(Some((by, value)));
            }
            _ => {}
        }
        self.answered.notify_all();
    }

    /// Asks whether the peers' calls up to `epoch`, which has ended here, are whole. Returns when
    /// all have answered, one has failed, or a moment later; at once where they were asked before.
    pub(super) fn ask(&self, epoch: Epoch) {
        let mut answers = locked(&self.answers);
        if !answers.asked.is_before(epoch) || answers.failed.is_some() {
            return;
        }
        answers.asked = epoch;
        let whole = answers.whole.clone();
        drop(answers);
        for peer in self.peers().filter(|peer| whole[peer.index()].is_before(epoch)) {
            self.send(peer, about::ASKED, epoch.get());
        }
        let is_open = |answers: &mut Answers| {
            answers.failed.is_none()
                && self.peers().any(|peer| answers.whole[peer.index()].is_before(epoch))
        };
        drop(
            self.answered
                .wait_timeout_while(locked(&self.answers), MOMENT, is_open)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }

    /// A fault that peers' words show: calls of other ops than this rank's, or failed ones.
    pub(super) fn fault(&self) -> Option<FaultRecord> {
        let disagrees = self.peers().find_map(|peer| {
            let theirs = OpHash::from_word(self.last[peer.index()].load(Ordering::Acquire));
            self.own().against_one(self.rank, peer, theirs)
        });
        disagrees.or_else(|| {
            let (peer, reason) = locked(&self.answers).failed?;
            Some(failed(peer, self.own().last().epoch(), reason))
        })
    }

    /// A peer that has not told of call `epoch`, and the last of which it has.
    pub(super) fn silent_in(&self, epoch: Epoch) -> Option<(Rank, Epoch)> {
        self.peers()
            .map(|peer| (peer, OpHash::from_word(self.last[peer.index()].load(Ordering::Acquire))))
            .find(|(_, said)| said.precedes(epoch))
            .map(|(peer, said)| (peer, said.epoch()))
    }
}

/// That calls of `peer` up to this rank's call `epoch` have failed.
fn failed(peer: Rank, epoch: Epoch, reason: u32) -> FaultRecord {
    let (rank, epoch) = (peer.get(), epoch.get());
    FaultRecord {
        state: 1,
        code: fault::ABORTED,
        wait: fault::CALL,
        rank,
        peer: rank,
        epoch,
        expected: epoch,
        abort: reason,
        ..FaultRecord::default()
    }
}

#[cfg(test)]
mod tests;
