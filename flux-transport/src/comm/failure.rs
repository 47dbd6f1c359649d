//! A fault with what every rank was doing.
//!
//! Invariant: a failure is gathered once and never changes, within [`DOUBT`] and one more question.

use super::flight::{self, CallRecord, CallState};
use crate::Fault;
use crate::bootstrap::control::{Answer, ranks, record_from, record_to_bytes};
use flux_core::Rank;
use flux_core::layout::FaultRecord;
use flux_core::signal::Epoch;
use std::fmt;
use std::time::Duration;

/// How long, answers included, a doubt of who is late, or what failed first, is left open.
pub(super) const DOUBT: Duration = Duration::from_millis(250);
/// How long the peers' answers are waited for. A running rank answers within milliseconds.
pub(super) const GATHER: Duration = Duration::from_millis(200);

/// Why a communicator is broken, with what each rank was doing when this one found out.
#[derive(Clone, PartialEq, Eq)]
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
    /// What a wait of its own failed with, or what ended one; who is late is not known of it.
    pub fault: Option<Fault>,
    /// The last call that it had made when its process was paused for half of the deadline or
    /// longer, as by a signal; known over `nccl` and `mixed`.
    pub paused_in: Option<Epoch>,
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
    /// It does not answer: it has dropped this communicator after an error, or is stopped.
    Silent,
    /// It has left the world.
    Left,
    /// It has dropped the communicator, after this call; it may be in the world.
    LeftAfter(Epoch),
    /// It has dropped the communicator, and made no call; this one would have been its first.
    LeftBefore(Epoch),
    /// It is gone.
    Gone,
}

/// What a rank answers that is asked what it does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Said {
    pub(super) record: Option<FaultRecord>,
    pub(super) paused_in: Option<Epoch>,
    pub(super) calls: Vec<CallRecord>,
}

impl Said {
    pub(super) fn encode(&self) -> Vec<u8> {
        let Self { record, paused_in, calls } = self;
        let mut bytes = vec![u8::from(record.is_some()), u8::from(paused_in.is_some())];
        bytes.extend(record.iter().flat_map(record_to_bytes));
        bytes.extend(paused_in.iter().flat_map(|epoch| epoch.get().to_le_bytes()));
        bytes.extend(flight::encode(calls));
        bytes
    }

    /// What [`encode`](Self::encode) writes; `None` for anything else.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (&[waits, paused], rest) = bytes.split_first_chunk()?;
        let (record, rest) = match waits {
            0 => (None, rest),
            1 => rest.split_first_chunk().map(|(one, rest)| (Some(record_from(one)), rest))?,
            _ => return None,
        };
        let (paused_in, calls) = match paused {
            0 => (None, rest),
            1 => rest
                .split_first_chunk()
                .map(|(&one, rest)| (Some(u32::from_le_bytes(one)), rest))?,
            _ => return None,
        };
        let (paused_in, calls) = (paused_in.map(Epoch::new), flight::decode(calls)?);
        Some(Self { record, paused_in, calls })
    }
}

impl RankReport {
    pub(super) fn new(rank: Rank, answer: &Answer) -> Self {
        let silent = |doing| Self { rank, doing, fault: None, paused_in: None, calls: Vec::new() };
        match answer {
            Answer::Silent => silent(Doing::Silent),
            Answer::Left => silent(Doing::Left),
            Answer::Lost => silent(Doing::Gone),
            Answer::Reply(words) => match Said::decode(words) {
                None => silent(Doing::Silent),
                Some(Said { record, paused_in, calls }) => {
                    let fault = record.map(|record| Fault::from_record(&record, Vec::new()));
                    Self { rank, doing: doing(&calls), fault, paused_in, calls }
                }
            },
        }
    }

    /// Takes a second answer. Silence does not replace an earlier answer.
    pub(super) fn renew(&mut self, answer: &Answer) {
        let now = Self::new(self.rank, answer);
        if now.doing != Doing::Silent {
            *self = now;
        }
    }

    /// Applies a known departure to a silent rank. `first`: the communicator's first call.
    pub(super) fn left_after(&mut self, last: Option<Epoch>, first: Epoch) {
        if let (Doing::Silent | Doing::Left, Some(last)) = (self.doing, last) {
            self.doing = if last.next() == first {
                Doing::LeftBefore(first)
            } else {
                Doing::LeftAfter(last)
            };
        }
    }

    /// Whom a wait of its that has failed was for.
    fn awaited(&self) -> Option<Rank> {
        match self.fault {
            Some(Fault::Timeout { rank, peer, .. }) if rank == self.rank && peer != self.rank => {
                Some(peer)
            }
            _ => None,
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
    /// Whether a rank in call `epoch` waits for one that does this.
    pub(super) fn is_late_for(&self, epoch: Epoch) -> bool {
        match self {
            Self::Silent | Self::Left | Self::Gone | Self::Nothing => true,
            Self::After(call) | Self::Launched(call) => {
                call.epoch.is_some_and(|last| last.next() == epoch)
            }
            Self::LeftAfter(last) => last.next() == epoch,
            Self::LeftBefore(first) => *first == epoch,
            Self::In(_) => false,
        }
    }
}

flux_core::debug_is_text!(Failure);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fault.fmt(f)?;
        let mut told: Vec<(String, Vec<Rank>)> = Vec::new();
        let is_told = |report: &&RankReport| match self.fault {
            Fault::PeerLost { rank } => report.rank == rank && report.doing == Doing::Gone,
            Fault::PeerLeft { rank } => report.rank == rank && report.doing == Doing::Left,
            _ => false,
        };
        for report in self.ranks.iter().filter(|report| !is_told(report)) {
            let waits_for = report
                .awaited()
                .map_or_else(String::new, |peer| format!(", and waited for rank {peer}"));
            let paused = report
                .paused_in
                .map_or_else(String::new, |call| format!(", and was paused in call {call}"));
            let words = format!("{}{waits_for}{paused}", report.doing);
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

/// A rank whose calls have failed says no more when it drops the communicator.
const SILENT: &str =
    "says no more (it has ended its part, as after an error of its own, or is stopped)";

impl fmt::Display for Doing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::In(call) => write!(f, "in {call}"),
            Self::Launched(call) => write!(f, "has launched {call}"),
            Self::After(call) => write!(f, "has finished {call} and begun no other"),
            Self::Nothing => f.write_str("has begun no call"),
            Self::Silent => f.write_str(SILENT),
            Self::Left => f.write_str("has left"),
            Self::LeftAfter(last) => write!(f, "has left after call {last}"),
            Self::LeftBefore(_) => f.write_str("has left and made no call"),
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
pub(super) mod tests {
    use super::*;
    use crate::comm::Label;
    use flux_core::layout::fault;
    use proptest::prelude::*;

    pub(crate) fn call(epoch: u32, state: CallState) -> CallRecord {
        let label = Some(Label::new("ag_gemm", [4096, 49152, 12288]));
        CallRecord {
            epoch: Some(Epoch::new(epoch)),
            label,
            empty_calls: 0,
            state,
            begun: Duration::ZERO,
            noted: Duration::ZERO,
        }
    }

    pub(crate) fn reports(doing: &[Doing]) -> Vec<RankReport> {
        (0..)
            .map(Rank::new)
            .zip(doing)
            .map(|(rank, &doing)| RankReport {
                rank,
                doing,
                fault: None,
                paused_in: None,
                calls: Vec::new(),
            })
            .collect()
    }

    pub(crate) fn timeout(rank: u32, peer: u32, epoch: u32) -> FaultRecord {
        FaultRecord {
            state: 1,
            code: fault::TIMEOUT,
            wait: fault::SIGNAL,
            rank,
            peer,
            expected: epoch,
            epoch,
            ..FaultRecord::default()
        }
    }

    #[test]
    fn a_rank_that_has_left_says_whether_it_made_calls() {
        let said = |last: Option<u32>, first| {
            let mut report = reports(&[Doing::Silent]).remove(0);
            report.left_after(last.map(Epoch::new), Epoch::new(first));
            report.doing
        };
        assert_eq!(
            [said(None, 1), said(Some(0), 1), said(Some(1), 1), said(Some(u32::MAX), 0)]
                .map(|doing| doing.to_string()),
            [
                SILENT,
                "has left and made no call",
                "has left after call 1",
                "has left and made no call",
            ]
        );
        assert!(
            [(Some(0), 1), (Some(7), 1)]
                .map(|(last, first)| said(last, first).is_late_for(Epoch::new(last.unwrap() + 1)))
                == [true; 2]
        );
    }

    #[test]
    fn a_failure_says_who_is_where() {
        let waits = Doing::In(call(42, CallState::Failed));
        let ranks = reports(&[waits, waits, waits, Doing::In(call(41, CallState::Begun))]);
        let fault = Fault::from_record(&timeout(0, 3, 42), vec![Rank::new(3)]);
        let text = Failure { fault, ranks }.to_string();
        let op = "(ag_gemm 4096x49152x12288)";
        assert!(
            text.ends_with(&format!(
                "; rank 3: in call 41 {op}; ranks 0, 1 and 2: in call 42 {op}"
            )),
            "{text}"
        );
    }

    #[test]
    fn a_failure_says_who_waited_for_whom() {
        let waits = Doing::In(call(42, CallState::Failed));
        let mut ranks = reports(&[waits, waits, Doing::Launched(call(42, CallState::Launched))]);
        for (rank, peer) in [(0, 1), (1, 2)] {
            ranks[rank as usize].fault =
                Some(Fault::from_record(&timeout(rank, peer, 42), Vec::new()));
        }
        let text =
            Failure { fault: Fault::from_record(&timeout(0, 1, 42), vec![Rank::new(2)]), ranks }
                .to_string();
        let op = "call 42 (ag_gemm 4096x49152x12288)";
        let told = format!(
            "; rank 0: in {op}, and waited for rank 1; rank 1: in {op}, and waited for rank 2; \
             rank 2: has launched {op}"
        );
        assert!(text.ends_with(&told), "{text}");
    }

    proptest! {
        #[test]
        fn what_a_rank_answers_comes_back(
            record in prop::option::of(any::<[u32; 16]>()),
            paused_in in prop::option::of(any::<u32>()),
            epochs in prop::collection::vec(any::<u32>(), 0..4),
        ) {
            let (record, paused_in) = (record.map(bytemuck::cast), paused_in.map(Epoch::new));
            let calls = epochs.into_iter().map(|epoch| call(epoch, CallState::Done)).collect();
            let said = Said { record, paused_in, calls };
            let bytes = said.encode();
            prop_assert_eq!(Said::decode(&bytes[..bytes.len() - 1]), None);
            prop_assert_eq!(Said::decode(&bytes), Some(said));
        }
    }

    #[test]
    fn a_rank_that_is_asked_again_has_said_what_it_said_last() {
        let record = timeout(1, 2, 42);
        let says = |record: Option<&FaultRecord>| {
            let calls = vec![call(42, CallState::Begun)];
            Answer::Reply(Said { record: record.copied(), calls, ..Said::default() }.encode())
        };
        let mut report = RankReport::new(Rank::new(1), &Answer::Silent);
        report.renew(&says(None));
        assert_eq!((report.doing, report.awaited()), (Doing::In(call(42, CallState::Begun)), None));
        report.renew(&says(Some(&record)));
        report.renew(&Answer::Silent);
        assert_eq!(
            (report.doing, report.awaited()),
            (Doing::In(call(42, CallState::Begun)), Some(Rank::new(2)))
        );
        report.renew(&Answer::Lost);
        assert_eq!((report.doing, report.awaited()), (Doing::Gone, None));
    }

    #[test]
    fn a_rank_that_does_not_answer_may_have_returned_an_error() {
        let silent = RankReport::new(Rank::new(1), &Answer::Silent).doing.to_string();
        assert!(silent.contains("after an error of its own, or is stopped"), "{silent}");
    }

    #[test]
    fn a_rank_that_is_gone_is_named_once() {
        let waits = Doing::In(call(42, CallState::Failed));
        let said = |fault, doing| Failure { fault, ranks: reports(&[waits, doing]) }.to_string();
        let op = "rank 0: in call 42 (ag_gemm 4096x49152x12288)";
        let rank = Rank::new(1);
        assert_eq!(
            said(Fault::PeerLost { rank }, Doing::Gone),
            format!("{}; {op}", Fault::PeerLost { rank })
        );
        let left = said(Fault::PeerLeft { rank }, Doing::Left);
        assert!(left.matches("rank 1").count() == 1 && left.ends_with(op), "{left}");
    }
}
