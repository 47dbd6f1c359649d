//! Traces a second-hand fault to the rank where it began.
//!
//! Invariant: a rank that learns of a fault through another rank names the first one as soon as
//! that has reported it.

use crate::Fault;
use crate::bootstrap::control::GaveUp;
use crate::reason;
use flux_core::Rank;
use flux_core::layout::{FaultRecord, fault};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PeerFault {
    /// Whom it waited for, and who is late.
    Timeout(GaveUp),
    Aborted {
        by: Rank,
        reason: u32,
    },
}

impl PeerFault {
    pub(super) fn fault(&self) -> Fault {
        match *self {
            Self::Timeout(what) => Fault::from_record(&what.record, what.late().collect()),
            Self::Aborted { by, reason: reason::PANICKED } => Fault::PeerLost { rank: by },
            Self::Aborted { by, reason } => Fault::Aborted { rank: by, reason },
        }
    }
}

/// Whether a record says only that another rank gave up. A lost or departed rank is named in the
/// reason itself.
pub(super) fn is_second_hand(record: &FaultRecord, own: Rank) -> bool {
    let of_another = record.rank != own.get() && Fault::named_by(record.abort).is_none();
    // Where one rank gives NCCL up, it fails at its peers.
    record.code == fault::ABORTED && (of_another || record.abort == reason::NCCL)
}

/// What a second-hand record comes from, of what was heard: of a wait, and of an abort.
pub(super) fn root_cause(
    record: &FaultRecord,
    own: Rank,
    timeout: Option<GaveUp>,
    aborted: Option<PeerFault>,
) -> Option<PeerFault> {
    let waits = match record.abort {
        reason::TIMED_OUT | reason::LATE | reason::NCCL => timeout,
        reason::IN_ANOTHER_OP => timeout.filter(|what| what.record.code == fault::DISAGREED),
        _ => None,
    };
    let same = |told: &PeerFault| {
        matches!(told, PeerFault::Aborted { reason, .. } if *reason == record.abort)
            && record.rank != own.get()
    };
    waits.map(PeerFault::Timeout).or_else(|| aborted.filter(same))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn aborted(rank: u32, abort: u32) -> FaultRecord {
        FaultRecord {
            state: 1,
            code: fault::ABORTED,
            rank,
            peer: rank,
            abort,
            ..FaultRecord::default()
        }
    }

    const OWN: Rank = Rank::new(0);

    #[test]
    fn what_another_rank_gave_up_for_is_second_hand() {
        let is = |record: FaultRecord| is_second_hand(&record, OWN);
        assert!(
            is(aborted(1, reason::TIMED_OUT))
                && is(aborted(1, reason::LATE))
                && is(aborted(1, 7))
                && is(aborted(0, reason::NCCL))
        );
        // Its own, and of a rank that is named.
        assert!(!is(aborted(0, reason::LATE)) && !is(aborted(0, 7)));
        assert!(
            [reason::peer_lost, reason::peer_left]
                .iter()
                .all(|named| !is(aborted(1, named(Rank::new(2)))))
        );
        assert!(!is(FaultRecord { code: fault::TIMEOUT, ..aborted(1, 0) }));
    }

    #[test]
    fn a_reason_that_is_passed_on_is_that_of_the_rank_that_gave_it_first() {
        let first = PeerFault::Aborted { by: Rank::new(3), reason: 7 };
        let of = |record: FaultRecord| root_cause(&record, OWN, None, Some(first));
        assert_eq!(of(aborted(1, 7)), Some(first));
        // Another reason, and this rank's own.
        assert_eq!(
            [of(aborted(1, 8)), of(aborted(0, 7)), of(aborted(1, reason::TIMED_OUT))],
            [None; 3]
        );
        assert_eq!(first.fault(), Fault::Aborted { rank: Rank::new(3), reason: 7 });
        let panicked = PeerFault::Aborted { by: Rank::new(3), reason: reason::PANICKED };
        assert_eq!(panicked.fault(), Fault::PeerLost { rank: Rank::new(3) });
    }

    #[test]
    fn of_what_a_peer_said_of_its_wait_only_another_op_explains_that_one_was_found() {
        let said = |code| {
            Some(GaveUp { communicator: 0, late: 2, record: FaultRecord { code, ..aborted(1, 0) } })
        };
        let of = |abort, said| root_cause(&aborted(1, abort), OWN, said, None);
        for code in [fault::TIMEOUT, fault::DISAGREED] {
            assert_eq!(of(reason::TIMED_OUT, said(code)), said(code).map(PeerFault::Timeout));
            assert_eq!(of(7, said(code)), None);
        }
        assert_eq!(of(reason::IN_ANOTHER_OP, said(fault::TIMEOUT)), None);
        assert!(of(reason::IN_ANOTHER_OP, said(fault::DISAGREED)).is_some());
    }
}
