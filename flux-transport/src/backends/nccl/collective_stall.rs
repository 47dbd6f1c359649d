//! Whether the collective of a sequential call has exceeded the deadline.
//!
//! Invariant: the driver is asked for a mark that stays the oldest for a moment, by a
//! [thread](Inquiry) that may wait there. Whoever judges never waits for the driver.

use super::marks::{Bound, Mark};
use super::progress::Stall;
use flux_core::signal::Epoch;
use flux_cuda::CudaError;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

/// How long a mark is the oldest before the driver is asked: longer than collectives take.
const MOMENT: Duration = Duration::from_millis(250);
/// Between two questions to the driver.
const AGAIN: Duration = Duration::from_millis(10);
/// Deadlines after which an answer is not waited for any more: the driver waits for the device.
const UNANSWERED: u32 = 2;

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
