//! Events that bound the collectives of sequential calls, for whom no kernel waits.
//!
//! Invariant: a mark is noted before anything of its collective is enqueued, so the oldest open
//! mark is that of the collective that the device comes to next, or is in. Nobody asks the driver
//! under the lock. A gather has its mark at its start, as the kernel behind it stamps its end. A
//! sum has it at its end, as the kernel ahead stamps its start: the event that ends its call.
//!
//! Calls in good order are followed by stamps alone. The driver is asked for a mark that stays the
//! oldest for a moment, by a [thread](Inquiry) that may wait there.

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

/// For how long the device has been in the collective of the oldest mark.
#[derive(Debug)]
pub(super) struct CollectiveStall {
    deadline: Duration,
    of: Option<Epoch>,
    since: Instant,
    /// When something was known of the mark, if not by now.
    known: Instant,
    /// When the device was first seen in the collective.
    begun: Option<Instant>,
    inquiry: Option<Inquiry>,
}

impl CollectiveStall {
    pub(super) fn new(deadline: Duration) -> Self {
        let now = Instant::now();
        Self { deadline, of: None, since: now, known: now, begun: None, inquiry: None }
    }

    /// Looks at the oldest mark of a collective that the device comes to next, or is in.
    pub(super) fn look(&mut self, mark: Option<Mark>, now: Instant) -> Verdict {
        let Some(mark) = mark else {
            (self.of, self.inquiry) = (None, None);
            return Verdict::Wait;
        };
        let asked = self.inquiry.as_ref();
        let passed = if mark.recorded { asked.and_then(Inquiry::answer) } else { Some(false) };
        let verdict = self.judge(mark.epoch, mark.bound, passed, now);
        if verdict == Verdict::Ask && self.inquiry.is_none() && mark.recorded {
            self.inquiry = Some(Inquiry::new(move || mark.is_passed()));
        }
        verdict
    }

    fn judge(
        &mut self,
        epoch: Epoch,
        bound: Bound,
        mut passed: Option<bool>,
        now: Instant,
    ) -> Verdict {
        if self.of != Some(epoch) {
            let begun = (bound == Bound::End).then_some(now);
            (self.of, self.since, self.known) = (Some(epoch), now, now);
            (self.begun, self.inquiry, passed) = (begun, None, None);
        }
        match (bound, passed) {
            (Bound::End, Some(true)) => return Verdict::Over,
            (Bound::Start, Some(true)) => self.begun = self.begun.or(Some(now)),
            _ => {}
        }
        let exceeds = |since: Instant, deadlines: u32| {
            now.duration_since(since) > self.deadline.saturating_mul(deadlines)
        };
        let is_stalled = match passed {
            Some(_) => self.begun.is_some_and(|begun| exceeds(begun, 1)),
            None => exceeds(self.known, UNANSWERED),
        };
        if passed.is_some() {
            self.known = now;
        }
        if is_stalled {
            Verdict::Stalled
        } else if now.duration_since(self.since) >= MOMENT.min(self.deadline / 8) {
            Verdict::Ask
        } else {
            Verdict::Wait
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lateness::assert_soon;
    use std::sync::atomic::AtomicU32;

    const SECOND: Duration = Duration::from_secs(1);
    const CALL: Epoch = Epoch::new(7);

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

    #[test]
    fn a_gather_is_timed_from_when_the_device_has_come_to_it() {
        let (start, mut stall) = (Instant::now(), CollectiveStall::new(SECOND));
        let mut at = |passed, after: u32| {
            stall.judge(CALL, Bound::Start, passed, start + after * (SECOND / 8))
        };
        assert_eq!(at(None, 0), Verdict::Wait);
        assert_eq!(at(None, 1), Verdict::Ask);
        assert_eq!(at(Some(false), 800), Verdict::Ask, "others hold up the stream");
        assert_eq!(at(Some(true), 801), Verdict::Ask);
        assert_eq!(at(Some(true), 809), Verdict::Ask);
        assert_eq!(at(Some(true), 810), Verdict::Stalled);
    }

    #[test]
    fn a_sum_is_timed_from_its_kernels_stamp_and_its_end_ends_that() {
        let (start, mut stall) = (Instant::now(), CollectiveStall::new(SECOND));
        let mut at = |call: Epoch, passed, after: u32| {
            stall.judge(call, Bound::End, passed, start + after * (SECOND / 8))
        };
        assert_eq!((at(CALL, None, 0), at(CALL, Some(false), 8)), (Verdict::Wait, Verdict::Ask));
        assert_eq!(at(CALL, Some(false), 9), Verdict::Stalled);
        assert_eq!(at(CALL, Some(true), 9), Verdict::Over);
        let next = CALL.next();
        assert_eq!(at(next, Some(true), 10), Verdict::Wait, "that was of the call before");
        assert_eq!(at(next, Some(false), 18), Verdict::Ask);
        assert_eq!(at(next, Some(false), 19), Verdict::Stalled);
    }

    /// Another thread waits in the driver for room on the stream.
    #[test]
    fn a_driver_that_does_not_answer_is_not_waited_for_for_ever() {
        let (start, mut stall) = (Instant::now(), CollectiveStall::new(SECOND));
        for bound in [Bound::Start, Bound::End] {
            let call = Epoch::new(bound as u32);
            let mut at = |after: u32| stall.judge(call, bound, None, start + after * SECOND);
            assert_eq!((at(0), at(2)), (Verdict::Wait, Verdict::Ask));
            assert_eq!(at(3), Verdict::Stalled);
            assert_eq!(stall.judge(call.before(9), bound, None, start), Verdict::Wait);
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
