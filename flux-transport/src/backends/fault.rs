//! Faults of calls.
//!
//! Invariant: a communicator has at most one fault, the first that was seen, and is broken from
//! then on.

use crate::bootstrap::control::ranks;
use crate::reason;
use flux_core::Rank;
use flux_core::layout::{FaultRecord, fault};
use flux_core::signal::Epoch;
use std::fmt;

/// What a wait was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Wait {
    /// A chunk or partial tile of the peer.
    Signal,
    /// The own mover.
    Pushed,
    /// That the peer says which call it is in.
    Call,
}

/// Why a communicator is broken.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "fields are named after what they hold")]
pub enum Fault {
    /// A wait of a call passed its deadline.
    #[error("rank {rank}: {} in call {epoch}: the deadline passed (expected {expected}, saw \
             {seen}){}", AwaitedClause(*wait, *peer, *signal), StragglerClause(*peer, late))]
    #[non_exhaustive]
    Timeout {
        rank: Rank,
        /// The rank that was waited for.
        peer: Rank,
        wait: Wait,
        /// Index of the signal on `rank`'s pad, where it was one.
        signal: u32,
        /// The epoch expected in the word.
        expected: Epoch,
        seen: u32,
        epoch: Epoch,
        /// The stragglers as far as known; `peer` itself unless that waits for another.
        late: Vec<Rank>,
    },
    /// The ranks have not made the same calls in the same order.
    #[error(
        "rank {rank}: rank {peer} has made other calls, as call {epoch} shows: all ranks make the \
         same calls in the same order"
    )]
    #[non_exhaustive]
    Disagreed {
        rank: Rank,
        /// The rank that has made other calls.
        peer: Rank,
        /// The call in which it was found: the one that differs, or over pcie and nccl a later one.
        epoch: Epoch,
    },
    /// A peer's process or thread is gone.
    #[error(
        "rank {rank} is gone: its process has ended without leaving, or its thread has panicked"
    )]
    #[non_exhaustive]
    PeerLost { rank: Rank },
    /// A peer has dropped its communicator before a call that this rank has begun.
    #[error(
        "rank {rank} has left: it has dropped its communicator, so calls that it has not made can \
         end on no rank"
    )]
    #[non_exhaustive]
    PeerLeft { rank: Rank },
    /// A rank has aborted.
    #[error("rank {rank} aborted: {}", reason::words(*reason))]
    #[non_exhaustive]
    Aborted {
        /// The rank that asked for it.
        rank: Rank,
        /// Its reason: one of [`reason`], or the caller's.
        reason: u32,
    },
}

flux_core::debug_is_text!(Fault);

impl Fault {
    /// The fault that a reason says, where that is another rank's and named in it.
    pub(crate) fn named_by(reason: u32) -> Option<Self> {
        let lost = || reason::lost(reason).map(|rank| Self::PeerLost { rank });
        lost().or_else(|| reason::left(reason).map(|rank| Self::PeerLeft { rank }))
    }

    pub(crate) fn from_record(record: &FaultRecord, late: Vec<Rank>) -> Self {
        let rank = Rank::new(record.rank);
        if record.code == fault::ABORTED {
            return Self::Aborted { rank, reason: record.abort };
        }
        if record.code == fault::DISAGREED {
            return Self::Disagreed {
                rank,
                peer: Rank::new(record.peer),
                epoch: Epoch::new(record.epoch),
            };
        }
        let wait = match record.wait {
            fault::PUSHED => Wait::Pushed,
            fault::CALL => Wait::Call,
            _ => Wait::Signal,
        };
        let (expected, epoch) = (Epoch::new(record.expected), Epoch::new(record.epoch));
        Self::Timeout {
            rank,
            peer: Rank::new(record.peer),
            wait,
            signal: record.signal,
            expected,
            seen: record.seen,
            epoch,
            late,
        }
    }
}

struct AwaitedClause(Wait, Rank, u32);

impl fmt::Display for AwaitedClause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(wait, peer, signal) = self;
        match wait {
            Wait::Signal => write!(f, "signal {signal} of rank {peer} did not come"),
            Wait::Pushed => f.write_str("the own mover did not finish"),
            Wait::Call => write!(f, "rank {peer} did not say which call it is in"),
        }
    }
}

/// Who is late, where that is not who was waited for.
struct StragglerClause<'a>(Rank, &'a [Rank]);

impl fmt::Display for StragglerClause<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(peer, late) = self;
        if matches!(late, [] | [_] if late.iter().all(|rank| rank == peer)) {
            Ok(())
        } else {
            write!(f, "; late: {}", ranks(late))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::rank::MAX_WORLD;

    #[test]
    fn reasons_name_the_rank_that_is_gone() {
        use crate::reason::{PANICKED, left, lost, peer_left, peer_lost, words};
        let ranks: Vec<Rank> = (0..MAX_WORLD as u32).map(Rank::new).collect();
        assert!(ranks.iter().all(|&rank| lost(peer_lost(rank)) == Some(rank)));
        assert!(ranks.iter().all(|&rank| left(peer_left(rank)) == Some(rank)
            && (lost(peer_left(rank)), left(peer_lost(rank))) == (None, None)));
        assert_eq!(words(peer_lost(Rank::new(3))), "rank 3 is gone");
        assert_eq!(words(peer_left(Rank::new(3))), "rank 3 has left");
        let first = peer_lost(Rank::new(0));
        for other in [0, 1, PANICKED, first - 1, first + MAX_WORLD as u32, u32::MAX] {
            assert_eq!(lost(other), None, "{other:#x}");
        }
    }

    #[test]
    fn a_record_becomes_a_sentence() {
        let record = FaultRecord {
            state: 1,
            code: fault::TIMEOUT,
            wait: fault::SIGNAL,
            rank: 2,
            peer: 5,
            signal: 7,
            expected: 9,
            seen: 8,
            epoch: 9,
            ..FaultRecord::default()
        };
        let text = Fault::from_record(&record, Vec::new()).to_string();
        assert_eq!(
            text,
            "rank 2: signal 7 of rank 5 did not come in call 9: the deadline passed (expected 9, \
             saw 8)"
        );
        let late = |late: u32| Fault::from_record(&record, vec![Rank::new(late)]).to_string();
        assert_eq!(late(5), text);
        assert_eq!(late(6), format!("{text}; late: rank 6"));
        let aborted = FaultRecord { code: fault::ABORTED, rank: 1, abort: 3, ..record };
        assert_eq!(
            Fault::from_record(&aborted, Vec::new()),
            Fault::Aborted { rank: Rank::new(1), reason: 3 }
        );
    }
}
