//! Events that bound the collectives of sequential calls, for whom no kernel waits.
//!
//! Invariant: a mark is noted before anything of its collective is enqueued. So the oldest open
//! mark is that of the collective that the device comes to next, or is in. Nobody asks the driver
//! under the lock. A gather has its mark at its start, as the kernel behind it stamps its end. A
//! sum has it at its end, as the kernel ahead stamps its start: the event that ends its call.
//!
//! Calls in good order are followed by stamps alone. The driver is asked for a mark that stays the
//! oldest for a moment, by a [thread](Inquiry) that may wait there.

use super::progress::Stall;
use crate::sync::locked;
use flux_core::signal::Epoch;
use flux_cuda::{CudaDevice, CudaError, Event};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long a mark is the oldest before the driver is asked: longer than collectives take.
const MOMENT: Duration = Duration::from_millis(250);
/// Between two questions to the driver.
const AGAIN: Duration = Duration::from_millis(10);
/// Deadlines after which an answer is not waited for any more: the driver waits for the device.
const UNANSWERED: u32 = 2;

/// Which end of a collective a mark is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bound {
    Start,
    End,
}

/// What is known of calls without the driver, by their numbers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stamps {
    /// The last sequential call whose kernel has ended.
    pub(super) closed: Epoch,
    /// The last call whose rounds a side stream has come to.
    pub(super) rounds: Epoch,
    /// The last call that was made.
    pub(super) made: Epoch,
}

impl Stamps {
    /// Whether `call` is `from` or between that and the last call: not one that is long over.
    const fn reaches(self, call: Epoch, from: Epoch) -> bool {
        call.get().wrapping_sub(from.get()) <= self.made.get().wrapping_sub(from.get())
    }

    /// Whether call `a` was made after call `b`, neither of which is after the last.
    pub(super) fn is_later(self, a: Epoch, b: Epoch) -> bool {
        let age = |call: Epoch| self.made.get().wrapping_sub(call.get());
        age(a) < age(b)
    }

    /// Whether the collective of `epoch` with such a mark is over. Calls end in order.
    const fn are_past(self, epoch: Epoch, bound: Bound) -> bool {
        if matches!(bound, Bound::Start) && self.reaches(self.closed, epoch) {
            return true;
        }
        let next = epoch.next();
        epoch.get() != self.made.get()
            && (self.reaches(self.closed, next) || self.reaches(self.rounds, next))
    }
}

/// The mark of a collective that is not known to be over.
#[derive(Clone, Debug)]
pub(super) struct Mark {
    pub(super) epoch: Epoch,
    pub(super) bound: Bound,
    event: Arc<Event>,
    /// Whether the event is this mark already.
    recorded: bool,
}

impl Mark {
    /// Whether the device is past it. Asks the driver.
    pub(super) fn is_passed(&self) -> Result<bool, CudaError> {
        Ok(self.recorded && self.event.is_done()?)
    }
}

/// The marks of a rank, oldest first.
#[derive(Debug, Default)]
pub(super) struct Marks(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    open: VecDeque<Mark>,
    spare: Vec<Arc<Event>>,
}

impl Marks {
    /// Notes the mark of call `epoch`. Its event is to be recorded, and then
    /// [said to be](Self::recorded).
    pub(super) fn open(
        &self,
        device: &CudaDevice,
        epoch: Epoch,
        bound: Bound,
    ) -> Result<Arc<Event>, CudaError> {
        let spare = locked(&self.0).spare.pop();
        let event = spare.map_or_else(|| Event::new(device).map(Arc::new), Ok)?;
        let mark = Mark { epoch, bound, event: Arc::clone(&event), recorded: false };
        locked(&self.0).open.push_back(mark);
        Ok(event)
    }

    /// Says that the newest mark's event was recorded.
    pub(super) fn recorded(&self) {
        if let Some(mark) = locked(&self.0).open.back_mut() {
            mark.recorded = true;
        }
    }

    /// The oldest mark, without those of collectives that are over.
    pub(super) fn oldest(&self, stamps: Stamps) -> Option<Mark> {
        let State { open, spare } = &mut *locked(&self.0);
        while let Some(mark) = open.pop_front_if(|mark| stamps.are_past(mark.epoch, mark.bound)) {
            spare.push(mark.event);
        }
        open.front().cloned()
    }

    /// Forgets the mark of call `epoch`, whose collective is over, if it is the oldest.
    pub(super) fn close(&self, epoch: Epoch) {
        let State { open, spare } = &mut *locked(&self.0);
        spare.extend(open.pop_front_if(|mark| mark.epoch == epoch).map(|mark| mark.event));
    }
}

/// A question to the driver, asked again and again by a thread until it is dropped.
#[derive(Debug)]
struct Inquiry(Arc<AtomicU8>);

impl Inquiry {
    const NOT_YET: u8 = 1;
    const PASSED: u8 = 2;

    fn new(is_passed: impl Fn() -> Result<bool, CudaError> + Send + 'static) -> Self {
        let answer = Arc::new(AtomicU8::new(0));
        let told = Arc::clone(&answer);
        let ask = move || {
            while Arc::strong_count(&told) > 1 {
                match is_passed() {
                    Ok(false) => told.store(Self::NOT_YET, Ordering::Release),
                    Ok(true) => return told.store(Self::PASSED, Ordering::Release),
                    Err(error) => return tracing::debug!(%error, "no answer of the driver"),
                }
                std::thread::sleep(AGAIN);
            }
        };
        if let Err(error) = std::thread::Builder::new().name("flux-nccl-ask".to_owned()).spawn(ask)
        {
            tracing::warn!(%error, "no thread to ask the driver for a collective");
        }
        Self(answer)
    }

    /// Whether the device is past the mark, once the driver has answered.
    fn answer(&self) -> Option<bool> {
        match self.0.load(Ordering::Acquire) {
            Self::NOT_YET => Some(false),
            Self::PASSED => Some(true),
            _ => None,
        }
    }
}

/// What is to be done about the oldest mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nothing yet.
    Wait,
    /// To ask the driver for it.
    Ask,
    /// To forget it: the collective is over.
    Over,
    /// To fail its call: the collective has exceeded the deadline.
    Stalled,
}

/// Where the device is with the collective of the oldest mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The driver has not said.
    Unknown,
    /// Ahead of it, behind the work of others, which may take as long as it likes.
    Ahead,
    /// In it.
    In,
    /// Behind it.
    Behind,
}

impl Place {
    fn new(bound: Bound, is_passed: Option<bool>) -> Self {
        match (bound, is_passed) {
            (_, None) => Self::Unknown,
            (Bound::Start, Some(false)) => Self::Ahead,
            (Bound::Start, Some(true)) | (Bound::End, Some(false)) => Self::In,
            (Bound::End, Some(true)) => Self::Behind,
        }
    }

    /// What is to be done where it has been there for so long.
    fn judge(self, lasts: Duration, deadline: Duration) -> Verdict {
        match self {
            Self::Behind => Verdict::Over,
            Self::In if lasts > deadline => Verdict::Stalled,
            Self::Unknown if lasts > deadline.saturating_mul(UNANSWERED) => Verdict::Stalled,
            Self::Unknown if lasts >= MOMENT.min(deadline / 8) => Verdict::Ask,
            Self::Unknown | Self::Ahead | Self::In => Verdict::Wait,
        }
    }
}

/// For how long the device is ahead of the collective of the oldest mark, or not known to be.
#[derive(Debug)]
pub(super) struct CollectiveStall {
    stall: Stall<Option<(Epoch, bool)>>,
    inquiry: Option<Inquiry>,
}

impl CollectiveStall {
    pub(super) fn new() -> Self {
        Self { stall: Stall::new(), inquiry: None }
    }

    /// Looks at the oldest mark of a collective that the device comes to next, or is in.
    pub(super) fn look(&mut self, mark: Option<Mark>, deadline: Duration, now: Instant) -> Verdict {
        let known = self.stall.at().copied().flatten().map(|(epoch, _)| epoch);
        if mark.as_ref().map(|mark| mark.epoch) != known {
            self.inquiry = None;
        }
        let Some(mark) = mark else {
            self.stall.lasts(None, deadline, now);
            return Verdict::Wait;
        };
        let answer = self.inquiry.as_ref().and_then(Inquiry::answer);
        // What is not enqueued is not passed.
        let is_passed = if mark.recorded { answer } else { Some(false) };
        let place = Place::new(mark.bound, is_passed);
        // Until the driver has said that the device is ahead of it, it counts as in it.
        let at = Some((mark.epoch, place == Place::Ahead));
        let verdict = place.judge(self.stall.lasts(at, deadline, now), deadline);
        if verdict == Verdict::Ask && self.inquiry.is_none() {
            self.inquiry = Some(Inquiry::new(move || mark.is_passed()));
        }
        verdict
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lateness::assert_soon;
    use std::sync::atomic::AtomicU32;

    const SECOND: Duration = Duration::from_secs(1);

    /// Call by call what kernels and side streams have stamped.
    #[test]
    fn a_collective_is_over_by_its_own_stamp_or_one_of_a_later_call() {
        for first in [7, u32::MAX - 1] {
            let call = |n: u32| Epoch::new(first.wrapping_add(n));
            let past = |bound, closed: u32, rounds: u32, made: u32| {
                let stamps =
                    Stamps { closed: call(closed), rounds: call(rounds), made: call(made) };
                stamps.are_past(call(1), bound)
            };
            // The kernel behind a gather ends after it, that ahead of a sum before it.
            assert!(!past(Bound::Start, 0, 0, 1) && past(Bound::Start, 1, 0, 1));
            assert!(!past(Bound::End, 0, 0, 1) && !past(Bound::End, 1, 0, 1));
            assert!(!past(Bound::End, 1, 0, 9) && past(Bound::End, 2, 0, 9));
            // Messages of a later call begin after it.
            assert!(past(Bound::End, 1, 2, 2) && past(Bound::Start, 0, 3, 3));
            // Stamps of calls that are long over say nothing, however old they are.
            for old in [1_u32 << 30, 1 << 31, u32::MAX - 9] {
                let old = 0_u32.wrapping_sub(old).wrapping_sub(20);
                assert!(!past(Bound::End, 1, old, 5) && !past(Bound::Start, old, 0, 5));
                assert!(!past(Bound::End, old, old, 5));
            }
        }
    }

    /// Verdicts where answers of the driver are seen after so many eighths of the deadline, in each
    /// of which the thread looks.
    fn verdicts(bound: Bound, answers: &[(u32, Option<bool>)]) -> Vec<Verdict> {
        let (start, mut stall) = (Instant::now(), Stall::new());
        let (mut at, mut looked) = (Place::Unknown, answers[0].0);
        let judged = |&(after, is_passed): &(u32, Option<bool>)| {
            let mut lasts = |place, eighths| {
                stall.lasts(place == Place::Ahead, SECOND, start + eighths * (SECOND / 8))
            };
            for eighths in looked..after {
                lasts(at, eighths);
            }
            (at, looked) = (Place::new(bound, is_passed), after);
            at.judge(lasts(at, after), SECOND)
        };
        answers.iter().map(judged).collect()
    }

    #[test]
    fn a_gather_is_timed_from_when_the_device_has_come_to_it() {
        use Verdict::{Ask, Stalled, Wait};
        let (not_yet, passed) = (Some(false), Some(true));
        let seen = [(0, None), (1, None), (2, not_yet), (800, not_yet), (801, passed)];
        assert_eq!(verdicts(Bound::Start, &seen), [Wait, Ask, Wait, Wait, Wait]);
        let seen = [(801, passed), (809, passed), (810, passed)];
        assert_eq!(verdicts(Bound::Start, &seen), [Wait, Wait, Stalled]);
        // The moment before the first answer counts.
        let seen = [(0, None), (1, None), (2, passed), (8, passed), (9, passed)];
        assert_eq!(verdicts(Bound::Start, &seen), [Wait, Ask, Wait, Wait, Stalled]);
    }

    #[test]
    fn a_sum_is_timed_until_its_end_is_seen() {
        use Verdict::{Ask, Over, Stalled, Wait};
        let (not_yet, passed) = (Some(false), Some(true));
        let seen = [(0, None), (2, None), (3, not_yet), (8, not_yet), (9, not_yet)];
        assert_eq!(verdicts(Bound::End, &seen), [Wait, Ask, Wait, Wait, Stalled]);
        assert_eq!(verdicts(Bound::End, &[(0, not_yet), (8, passed)]), [Wait, Over]);
    }

    /// Another thread waits in the driver for room on the stream.
    #[test]
    fn a_driver_that_does_not_answer_is_not_waited_for_for_ever() {
        use Verdict::{Ask, Stalled, Wait};
        for bound in [Bound::Start, Bound::End] {
            let seen = [(0, None), (16, None), (17, None)];
            assert_eq!(verdicts(bound, &seen), [Wait, Ask, Stalled]);
        }
    }

    #[test]
    fn the_driver_is_asked_until_it_says_so_or_nobody_wants_to_know() {
        let asked = Arc::new(AtomicU32::new(0));
        let third = {
            let asked = Arc::clone(&asked);
            move || Ok(asked.fetch_add(1, Ordering::AcqRel) == 2)
        };
        let (inquiry, began) = (Inquiry::new(third), Instant::now());
        while inquiry.answer() != Some(true) {
            assert_soon(began.elapsed(), Duration::from_mins(1));
            std::thread::yield_now();
        }
        assert_eq!(asked.load(Ordering::Acquire), 3);
        let (asking, until_it_ends) = std::sync::mpsc::channel::<()>();
        let never = move || {
            let _asking = &asking;
            Ok(false)
        };
        drop(Inquiry::new(never));
        until_it_ends.recv().unwrap_err();
    }
}
