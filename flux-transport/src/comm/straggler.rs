//! Finds the stragglers behind a wait that passed its deadline.
//!
//! Invariant: a rank that waits itself is no straggler, unless its process was paused in the call,
//! or a peer has given it up and it has not reported since.

use super::failure::{Doing, RankReport};
use super::flight::CallState;
use crate::Fault;
use crate::backends::Wait;
use crate::bootstrap::control::mask_of;
use crate::reason;
use flux_core::Rank;
use flux_core::layout::{FaultRecord, fault};
use flux_core::signal::Epoch;
use std::time::Duration;

/// What ranks have said of their waits, as masks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Verdicts {
    /// Who has said whom it gave up.
    pub(super) reported: u32,
    pub(super) given_up: u32,
}

impl Verdicts {
    /// Whether a rank was given up, and has not given up another itself.
    fn is_given_up(self, rank: Rank) -> bool {
        self.given_up & !self.reported & mask_of([rank]) != 0
    }

    fn reported(self, rank: Rank) -> bool {
        self.reported & mask_of([rank]) != 0
    }
}

/// Who is late, when the wait of a record has passed its deadline.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Stragglers {
    pub(super) ranks: Vec<Rank>,
    /// Whether there is no doubt. Otherwise a rank that waits itself will report about now.
    pub(super) certain: bool,
}

/// Often the straggler is the awaited rank, but that may wait for another, or have left. A rank
/// that has launched its last call may wait in it, so it counts only if nobody is late for certain.
/// If the wait was for the own mover and no rank is behind, the stragglers are hosts that spent
/// half of `deadline` in a call.
pub(super) fn stragglers(
    record: &FaultRecord,
    reports: &[RankReport],
    verdicts: Verdicts,
    deadline: Duration,
) -> Stragglers {
    if record.code != fault::TIMEOUT {
        return Stragglers { ranks: Vec::new(), certain: true };
    }
    let epoch = Epoch::new(record.epoch);
    let waits = |report: &RankReport| {
        let rank = report.rank;
        rank.get() == record.rank
            || verdicts.reported(rank)
            || (waits_for(report, epoch).is_some() && !verdicts.is_given_up(rank))
    };
    let is_late = |report: &&RankReport| {
        let is_behind = report.doing.is_late_for(epoch) || verdicts.is_given_up(report.rank);
        was_paused_in(report, epoch) || (!waits(report) && is_behind)
    };
    let may_wait = |report: &&RankReport| {
        let is_late = was_paused_in(report, epoch) || verdicts.is_given_up(report.rank);
        matches!(report.doing, Doing::Launched(_)) && !is_late
    };
    let (waiting, certain): (Vec<&RankReport>, Vec<&RankReport>) =
        reports.iter().filter(is_late).partition(may_wait);
    let ranks =
        |of: Vec<&RankReport>| of.into_iter().map(|report| report.rank).collect::<Vec<Rank>>();
    let (waiting, certain) = (ranks(waiting), ranks(certain));
    if record.wait == fault::PUSHED {
        // What was waited for is this rank's own.
        let own_is_past = reports
            .iter()
            .any(|report| report.rank.get() == record.rank && is_past(report.doing, epoch));
        if !certain.is_empty() || !waiting.is_empty() || !own_is_past {
            return Stragglers { ranks: certain, certain: true };
        }
        let held_up = reports
            .iter()
            .filter(|report| !waits(report) && was_long_at(report, epoch, deadline / 2));
        return Stragglers { ranks: ranks(held_up.collect()), certain: true };
    }
    let awaited = awaited(record, reports, verdicts);
    match (certain.is_empty(), waiting.is_empty()) {
        (false, _) if certain.contains(&awaited) => {
            Stragglers { ranks: vec![awaited], certain: true }
        }
        (false, _) => Stragglers { certain: !waiting.contains(&awaited), ranks: certain },
        (true, false) if !waiting.contains(&awaited) => {
            Stragglers { ranks: waiting, certain: true }
        }
        (true, no_others) => Stragglers { ranks: vec![awaited], certain: !no_others },
    }
}

/// Follows each rank's own wait from rank to rank, to one that reports none, was paused or was
/// given up. In a circle: the first awaited.
fn awaited(record: &FaultRecord, reports: &[RankReport], verdicts: Verdicts) -> Rank {
    let (first, mut epoch) = (Rank::new(record.peer), Epoch::new(record.epoch));
    let (mut at, mut seen) = (first, mask_of([Rank::new(record.rank)]));
    loop {
        if seen & mask_of([at]) != 0 {
            return first;
        }
        seen |= mask_of([at]);
        let waits =
            |report: &&RankReport| !verdicts.is_given_up(at) && !was_paused_in(report, epoch);
        let report = reports.get(at.index()).filter(waits);
        match report.and_then(|report| waits_for(report, epoch)) {
            Some((peer, of)) if peer.index() < reports.len() => (at, epoch) = (peer, of),
            _ => return at,
        }
    }
}

/// Whether a rank's process was paused in call `epoch`, ahead of making it, or in a later one.
fn was_paused_in(report: &RankReport, epoch: Epoch) -> bool {
    report.paused_in.is_some_and(|call| not_after(epoch.before(1), call))
}

/// Whether a host has put call `epoch` on a stream, by what its rank does.
fn is_past(doing: Doing, epoch: Epoch) -> bool {
    match doing {
        Doing::Launched(_) => true,
        Doing::In(call) => call.epoch.is_some_and(|of| of != epoch),
        _ => false,
    }
}

/// Whether a rank's host has been in call `epoch`, or an earlier one, for `long`.
fn was_long_at(report: &RankReport, epoch: Epoch, long: Duration) -> bool {
    report.calls.iter().any(|call| {
        let in_question = match call.state {
            CallState::Begun => call.epoch.is_some_and(|of| not_after(of, epoch)),
            CallState::Launched => call.epoch == Some(epoch),
            CallState::Done | CallState::Failed | CallState::GivenUp => false,
        };
        in_question && call.noted.saturating_sub(call.begun) >= long
    })
}

/// Whether call `of` is `epoch` or an earlier one.
fn not_after(of: Epoch, epoch: Epoch) -> bool {
    epoch.get().wrapping_sub(of.get()) <= u32::MAX / 2
}

fn waits_for(report: &RankReport, epoch: Epoch) -> Option<(Rank, Epoch)> {
    match report.fault {
        Some(Fault::Timeout { rank, peer, wait, epoch: of, .. })
            if rank == report.rank && wait != Wait::Pushed =>
        {
            not_after(of, epoch).then_some((peer, of))
        }
        // A peer's word ended its wait. A rank that has not begun the call has no wait in it.
        Some(Fault::Aborted { rank, reason: reason::TIMED_OUT })
            if rank != report.rank && !report.doing.is_late_for(epoch) =>
        {
            Some((rank, epoch))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::failure::tests::{call, reports, timeout};

    const DEADLINE: Duration = Duration::from_secs(5);

    #[test]
    fn a_rank_that_waits_itself_is_not_late_where_another_is() {
        let (behind, ahead) =
            (Doing::In(call(41, CallState::Begun)), Doing::In(call(42, CallState::Failed)));
        let finished = Doing::After(call(41, CallState::Done));
        let is_late = |doing: &[Doing]| {
            stragglers(&timeout(0, 1, 42), &reports(doing), Verdicts::default(), DEADLINE).ranks
        };
        assert_eq!(is_late(&[ahead, behind, ahead, Doing::Silent]), [Rank::new(3)]);
        assert_eq!(is_late(&[ahead, behind, finished, ahead]), [Rank::new(2)]);
        assert_eq!(
            is_late(&[ahead, finished, ahead, Doing::Silent]),
            [Rank::new(1)],
            "it was waited for, and has not come"
        );
        assert_eq!(
            is_late(&[ahead, behind, ahead, ahead]),
            [Rank::new(1)],
            "nobody else is behind"
        );
    }

    #[test]
    fn a_rank_whose_last_call_may_wait_itself_is_not_late_where_another_is_for_certain() {
        let (waits, launched) = (
            Doing::In(call(42, CallState::Failed)),
            Doing::Launched(call(41, CallState::Launched)),
        );
        let found = |doing: &[Doing]| {
            stragglers(&timeout(0, 1, 42), &reports(doing), Verdicts::default(), DEADLINE)
        };
        let is_late = |doing: &[Doing], ranks: &[u32], certain| {
            assert_eq!(
                found(doing),
                Stragglers { ranks: ranks.iter().copied().map(Rank::new).collect(), certain },
                "{doing:?}"
            );
        };
        let left = |last| Doing::LeftAfter(Epoch::new(last));
        for sure in [
            Doing::Silent,
            Doing::Gone,
            Doing::Left,
            left(41),
            Doing::LeftBefore(Epoch::new(42)),
            Doing::Nothing,
            Doing::After(call(41, CallState::Done)),
        ] {
            // The one that was waited for will say whom it waits for, if it does.
            is_late(&[waits, launched, waits, sure], &[3], false);
            is_late(&[waits, sure, waits, launched], &[1], true);
            is_late(&[waits, waits, launched, sure], &[3], true);
        }
        is_late(&[waits, launched, waits, left(42)], &[1], true);
        is_late(&[waits, launched, waits, launched], &[1], true);
        is_late(&[waits, waits, launched, launched], &[2, 3], true);
        // Nobody is behind, so who was waited for waits for somebody itself, or will.
        is_late(&[waits, waits, waits, waits], &[1], false);
    }

    #[test]
    fn whose_own_mover_stands_still_names_who_is_late_for_certain_and_never_itself() {
        let (waits, launched) = (
            Doing::In(call(42, CallState::Failed)),
            Doing::Launched(call(41, CallState::Launched)),
        );
        let record = FaultRecord { wait: fault::PUSHED, ..timeout(0, 0, 42) };
        let is_late = |doing: &[Doing]| {
            stragglers(&record, &reports(doing), Verdicts::default(), DEADLINE).ranks
        };
        assert_eq!(is_late(&[waits, launched, Doing::Silent, waits]), [Rank::new(2)]);
        assert!(is_late(&[waits, launched, waits, waits]).is_empty());
    }

    /// A host that was stopped after it published its call, with messages on the caller's stream,
    /// runs on during the search.
    #[test]
    fn whose_own_messages_stand_still_names_whose_host_was_held_up_in_the_call() {
        let record = FaultRecord { wait: fault::PUSHED, ..timeout(0, 0, 42) };
        let launched = |epoch| call(epoch, CallState::Launched);
        let begun = |epoch, noted| crate::CallRecord { noted, ..call(epoch, CallState::Begun) };
        let of = |calls: &[crate::CallRecord]| {
            let doing: Vec<Doing> = calls
                .iter()
                .map(|call| {
                    if call.state == CallState::Begun {
                        Doing::In(*call)
                    } else {
                        Doing::Launched(*call)
                    }
                })
                .collect();
            let mut reports = reports(&doing);
            for (report, call) in reports.iter_mut().zip(calls) {
                report.calls = vec![launched(call.epoch.unwrap().before(1).get()), *call];
            }
            reports
        };
        let late = |reports: &[RankReport], verdicts| {
            let late = stragglers(&record, reports, verdicts, DEADLINE);
            assert!(late.certain);
            late.ranks.into_iter().map(Rank::get).collect::<Vec<_>>()
        };
        let is_late = |calls: &[crate::CallRecord]| late(&of(calls), Verdicts::default());
        let (long, moment) = (DEADLINE, Duration::from_millis(1));
        assert_eq!(
            is_late(&[launched(42), begun(42, long), launched(42), begun(41, long)]),
            [1, 3]
        );
        assert_eq!(
            is_late(&[launched(42), begun(42, moment), launched(42), launched(43)]),
            [0; 0],
            "whoever held it up has run on"
        );
        assert_eq!(
            is_late(&[launched(42), begun(43, long), launched(42), launched(42)]),
            [0; 0],
            "it has put call 42 on a stream"
        );
        assert_eq!(
            is_late(&[begun(50, long), begun(42, long), launched(42), begun(50, long)]),
            [1],
            "of ranks whose streams are full"
        );
        assert_eq!(
            is_late(&[launched(42), begun(42, long), launched(41), launched(42)]),
            [0; 0],
            "rank 2 is behind, or may wait itself"
        );
        assert_eq!(
            is_late(&[begun(42, long), begun(42, long), launched(42), launched(42)]),
            [0; 0],
            "where hosts execute calls all are in them"
        );
        let mut reports = of(&[launched(42), begun(42, long), launched(42), launched(42)]);
        reports[2].doing = Doing::Silent;
        assert_eq!(late(&reports, Verdicts::default()), [2], "for certain");
        reports[2].doing = reports[3].doing;
        let reported = Verdicts { reported: mask_of([Rank::new(1)]), ..Verdicts::default() };
        assert_eq!(late(&reports, reported), [0; 0], "rank 1 waits itself");
        // It has launched the call since, and the next.
        let took = |took| crate::CallRecord { noted: took, ..launched(42) };
        reports[1].doing = Doing::Launched(launched(43));
        for (longest, named) in [(DEADLINE, vec![1]), (DEADLINE / 4, vec![])] {
            reports[1].calls =
                vec![took(longest), crate::CallRecord { noted: DEADLINE, ..launched(43) }];
            assert_eq!(late(&reports, Verdicts::default()), named, "{longest:?}");
        }
    }

    /// Whatever its host or its kernel waits for by then: its messages did not go on meanwhile.
    #[test]
    fn a_rank_whose_process_was_paused_in_the_call_is_late_though_it_runs_on() {
        let reported = Verdicts { reported: mask_of([Rank::new(2)]), ..Verdicts::default() };
        let own = timeout(0, 1, 42);
        let whole = [own, timeout(1, 2, 42), timeout(2, 3, 42), timeout(3, 0, 42)];
        let silent = FaultRecord { wait: fault::CALL, ..own };
        let mover = FaultRecord { wait: fault::PUSHED, peer: 0, ..own };
        for record in [own, silent, mover] {
            for of in [Doing::In(call(42, CallState::Begun)), Doing::In(call(43, CallState::Begun))]
            {
                for (paused_in, verdicts) in [(41, reported), (42, Verdicts::default())] {
                    let mut reports = waiting(4, &whole);
                    reports[2].doing = of;
                    let found = |reports: &[RankReport]| {
                        stragglers(&record, reports, verdicts, DEADLINE).ranks
                    };
                    assert!(!found(&reports).contains(&Rank::new(2)), "{record:?}");
                    reports[2].paused_in = Some(Epoch::new(paused_in));
                    assert_eq!(found(&reports), [Rank::new(2)], "{record:?} {paused_in}");
                    // Long over.
                    reports[2].paused_in = Some(Epoch::new(40));
                    assert!(!found(&reports).contains(&Rank::new(2)), "{record:?}");
                }
            }
        }
        // Its own wait began before it was paused.
        let mut reports = waiting(4, &[timeout(2, 0, 42)]);
        reports[2].paused_in = Some(Epoch::new(42));
        let found = stragglers(&timeout(2, 0, 42), &reports, Verdicts::default(), DEADLINE);
        assert_eq!(found.ranks, [Rank::new(2)]);
    }

    #[test]
    fn a_rank_that_has_given_up_another_is_not_late_whatever_it_does_since() {
        let waits = Doing::In(call(42, CallState::Failed));
        let came = Doing::In(call(42, CallState::Begun));
        let is_late = |doing: &[Doing], reported: &[u32], given_up: &[u32]| {
            let mask = |ranks: &[u32]| mask_of(ranks.iter().copied().map(Rank::new));
            stragglers(
                &timeout(0, 1, 42),
                &reports(doing),
                Verdicts { reported: mask(reported), given_up: mask(given_up) },
                DEADLINE,
            )
            .ranks
        };
        for gone in [Doing::Left, Doing::Silent, Doing::Gone, waits] {
            for other in [Doing::Nothing, came] {
                assert_eq!(
                    is_late(&[waits, gone, waits, other], &[1], &[3]),
                    [Rank::new(3)],
                    "{gone:?} {other:?}"
                );
            }
        }
        // Rank 2 was given up by rank 1, and had itself given up rank 3.
        assert_eq!(
            is_late(&[waits, Doing::Left, Doing::Left, came], &[1, 2], &[2, 3]),
            [Rank::new(3)]
        );
        assert_eq!(
            is_late(&[waits, came, waits, Doing::Left], &[2], &[1]),
            [Rank::new(1)],
            "somebody else has given it up, too"
        );
        assert_eq!(
            is_late(&[waits, Doing::Left, waits, waits], &[1], &[0]),
            [Rank::new(1)],
            "it has given up this rank, and left"
        );
    }

    /// What ranks do that have launched far ahead, with the waits of some that have failed.
    fn waiting(world: u32, records: &[FaultRecord]) -> Vec<RankReport> {
        let mut reports =
            reports(&vec![Doing::Launched(call(50, CallState::Launched)); world as usize]);
        for record in records {
            reports[record.rank as usize].fault = Some(Fault::from_record(record, Vec::new()));
        }
        reports
    }

    fn of(record: &FaultRecord, reports: &[RankReport], given_up: &[u32]) -> Stragglers {
        stragglers(
            record,
            reports,
            Verdicts { reported: 0, given_up: mask_of(given_up.iter().copied().map(Rank::new)) },
            DEADLINE,
        )
    }

    fn doubtful(rank: u32) -> Stragglers {
        Stragglers { ranks: vec![Rank::new(rank)], certain: false }
    }

    /// As where a device hangs whose host answers.
    #[test]
    fn a_wait_is_followed_from_rank_to_rank_to_the_one_that_waits_for_none() {
        let (own, second, third) = (timeout(0, 1, 42), timeout(1, 2, 42), timeout(2, 3, 41));
        assert_eq!(of(&own, &waiting(5, &[own]), &[]), doubtful(1), "it may wait itself");
        assert_eq!(of(&own, &waiting(5, &[own, second]), &[]), doubtful(2));
        assert_eq!(of(&own, &waiting(5, &[own, second, third]), &[]), doubtful(3));
        let mut reports = waiting(5, &[own, second, third]);
        for sure in [Doing::Silent, Doing::Left, Doing::After(call(41, CallState::Done))] {
            reports[3].doing = sure;
            assert_eq!(of(&own, &reports, &[]), Stragglers { certain: true, ..doubtful(3) });
        }
    }

    #[test]
    fn a_wait_is_followed_no_further_than_it_says_something_of_this_one() {
        let own = timeout(0, 1, 42);
        // It has done its part of call 42.
        assert_eq!(of(&own, &waiting(4, &[own, timeout(1, 2, 43)]), &[]), doubtful(1));
        // Its own mover stands still, and what is no rank.
        for odd in [
            FaultRecord { wait: fault::PUSHED, ..timeout(1, 2, 42) },
            timeout(1, 4, 42),
            timeout(1, u32::MAX, 42),
            timeout(3, 2, 42),
        ] {
            assert_eq!(of(&own, &waiting(4, &[own, odd]), &[]), doubtful(1), "{odd:?}");
        }
        // One that waits for this rank, and two that wait for each other.
        assert_eq!(of(&own, &waiting(4, &[own, timeout(1, 0, 42)]), &[]), doubtful(1));
        assert_eq!(
            of(&own, &waiting(4, &[own, timeout(1, 2, 42), timeout(2, 1, 42)]), &[]),
            doubtful(1)
        );
        // One whose wait was ended by another's word.
        let ended = FaultRecord {
            code: fault::ABORTED,
            rank: 2,
            peer: 2,
            abort: reason::TIMED_OUT,
            ..FaultRecord::default()
        };
        let mut reports = waiting(5, &[own, timeout(2, 3, 42)]);
        reports[1].fault = Some(Fault::from_record(&ended, Vec::new()));
        assert_eq!(of(&own, &reports, &[]), doubtful(3));
    }

    /// Its host has read the words of those that waited for it in vain.
    #[test]
    fn a_rank_that_has_not_begun_the_call_is_late_whatever_words_it_has_read() {
        let own = timeout(0, 2, 42);
        for doing in [
            Doing::Launched(call(41, CallState::Launched)),
            Doing::After(call(41, CallState::Done)),
            Doing::Nothing,
        ] {
            for of_whom in [0, 2] {
                let word = FaultRecord {
                    code: fault::ABORTED,
                    rank: of_whom,
                    peer: of_whom,
                    abort: reason::TIMED_OUT,
                    ..FaultRecord::default()
                };
                let mut reports = waiting(3, &[own, timeout(2, 1, 42)]);
                (reports[1].doing, reports[1].fault) =
                    (doing, Some(Fault::from_record(&word, Vec::new())));
                assert_eq!(
                    of(&own, &reports, &[]),
                    Stragglers { ranks: vec![Rank::new(1)], certain: true },
                    "{doing:?}, rank {of_whom}"
                );
            }
        }
    }

    #[test]
    fn whoever_was_given_up_is_late_whatever_it_has_waited_for() {
        let own = timeout(0, 1, 42);
        let reports = waiting(4, &[own, timeout(1, 2, 42), timeout(2, 3, 42)]);
        assert_eq!(of(&own, &reports, &[2]), Stragglers { certain: true, ..doubtful(2) });
        assert_eq!(of(&own, &reports, &[1]), Stragglers { certain: true, ..doubtful(1) });
        // A rank that has said whom it gave up is asked for that one.
        let verdicts = Verdicts { reported: 0b10, given_up: 0b110 };
        assert_eq!(
            stragglers(&own, &reports, verdicts, DEADLINE),
            Stragglers { certain: true, ..doubtful(2) }
        );
    }

    /// Its wait may pass its deadline later, for the one that is stopped.
    #[test]
    fn a_rank_that_is_late_for_certain_is_named_before_one_that_says_nothing_of_its_wait() {
        let own = timeout(0, 1, 42);
        let mut reports = waiting(4, &[own]);
        reports[3].doing = Doing::Silent;
        assert_eq!(of(&own, &reports, &[]).ranks, [Rank::new(3)]);
    }
}
