//! A fault with what every rank was doing: who is late, and for whom the others wait.
//!
//! Invariant: a failure is gathered once and never changes. Gathering ends by [`DOUBT`], whatever the peers do.

use super::flight::{self, CallRecord, CallState};
use crate::Fault;
use crate::control::{Answer, mask_of, ranks};
use crate::fault::reason;
use flux_core::Rank;
use flux_core::layout::{FaultRecord, fault};
use flux_core::signal::Epoch;
use std::fmt;
use std::time::Duration;

/// How long, answers included, a doubt of who is late, or what failed first, is left open.
pub(super) const DOUBT: Duration = Duration::from_millis(250);
/// How long the peers' answers are waited for. Ranks that run answer within a millisecond, or a few where they are many on few cores; one that is stopped never does, nor one that
/// has no such communicator any more.
pub(super) const GATHER: Duration = Duration::from_millis(200);

/// Why a communicator is broken, with what each rank was doing when this one found out.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failure {
    /// The fault.
    pub fault: Fault,
    /// Each rank's part in it, by rank.
    pub ranks: Vec<RankReport>,
}

/// What is known of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankReport {
    /// The rank.
    pub rank: Rank,
    /// What it was doing.
    pub doing: Doing,
    /// Its last calls, oldest first, at most 64; none where it did not answer.
    pub calls: Vec<CallRecord>,
}

/// What a rank was doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Doing {
    /// It is in this call, or failed in it.
    In(CallRecord),
    /// It has put this call, its last, on a stream.
    Launched(CallRecord),
    /// It has finished this call and begun no other.
    After(CallRecord),
    /// It has made no call.
    Nothing,
    /// It does not answer: its process is stopped, or it has dropped this communicator and is still in the world.
    Silent,
    /// It has left.
    Left,
    /// It is gone.
    Gone,
}

impl RankReport {
    pub(super) fn new(rank: Rank, answer: &Answer) -> Self {
        let silent = |doing| Self { rank, doing, calls: Vec::new() };
        match answer {
            Answer::Silent => silent(Doing::Silent),
            Answer::Left => silent(Doing::Left),
            Answer::Lost => silent(Doing::Gone),
            Answer::Said(words) => match flight::decode(words) {
                None => silent(Doing::Silent),
                Some(calls) => Self { rank, doing: doing(&calls), calls },
            },
        }
    }
}

fn doing(calls: &[CallRecord]) -> Doing {
    let made = calls.iter().rev().find(|call| call.state != CallState::GivenUp);
    match made {
        None => Doing::Nothing,
        Some(call) => match call.state {
            CallState::Begun | CallState::Failed => Doing::In(*call),
            CallState::Launched => Doing::Launched(*call),
            CallState::Done | CallState::GivenUp => Doing::After(*call),
        },
    }
}

impl Doing {
    /// Whether a rank that waits in call `epoch` waits for one that does this, and that waits for nobody itself.
    fn is_late_for(&self, epoch: Epoch) -> bool {
        match self {
            Self::Silent | Self::Left | Self::Gone | Self::Nothing => true,
            Self::After(call) | Self::Launched(call) => call.epoch.is_some_and(|last| last.next() == epoch),
            Self::In(_) => false,
        }
    }
}

/// What ranks have said of their waits, as masks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Verdicts {
    /// Who has said whom it gave up.
    pub(super) spoke: u32,
    /// Who was given up.
    pub(super) given_up: u32,
}

/// Who is late, when the wait of a record has passed its deadline.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Late {
    pub(super) ranks: Vec<Rank>,
    /// Whether what is known leaves no doubt. Else a rank that waits itself will say so by its own deadline, which is about now.
    pub(super) certain: bool,
}

/// Often it is the rank that was waited for; but that one may itself wait for another in the call before, or have waited in vain and left. One that has launched its last call
/// may wait in it, so it is late only where nobody is for certain.
pub(super) fn late(record: &FaultRecord, reports: &[RankReport], verdicts: Verdicts) -> Late {
    if record.code != fault::TIMEOUT {
        return Late { ranks: Vec::new(), certain: true };
    }
    let (peer, epoch) = (Rank::new(record.peer), Epoch::new(record.epoch));
    let among = |ranks: u32, rank: Rank| ranks & mask_of([rank]) != 0;
    let waits = |rank: Rank| rank.get() == record.rank || among(verdicts.spoke, rank);
    let is_late = |report: &&RankReport| !waits(report.rank) && (report.doing.is_late_for(epoch) || among(verdicts.given_up, report.rank));
    let may_wait = |report: &&RankReport| matches!(report.doing, Doing::Launched(_)) && !among(verdicts.given_up, report.rank);
    let (waiting, certain): (Vec<&RankReport>, Vec<&RankReport>) = reports.iter().filter(is_late).partition(may_wait);
    let ranks = |of: Vec<&RankReport>| of.into_iter().map(|report| report.rank).collect::<Vec<Rank>>();
    let (waiting, certain) = (ranks(waiting), ranks(certain));
    if record.wait == fault::PUSHED {
        // What was waited for is this rank's own.
        return Late { ranks: certain, certain: true };
    }
    match (certain.is_empty(), waiting.is_empty()) {
        (false, _) if certain.contains(&peer) => Late { ranks: vec![peer], certain: true },
        (false, _) => Late { certain: !waiting.contains(&peer), ranks: certain },
        (true, false) if !waiting.contains(&peer) => Late { ranks: waiting, certain: true },
        (true, no_others) => Late { ranks: vec![peer], certain: !no_others },
    }
}

/// Whether a record says no more than that another rank's wait has failed, as far as is known: that rank says more of it, as its own fault, or will.
pub(super) fn is_second_hand(record: &FaultRecord, own: Rank) -> bool {
    let of_another = record.rank != own.get() && matches!(record.abort, reason::TIMED_OUT | reason::LATE);
    // Where one rank gives NCCL up, it fails at its peers.
    record.code == fault::ABORTED && (of_another || record.abort == reason::NCCL)
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fault.fmt(f)?;
        let mut told: Vec<(String, Vec<Rank>)> = Vec::new();
        for report in &self.ranks {
            let words = report.doing.to_string();
            match told.iter_mut().find(|(known, _)| *known == words) {
                Some((_, same)) => same.push(report.rank),
                None => told.push((words, vec![report.rank])),
            }
        }
        // Those that differ from most come first: they are what a reader looks for.
        told.sort_by_key(|(_, same)| same.len());
        for (words, same) in told {
            write!(f, "; {}: {words}", ranks(&same))?;
        }
        Ok(())
    }
}

impl fmt::Display for Doing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::In(call) => write!(f, "in {call}"),
            Self::Launched(call) => write!(f, "has launched {call}"),
            Self::After(call) => write!(f, "has finished {call} and begun no other"),
            Self::Nothing => f.write_str("has begun no call"),
            Self::Silent => f.write_str("does not answer (it is stopped, or has dropped the communicator)"),
            Self::Left => f.write_str("has left"),
            Self::Gone => f.write_str("is gone"),
        }
    }
}

impl std::error::Error for Failure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.fault)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::Label;

    fn call(epoch: u32, state: CallState) -> CallRecord {
        let label = Some(Label::new("ag_gemm", [4096, 49152, 12288]));
        CallRecord { epoch: Some(Epoch::new(epoch)), label, state, begun: Duration::ZERO, noted: Duration::ZERO }
    }

    fn reports(doing: &[Doing]) -> Vec<RankReport> {
        (0..).map(Rank::new).zip(doing).map(|(rank, &doing)| RankReport { rank, doing, calls: Vec::new() }).collect()
    }

    fn timeout(rank: u32, peer: u32, epoch: u32) -> FaultRecord {
        FaultRecord { state: 1, code: fault::TIMEOUT, wait: fault::SIGNAL, rank, peer, expected: epoch, epoch, ..FaultRecord::default() }
    }

    #[test]
    fn a_failure_says_who_is_where() {
        let waits = Doing::In(call(42, CallState::Failed));
        let ranks = reports(&[waits, waits, waits, Doing::In(call(41, CallState::Begun))]);
        let fault = Fault::from_record(&timeout(0, 3, 42), vec![Rank::new(3)]);
        let text = Failure { fault, ranks }.to_string();
        let op = "(ag_gemm 4096x49152x12288)";
        assert!(text.ends_with(&format!("; rank 3: in call 41 {op}; ranks 0, 1 and 2: in call 42 {op}")), "{text}");
    }

    #[test]
    fn a_rank_that_does_not_answer_is_not_taken_for_stopped_alone() {
        let silent = RankReport::new(Rank::new(1), &Answer::Silent);
        assert_eq!(silent.doing.to_string(), "does not answer (it is stopped, or has dropped the communicator)");
    }

    #[test]
    fn a_rank_that_waits_itself_is_not_late_where_another_is() {
        let (behind, ahead) = (Doing::In(call(41, CallState::Begun)), Doing::In(call(42, CallState::Failed)));
        let finished = Doing::After(call(41, CallState::Done));
        let is_late = |doing: &[Doing]| late(&timeout(0, 1, 42), &reports(doing), Verdicts::default()).ranks;
        assert_eq!(is_late(&[ahead, behind, ahead, Doing::Silent]), [Rank::new(3)]);
        assert_eq!(is_late(&[ahead, behind, finished, ahead]), [Rank::new(2)]);
        assert_eq!(is_late(&[ahead, finished, ahead, Doing::Silent]), [Rank::new(1)], "it was waited for, and has not come");
        assert_eq!(is_late(&[ahead, behind, ahead, ahead]), [Rank::new(1)], "nobody else is behind");
    }

    #[test]
    fn a_rank_whose_last_call_may_wait_itself_is_not_late_where_another_is_for_certain() {
        let (waits, launched) = (Doing::In(call(42, CallState::Failed)), Doing::Launched(call(41, CallState::Launched)));
        let found = |doing: &[Doing]| late(&timeout(0, 1, 42), &reports(doing), Verdicts::default());
        let is_late = |doing: &[Doing], ranks: &[u32], certain| {
            assert_eq!(found(doing), Late { ranks: ranks.iter().copied().map(Rank::new).collect(), certain }, "{doing:?}");
        };
        for sure in [Doing::Silent, Doing::Gone, Doing::Left, Doing::Nothing, Doing::After(call(41, CallState::Done))] {
            // The one that was waited for will say whom it waits for, if it does.
            is_late(&[waits, launched, waits, sure], &[3], false);
            is_late(&[waits, sure, waits, launched], &[1], true);
            is_late(&[waits, waits, launched, sure], &[3], true);
        }
        is_late(&[waits, launched, waits, launched], &[1], true);
        is_late(&[waits, waits, launched, launched], &[2, 3], true);
        // Nobody is behind, so who was waited for waits for somebody itself, or will.
        is_late(&[waits, waits, waits, waits], &[1], false);
    }

    #[test]
    fn whose_own_mover_stands_still_names_who_is_late_for_certain_and_never_itself() {
        let (waits, launched) = (Doing::In(call(42, CallState::Failed)), Doing::Launched(call(41, CallState::Launched)));
        let record = FaultRecord { wait: fault::PUSHED, ..timeout(0, 0, 42) };
        let is_late = |doing: &[Doing]| late(&record, &reports(doing), Verdicts::default()).ranks;
        assert_eq!(is_late(&[waits, launched, Doing::Silent, waits]), [Rank::new(2)]);
        assert!(is_late(&[waits, launched, waits, waits]).is_empty());
    }

    #[test]
    fn what_another_ranks_wait_led_to_is_second_hand() {
        let aborted = |rank, abort| FaultRecord { state: 1, code: fault::ABORTED, rank, peer: rank, abort, ..FaultRecord::default() };
        let is = |record: FaultRecord| is_second_hand(&record, Rank::new(0));
        assert!(is(aborted(1, reason::TIMED_OUT)) && is(aborted(1, reason::LATE)) && is(aborted(0, reason::NCCL)));
        // Its own, a caller's, a loss.
        assert!(!is(aborted(0, reason::LATE)) && !is(aborted(1, 7)) && !is(aborted(1, reason::peer_lost(Rank::new(2)))));
        assert!(!is(timeout(0, 1, 42)));
    }

    #[test]
    fn a_rank_that_has_given_up_another_is_not_late_whatever_it_does_since() {
        let waits = Doing::In(call(42, CallState::Failed));
        let came = Doing::In(call(42, CallState::Begun));
        let is_late = |doing: &[Doing], spoke: &[u32], given_up: &[u32]| {
            let mask = |ranks: &[u32]| mask_of(ranks.iter().copied().map(Rank::new));
            late(&timeout(0, 1, 42), &reports(doing), Verdicts { spoke: mask(spoke), given_up: mask(given_up) }).ranks
        };
        for gone in [Doing::Left, Doing::Silent, Doing::Gone, waits] {
            for other in [Doing::Nothing, came] {
                assert_eq!(is_late(&[waits, gone, waits, other], &[1], &[3]), [Rank::new(3)], "{gone:?} {other:?}");
            }
        }
        // Rank 2 was given up by rank 1, and had itself given up rank 3.
        assert_eq!(is_late(&[waits, Doing::Left, Doing::Left, came], &[1, 2], &[2, 3]), [Rank::new(3)]);
        assert_eq!(is_late(&[waits, came, waits, Doing::Left], &[2], &[1]), [Rank::new(1)], "somebody else has given it up, too");
        assert_eq!(is_late(&[waits, Doing::Left, waits, waits], &[1], &[0]), [Rank::new(1)], "it has given up this rank, and left");
    }
}
