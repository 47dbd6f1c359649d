//! Whether a communicator works.
//!
//! Invariant: the first fault that is seen never changes. Whoever sets it without a device record
//! also sets the abort word, so that no wait outlives it. Not so for a peer's timeout: this rank's
//! own waits have their deadline.

use super::departures::Departures;
use super::root_cause::{PeerFault, is_second_hand, root_cause};
use crate::Fault;
use crate::backends::Transport;
use crate::bootstrap::control::{GaveUp, Notice, mask_of};
use crate::reason;
use flux_core::Rank;
use flux_core::layout::{FaultRecord, fault};
use flux_core::signal::Epoch;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// A transport and what went wrong with it.
#[derive(Debug)]
pub(super) struct Health {
    rank: Rank,
    /// The communicator's number in its world.
    number: u32,
    transport: Box<dyn Transport>,
    first: OnceLock<First>,
    /// A peer's timeout: the fault unless a wait of this rank fails by itself.
    peer_timeout: OnceLock<GaveUp>,
    /// The first abort that a peer told, with that peer: others pass it on by words in memory.
    aborted: OnceLock<PeerFault>,
    /// Ranks (bits) that some rank has given up waiting for.
    given_up: AtomicU32,
    /// Ranks (bits) that have said whom they gave up, which was not themselves. Set after those.
    reported: AtomicU32,
    given_up_by: OnceLock<Rank>,
    departures: Departures,
}

#[derive(Clone, Debug)]
struct First {
    fault: Fault,
    /// The value of the abort word, 0 where a wait failed by itself.
    abort: u32,
    cause: Cause,
}

/// Where the first fault comes from.
#[derive(Clone, Copy, Debug)]
enum Cause {
    Own(FaultRecord),
    PeerTimeout(GaveUp),
    Abort,
}

impl Health {
    pub(super) fn new(rank: Rank, number: u32, transport: Box<dyn Transport>) -> Self {
        let (first, peer_timeout, aborted, given_up_by) =
            (OnceLock::new(), OnceLock::new(), OnceLock::new(), OnceLock::new());
        let (given_up, reported) = (AtomicU32::new(0), AtomicU32::new(0));
        Self {
            rank,
            number,
            transport,
            first,
            peer_timeout,
            aborted,
            given_up,
            reported,
            given_up_by,
            departures: Departures::default(),
        }
    }

    pub(super) fn transport(&self) -> &dyn Transport {
        &*self.transport
    }

    /// The first fault, if there is one. Does not synchronise.
    pub(super) fn status(&self) -> Result<(), Fault> {
        self.first().map_or(Ok(()), |first| Err(first.fault.clone()))
    }

    /// The own wait that failed, where that is the first fault.
    pub(super) fn own_record(&self) -> Option<FaultRecord> {
        self.first().and_then(|first| {
            if let Cause::Own(record) = first.cause { Some(record) } else { None }
        })
    }

    /// The record that peers are told; none of a rank that was given up.
    pub(super) fn record_to_tell(&self) -> Option<FaultRecord> {
        if self.given_up_by().is_some() { None } else { self.transport.read_fault() }
    }

    /// The rank whose communicator this is.
    pub(super) const fn rank(&self) -> Rank {
        self.rank
    }

    /// What a second-hand record comes from, as far as was heard, whatever the first fault is.
    pub(super) fn root_cause_of(&self, record: &FaultRecord) -> Option<PeerFault> {
        root_cause(record, self.rank, self.peer_timeout.get().copied(), self.aborted.get().copied())
    }

    /// What a peer said of its wait, where that is the first fault.
    pub(super) fn peer_timeout(&self) -> Option<GaveUp> {
        self.first().and_then(|first| {
            if let Cause::PeerTimeout(what) = first.cause { Some(what) } else { None }
        })
    }

    fn first(&self) -> Option<&First> {
        if self.first.get().is_none() {
            let own = |record| First {
                fault: self.behind(Fault::from_record(&record, Vec::new())),
                abort: record.abort,
                cause: Cause::Own(record),
            };
            let of_peer = |told: PeerFault| match told {
                PeerFault::Timeout(what) => {
                    First { fault: told.fault(), abort: 0, cause: Cause::PeerTimeout(what) }
                }
                PeerFault::Aborted { reason, .. } => {
                    First { fault: told.fault(), abort: reason, cause: Cause::Abort }
                }
            };
            let found = match self.transport.read_fault() {
                // Who was waiting itself, or gave up first, says more.
                Some(record) if is_second_hand(&record, self.rank) => {
                    self.root_cause_of(&record).map_or_else(|| own(record), of_peer)
                }
                Some(record) => own(record),
                None => of_peer(PeerFault::Timeout(*self.peer_timeout.get()?)),
            };
            // Loses to an abort noted since: the record may be what that abort led to.
            let _ = self.first.set(found);
        }
        self.first.get()
    }

    /// Replaces an abort on behalf of a lost or departed rank by that loss.
    fn behind(&self, fault: Fault) -> Fault {
        let Fault::Aborted { reason, .. } = fault else { return fault };
        let of_another = |named: &Fault| !matches!(named, Fault::PeerLost { rank } | Fault::PeerLeft { rank } if *rank == self.rank);
        Fault::named_by(reason).filter(of_another).unwrap_or(fault)
    }

    /// Notes that a call begins; breaks the communicator if a peer has left before it.
    pub(super) fn begin(&self, epoch: Epoch) {
        self.miss(self.departures.begin(epoch));
    }

    pub(super) fn departures(&self) -> &Departures {
        &self.departures
    }

    fn miss(&self, left: Option<Rank>) {
        if let Some(rank) = left {
            self.abort(Fault::PeerLeft { rank }, reason::peer_left(rank));
        }
    }

    /// Takes note of what a peer did.
    pub(super) fn notice(&self, notice: Notice) {
        if let Notice::Aborted { by, reason, communicator } = notice
            && (communicator == self.number || reason == reason::PANICKED)
        {
            // Before the words of ranks that pass it on are looked at.
            let _ = self.aborted.set(PeerFault::Aborted { by, reason });
        }
        match notice {
            // It has left this communicator before: its process may end as it likes.
            Notice::Lost(rank) if self.departures.last_of(rank).is_some() => {}
            // A panicked thread is as gone as a dead process, in whichever communicator it
            // panicked.
            Notice::Lost(rank) | Notice::Aborted { by: rank, reason: reason::PANICKED, .. } => {
                self.abort(Fault::PeerLost { rank }, reason::peer_lost(rank));
            }
            Notice::Aborted { by, communicator, reason } if communicator == self.number => {
                self.abort(Fault::Aborted { rank: by, reason }, reason);
            }
            Notice::GaveUp { by, what } if what.communicator == self.number => {
                self.peer_gave_up(by, &what);
            }
            Notice::Departed { by, communicator, last } if communicator == self.number => {
                self.miss(self.departures.note(by, last));
            }
            Notice::Aborted { .. }
            | Notice::GaveUp { .. }
            | Notice::Departed { .. }
            | Notice::Told { .. } => {}
        }
    }

    fn peer_gave_up(&self, by: Rank, what: &GaveUp) {
        self.exclude(what.late());
        if what.late().all(|late| late != by) {
            self.reported.fetch_or(mask_of([by]), Ordering::AcqRel);
        }
        if what.late().any(|late| late == self.rank) {
            // In this order: a call that sees that this rank was given up also sees the fault.
            let fault = Fault::Aborted { rank: by, reason: reason::LATE };
            if self.transport.read_fault().is_none() {
                // Before another rank's word about a third is taken for the first fault.
                let _ = self.first.set(First { fault, abort: reason::LATE, cause: Cause::Abort });
            } else {
                self.note(fault, reason::LATE);
            }
            let _ = self.given_up_by.set(by); // the first is as good as any
            self.transport.set_abort(reason::LATE);
        } else if what.record.code == fault::DISAGREED {
            // No wait of any rank can succeed, and the finder may carry nothing more that would
            // show why.
            self.abort(Fault::from_record(&what.record, Vec::new()), reason::IN_ANOTHER_OP);
            // For a fault that was noted before and follows from this.
            let _ = self.peer_timeout.set(*what);
        } else {
            let _ = self.peer_timeout.set(*what);
        }
    }

    pub(super) fn exclude(&self, ranks: impl IntoIterator<Item = Rank>) {
        self.given_up.fetch_or(mask_of(ranks), Ordering::AcqRel);
    }

    /// Notes that this rank's own process is what peers wait for.
    pub(super) fn give_up_itself(&self) {
        let _ = self.given_up_by.set(self.rank);
    }

    /// Ranks (bits) that were given up.
    pub(super) fn given_up(&self) -> u32 {
        self.given_up.load(Ordering::Acquire)
    }

    /// Ranks (bits) that reported whom they gave up, or a rank before them: none of them is late.
    pub(super) fn reported(&self) -> u32 {
        self.reported.load(Ordering::Acquire)
    }

    pub(super) fn given_up_by(&self) -> Option<Rank> {
        self.given_up_by.get().copied()
    }

    /// Gives up. `tell` is called after that is noted and before any wait ends by it, unless
    /// another fault was first, of which peers hear otherwise.
    pub(super) fn give_up(&self, reason: u32, tell: impl FnOnce()) {
        self.note(Fault::Aborted { rank: self.rank, reason }, reason);
        if self.first().is_some_and(|first| self.is_its_own(first)) {
            tell();
        }
        self.transport.set_abort(reason.max(1));
    }

    /// Whether this rank has given up by itself.
    fn is_its_own(&self, first: &First) -> bool {
        matches!(first, First { fault: Fault::Aborted { rank, .. }, cause: Cause::Abort, .. }
            if *rank == self.rank)
    }

    fn abort(&self, fault: Fault, reason: u32) {
        self.note(fault, reason);
        self.transport.set_abort(reason.max(1));
    }

    fn note(&self, fault: Fault, reason: u32) {
        if self.first().is_none() {
            let _ = self.first.set(First {
                fault: self.behind(fault),
                abort: reason.max(1),
                cause: Cause::Abort,
            });
        }
    }

    /// Sets the abort word of a new workspace if there was an abort before it.
    pub(super) fn carry_over(&self) {
        if let Some(first) = self.first.get() {
            self.transport.set_abort(first.abort.max(1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::mock::MockTransport;
    use crate::{Communicator, Select, World};
    use flux_core::layout::ABORT_OFFSET;
    use std::sync::atomic::AtomicBool;
    use std::sync::{Arc, Weak};

    #[test]
    fn who_sees_that_this_rank_was_given_up_sees_the_fault() {
        let without_a_fault = Arc::new(AtomicBool::new(false));
        let health = Arc::new_cyclic(|health: &Weak<Health>| {
            let (health, found) = (Weak::clone(health), Arc::clone(&without_a_fault));
            // Looked at only while no fault is noted.
            let read_fault = move || {
                let given_up =
                    health.upgrade().is_some_and(|health| health.given_up_by().is_some());
                found.fetch_or(given_up, Ordering::Relaxed);
                None
            };
            let transport =
                MockTransport { read_fault: Box::new(read_fault), ..MockTransport::default() };
            Health::new(Rank::new(1), 0, Box::new(transport))
        });
        let what = GaveUp {
            communicator: 0,
            late: mask_of([Rank::new(1)]),
            record: FaultRecord::default(),
        };
        health.notice(Notice::GaveUp { by: Rank::new(0), what });
        assert_eq!(
            health.status(),
            Err(Fault::Aborted { rank: Rank::new(0), reason: reason::LATE })
        );
        assert_eq!(health.given_up_by(), Some(Rank::new(0)));
        assert!(!without_a_fault.load(Ordering::Relaxed));
    }

    /// Ranks 2 and 3 were stopped. Rank 0 has given up the one, rank 1 the other, and rank 3 runs
    /// on and hears of both.
    #[test]
    fn a_rank_that_was_given_up_blames_nobody_though_another_was_given_up_before() {
        let gave_up = |by, late| {
            let record = FaultRecord {
                state: 1,
                code: fault::TIMEOUT,
                wait: fault::SIGNAL,
                rank: by,
                peer: late,
                ..FaultRecord::default()
            };
            Notice::GaveUp {
                by: Rank::new(by),
                what: GaveUp { communicator: 0, late: mask_of([Rank::new(late)]), record },
            }
        };
        let health = Health::new(Rank::new(3), 0, Box::new(MockTransport::default()));
        health.notice(gave_up(0, 2));
        health.notice(gave_up(1, 3));
        assert_eq!(
            health.status(),
            Err(Fault::Aborted { rank: Rank::new(1), reason: reason::LATE })
        );
        assert_eq!(
            (health.given_up_by(), health.peer_timeout().is_none()),
            (Some(Rank::new(1)), true)
        );
    }

    #[test]
    fn a_rank_that_is_gone_or_has_left_is_named_by_whoever_hears_of_it_from_a_peer_that_gave_up() {
        let after = |abort| {
            let record = FaultRecord {
                state: 1,
                code: fault::ABORTED,
                rank: 2,
                peer: 2,
                abort,
                ..FaultRecord::default()
            };
            let transport = MockTransport {
                read_fault: Box::new(move || Some(record)),
                ..MockTransport::default()
            };
            Health::new(Rank::new(1), 0, Box::new(transport)).status().unwrap_err()
        };
        assert_eq!(after(reason::peer_lost(Rank::new(3))), Fault::PeerLost { rank: Rank::new(3) });
        assert_eq!(after(reason::peer_left(Rank::new(3))), Fault::PeerLeft { rank: Rank::new(3) });
        for other in [reason::peer_lost(Rank::new(1)), reason::peer_left(Rank::new(1)), 7] {
            assert_eq!(after(other), Fault::Aborted { rank: Rank::new(2), reason: other });
        }
    }

    #[test]
    fn peers_are_told_when_the_fault_is_noted_and_before_any_wait_ends() {
        let worlds = World::local(1).unwrap();
        let comm = Communicator::connect_blocking(&worlds[0], Select::Host).unwrap();
        let health = &comm.inner.health;
        let at = std::ptr::with_exposed_provenance_mut(
            usize::try_from(health.transport().view().fault + ABORT_OFFSET).unwrap(),
        );
        // SAFETY: the abort word of the communicator, which lives until the end and is only
        // accessed as a whole.
        let word = unsafe { AtomicU32::from_ptr(at) };
        let gave_up = |reason| Err(Fault::Aborted { rank: Rank::new(0), reason });
        health.give_up(7, || {
            assert_eq!((health.status(), word.load(Ordering::Acquire)), (gave_up(7), 0));
            // A peer's answer, which comes at once.
            health.notice(Notice::GaveUp {
                by: Rank::new(0),
                what: GaveUp { communicator: 0, late: 0, record: FaultRecord::default() },
            });
        });
        assert_eq!((health.status(), word.load(Ordering::Acquire)), (gave_up(7), 7));
    }
}
