//! Where a rank's calls stand. Side streams write it to a word of pinned memory, and the kernel of a
//! sequential call stamps it in the fault block.
//!
//! Invariant: the host only loads, so it finds and describes a stuck stream without the driver,
//! which might wait for it. Beside a kernel each step of a call takes at most the kernel's own
//! deadline and what the kernel computes before: [`ALLOWED`] deadlines.

use flux_core::signal::Epoch;
use flux_cuda::{CudaDevice, CudaError, PinnedBlock, WordOp};
use std::fmt;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Deadlines that one step may take: that of the kernel's wait for it, and as long for what the
/// kernel does before.
const ALLOWED: u32 = 2;

/// What has been done of a call. Rounds whose messages go together share a step, which is called
/// after the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The caller's stream has come to the call.
    Begun,
    /// The round's messages have gone and come, and what came is announced.
    Messages(usize),
    /// The kernel of a sequential call has ended, behind what is gathered or ahead of a sum.
    Closed,
    /// There is nothing left to do.
    Ended,
}

/// A call, by the low half of its number, and a step of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Progress(u32);

impl Progress {
    const ENDED: u32 = 0xffff;
    const CLOSED: u32 = Self::ENDED - 1;

    pub(super) fn new(epoch: Epoch, step: Step) -> Self {
        let step = match step {
            Step::Begun => 0,
            Step::Messages(round) => {
                u32::try_from(round + 1).unwrap_or(u32::MAX).min(Self::CLOSED - 1)
            }
            Step::Closed => Self::CLOSED,
            Step::Ended => Self::ENDED,
        };
        Self(epoch.get() << 16 | step)
    }

    const fn step(self) -> u32 {
        self.0 & 0xffff
    }

    /// Whether nothing is left to do of its call but, perhaps, a collective.
    pub(super) const fn has_ended(self) -> bool {
        self.step() >= Self::CLOSED
    }

    /// The call's number, where no later one than `last` was made.
    pub(super) const fn epoch(self, last: Epoch) -> Epoch {
        last.before(last.get().wrapping_sub(self.0 >> 16) & 0xffff)
    }
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (call, step) = (self.0 >> 16, self.step());
        match step {
            Self::ENDED => write!(f, "the side stream is past all of call {call}"),
            Self::CLOSED => write!(f, "the kernel of call {call} has ended"),
            0 => write!(f, "the side stream has begun call {call} and is past nothing of it"),
            _ => write!(
                f,
                "the side stream is past round {} of call {call}, not past the next",
                step - 1
            ),
        }
    }
}

/// The word of the side streams.
#[derive(Debug)]
pub(super) struct ProgressWord(PinnedBlock);

impl ProgressWord {
    /// Of a rank whose first call is `epoch`.
    pub(super) fn new(device: &CudaDevice, epoch: Epoch) -> Result<Self, CudaError> {
        let this = Self(PinnedBlock::new(device, size_of::<u32>())?);
        let ended = Progress::new(epoch.before(1), Step::Ended);
        this.0.word(0).store(ended.0, Ordering::Relaxed);
        Ok(this)
    }

    /// What has a stream note that call `epoch` is past `step`.
    pub(super) fn note(&self, epoch: Epoch, step: Step) -> WordOp {
        WordOp::Write { address: self.0.address(), value: Progress::new(epoch, step).0 }
    }

    /// Where the side streams stand.
    pub(super) fn read(&self) -> Progress {
        Progress(self.0.word(0).load(Ordering::Acquire))
    }
}

/// Looks in a deadline at least. What lies between two counts for no more than its part: a host
/// that was stopped has not seen whether anything moved, and nobody else is to blame for it.
const LOOKS: u32 = 8;

/// For how long something has been seen to stand where it stands.
#[derive(Debug)]
pub(super) struct Stall<P> {
    at: Option<P>,
    lasts: Duration,
    looked: Instant,
}

impl<P: PartialEq> Stall<P> {
    pub(super) fn new() -> Self {
        Self { at: None, lasts: Duration::ZERO, looked: Instant::now() }
    }

    /// How long it has been seen there, where that may last for `deadline`.
    pub(super) fn lasts(&mut self, at: P, deadline: Duration, now: Instant) -> Duration {
        let since = now.saturating_duration_since(std::mem::replace(&mut self.looked, now));
        if self.at.as_ref() == Some(&at) {
            self.lasts += since.min(deadline / LOOKS);
        } else {
            (self.at, self.lasts) = (Some(at), Duration::ZERO);
        }
        self.lasts
    }

    pub(super) const fn at(&self) -> Option<&P> {
        self.at.as_ref()
    }
}

impl Stall<Progress> {
    /// Whether calls of this deadline stand in one for too long.
    pub(super) fn is_too_long(&mut self, at: Progress, deadline: Duration, now: Instant) -> bool {
        self.lasts(at, deadline, now) > deadline.saturating_mul(ALLOWED) && !at.has_ended()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_stream_that_takes_no_step_in_a_call_is_found_and_one_between_calls_is_not() {
        let (start, mut stall) = (Instant::now(), Stall::new());
        let mut look = |step, looks: u32| {
            let now = start + looks * (SECOND / LOOKS);
            stall.is_too_long(Progress::new(Epoch::new(7), step), SECOND, now)
        };
        // Somebody looks all the time.
        let (mut last, mut looks) = (Step::Ended, 0);
        let mut at = |step, after: u32| {
            (looks..after * LOOKS).for_each(|at| _ = look(last, at));
            (last, looks) = (step, after * LOOKS);
            look(step, looks)
        };
        assert!(!at(Step::Ended, 0) && !at(Step::Ended, 100));
        assert!(!at(Step::Begun, 101) && !at(Step::Begun, 103));
        assert!(!at(Step::Messages(0), 104), "it took a step");
        assert!(!at(Step::Messages(0), 106));
        assert!(at(Step::Messages(0), 107));
    }

    #[test]
    fn a_host_that_was_stopped_has_not_seen_a_stream_stand_still_meanwhile() {
        let (start, mut stall) = (Instant::now(), Stall::new());
        let mut lasts = |after: Duration| stall.lasts((), SECOND, start + after);
        assert_eq!(lasts(SECOND), Duration::ZERO);
        assert_eq!(lasts(SECOND + SECOND / 10), SECOND / 10);
        let stopped = lasts(100 * SECOND);
        assert_eq!(stopped, SECOND / 10 + SECOND / LOOKS);
        assert_eq!(lasts(100 * SECOND + SECOND / 10), stopped + SECOND / 10);
    }

    #[test]
    fn a_position_says_what_is_missing() {
        let text = |step| Progress::new(Epoch::new(0x1_0031), step).to_string();
        assert_eq!(
            text(Step::Begun),
            "the side stream has begun call 49 and is past nothing of it"
        );
        assert_eq!(
            text(Step::Messages(2)),
            "the side stream is past round 2 of call 49, not past the next"
        );
        assert_eq!(text(Step::Closed), "the kernel of call 49 has ended");
        assert_eq!(text(Step::Ended), "the side stream is past all of call 49");
    }

    proptest! {
        #[test]
        fn positions_of_a_call_differ_and_name_it(
            epoch: u32,
            behind in 0..0x1_0000_u32,
            round in 0..5000_usize,
        ) {
            let (epoch, last) = (Epoch::new(epoch), Epoch::new(epoch.wrapping_add(behind)));
            let steps = [
                Step::Begun,
                Step::Messages(round),
                Step::Messages(round + 1),
                Step::Closed,
                Step::Ended,
            ];
            let positions = steps.map(|step| Progress::new(epoch, step));
            prop_assert!(positions.windows(2).all(|pair| pair[0].0 < pair[1].0));
            for (position, step) in positions.into_iter().zip(steps) {
                prop_assert_eq!(position.epoch(last), epoch);
                let ends = matches!(step, Step::Closed | Step::Ended);
                prop_assert_eq!(position.has_ended(), ends);
            }
        }
    }
}
