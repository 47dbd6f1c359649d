//! Where a rank's calls stand: in a word of pinned memory that streams write, and in the stamp that
//! the kernel of a sequential call leaves in the fault block.
//!
//! Invariant: the host only loads, so it finds and describes a stuck stream without the driver,
//! which might wait for it. Beside a kernel each step of a call takes at most the kernel's own
//! deadline and what the kernel computes before: [`ALLOWED`] deadlines. A collective that no kernel
//! waits for takes one, from when the device has come to it.

use flux_core::signal::Epoch;
use flux_cuda::{CudaDevice, CudaError, PinnedBlock, WordOp};
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Deadlines that one step may take: that of the kernel's wait for it, and as long for what the
/// kernel does before.
const ALLOWED: u32 = 2;

/// What has been done of a call. Rounds whose messages go together share their steps, which are
/// called after the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The caller's stream has come to the call.
    Begun,
    /// The caller's stream has come to the collective of a sequential call.
    Collective,
    /// The kernel has stored and announced what this round sends, and those that it goes with.
    Flag(usize),
    /// The round's messages have gone and come, and what came is announced.
    Messages(usize),
    /// There is nothing left to do.
    Ended,
}

/// A call, by the low half of its number, and a step of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Progress(u32);

impl Progress {
    const ENDED: u32 = 0xffff;
    const COLLECTIVE: u32 = Self::ENDED - 1;

    pub(super) fn new(epoch: Epoch, step: Step) -> Self {
        let of_round = |position: usize, round: usize| {
            u32::try_from(position + 2 * round).unwrap_or(u32::MAX).min(Self::COLLECTIVE - 1)
        };
        let step = match step {
            Step::Begun => 0,
            Step::Flag(round) => of_round(1, round),
            Step::Messages(round) => of_round(2, round),
            Step::Collective => Self::COLLECTIVE,
            Step::Ended => Self::ENDED,
        };
        Self(epoch.get() << 16 | step)
    }

    const fn step(self) -> u32 {
        self.0 & 0xffff
    }

    /// Whether the calls that were begun are done.
    pub(super) const fn has_ended(self) -> bool {
        self.step() == Self::ENDED
    }

    /// Whether the call is in its collective, which no kernel waits for.
    pub(super) const fn is_collective(self) -> bool {
        self.step() == Self::COLLECTIVE
    }

    /// The call's number, where no later one than `last` was made.
    pub(super) const fn epoch(self, last: Epoch) -> Epoch {
        last.before(last.get().wrapping_sub(self.0 >> 16) & 0xffff)
    }

    /// With what kernels have stamped: that of a sequential call has closed call `closed`, behind
    /// the collective that it needs, or ahead of that which takes its sums. No later call than
    /// `last` was made. A stamp that is older than the streams' word says nothing.
    fn with_closed(self, closed: Epoch, last: Epoch) -> Self {
        let epoch = self.epoch(last);
        let ahead = closed.get().wrapping_sub(epoch.get());
        if !(self.has_ended() || self.is_collective())
            || ahead > last.get().wrapping_sub(epoch.get())
        {
            self
        } else if ahead == 0 {
            Self::new(epoch, Step::Ended)
        } else {
            Self::new(closed, Step::Collective)
        }
    }
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (call, step) = (self.0 >> 16, self.step());
        let round = step.saturating_sub(1) / 2;
        match step {
            Self::ENDED => write!(f, "the side stream is past all of call {call}"),
            0 => write!(f, "the side stream has begun call {call} and is past nothing of it"),
            Self::COLLECTIVE => {
                write!(f, "the stream has come to the collective of call {call} and is not past it")
            }
            _ if step % 2 == 1 => {
                write!(
                    f,
                    "the side stream is past the kernel's flag of round {round} of call {call}, \
                     not past its messages"
                )
            }
            _ => {
                write!(f, "the side stream is past round {round} of call {call}, not past the next")
            }
        }
    }
}

/// The word of the streams.
#[derive(Debug)]
pub(super) struct ProgressWord(PinnedBlock);

impl ProgressWord {
    /// Of a rank whose first call is `epoch`.
    pub(super) fn new(device: &CudaDevice, epoch: Epoch) -> Result<Self, CudaError> {
        let this = Self(PinnedBlock::new(device, size_of::<u32>())?);
        let ended = Progress::new(epoch.before(1), Step::Ended);
        this.atomic().store(ended.0, Ordering::Relaxed);
        Ok(this)
    }

    /// What has a stream note that call `epoch` is past `step`.
    pub(super) fn note(&self, epoch: Epoch, step: Step) -> WordOp {
        WordOp::Write { address: self.0.address(), value: Progress::new(epoch, step).0 }
    }

    /// Where the calls stand; `closed` and `last` are read behind the word, as they are at least
    /// as far.
    pub(super) fn read(
        &self,
        closed: impl FnOnce() -> Epoch,
        last: impl FnOnce() -> Epoch,
    ) -> Progress {
        let word = Progress(self.atomic().load(Ordering::Acquire));
        let closed = closed();
        word.with_closed(closed, last())
    }

    fn atomic(&self) -> &AtomicU32 {
        // SAFETY: the block is a page or more, and lives as long as `self`; the device writes whole
        // words.
        unsafe { AtomicU32::from_ptr(self.0.host().cast()) }
    }
}

/// For how long the calls have stood where they stand.
#[derive(Debug)]
pub(super) struct Stall {
    at: Progress,
    since: Instant,
    deadline: Duration,
}

impl Stall {
    pub(super) fn new(at: Progress, deadline: Duration, now: Instant) -> Self {
        Self { at, since: now, deadline }
    }

    /// Whether they stand in a call for too long.
    pub(super) fn is_too_long(&mut self, at: Progress, now: Instant) -> bool {
        if at.has_ended() || at != self.at {
            (self.at, self.since) = (at, now);
            return false;
        }
        let allowed = if at.is_collective() { 1 } else { ALLOWED };
        now.duration_since(self.since) > self.deadline.saturating_mul(allowed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_stream_that_takes_no_step_in_a_call_is_found_and_one_between_calls_is_not() {
        let start = Instant::now();
        let at = |step| Progress::new(Epoch::new(7), step);
        let mut stall = Stall::new(at(Step::Ended), SECOND, start);
        assert!(!stall.is_too_long(at(Step::Ended), start + 100 * SECOND));
        assert!(!stall.is_too_long(at(Step::Begun), start + 101 * SECOND));
        assert!(!stall.is_too_long(at(Step::Begun), start + 103 * SECOND));
        assert!(!stall.is_too_long(at(Step::Messages(0)), start + 104 * SECOND), "it took a step");
        assert!(!stall.is_too_long(at(Step::Messages(0)), start + 106 * SECOND));
        assert!(stall.is_too_long(at(Step::Messages(0)), start + 107 * SECOND));
        assert!(!stall.is_too_long(at(Step::Collective), start + 108 * SECOND));
        assert!(!stall.is_too_long(at(Step::Collective), start + 109 * SECOND));
        assert!(
            stall.is_too_long(at(Step::Collective), start + 110 * SECOND),
            "no kernel waits beside it, and names who is late in time"
        );
    }

    #[test]
    fn a_position_says_what_is_missing() {
        let text = |step| Progress::new(Epoch::new(0x1_0031), step).to_string();
        assert_eq!(
            text(Step::Begun),
            "the side stream has begun call 49 and is past nothing of it"
        );
        assert_eq!(
            text(Step::Flag(0)),
            "the side stream is past the kernel's flag of round 0 of call 49, not past its messages"
        );
        assert_eq!(
            text(Step::Messages(2)),
            "the side stream is past round 2 of call 49, not past the next"
        );
        assert_eq!(
            text(Step::Collective),
            "the stream has come to the collective of call 49 and is not past it"
        );
        assert_eq!(text(Step::Ended), "the side stream is past all of call 49");
    }

    /// Call by call what the stream has written and kernels have stamped.
    #[test]
    fn a_kernels_stamp_says_where_the_collective_of_its_call_is() {
        for first in [7, u32::MAX - 1] {
            let call = |n: u32| Epoch::new(first.wrapping_add(n));
            let at = |word: (u32, Step), closed: u32, last: u32| {
                Progress::new(call(word.0), word.1).with_closed(call(closed), call(last))
            };
            let is = |n: u32, step| Progress::new(call(n), step);
            // Gathers: the stream notes the collective, the kernel behind it that it is past.
            assert_eq!(at((1, Step::Collective), 0, 3), is(1, Step::Collective));
            assert_eq!(at((1, Step::Collective), 1, 3), is(1, Step::Ended));
            // Sums: the kernel stamps that the collective begins, the stream that it is past.
            assert_eq!(at((1, Step::Ended), 1, 3), is(1, Step::Ended));
            assert_eq!(at((1, Step::Ended), 2, 3), is(2, Step::Collective));
            assert_eq!(at((2, Step::Ended), 2, 3), is(2, Step::Ended));
            // Sums behind a gather.
            assert_eq!(at((2, Step::Collective), 3, 3), is(3, Step::Collective));
            // Messages beside a kernel stamp nothing, however many calls there are of them.
            assert_eq!(at((9, Step::Messages(1)), 2, 9), is(9, Step::Messages(1)));
            for calls in [3, 40_000, 70_000, 1 << 31] {
                assert_eq!(at((calls, Step::Ended), 2, calls), is(calls, Step::Ended));
            }
        }
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
                Step::Flag(round),
                Step::Messages(round),
                Step::Flag(round + 1),
                Step::Collective,
                Step::Ended,
            ];
            let positions = steps.map(|step| Progress::new(epoch, step));
            prop_assert!(positions.windows(2).all(|pair| pair[0].0 < pair[1].0));
            for (position, step) in positions.into_iter().zip(steps) {
                prop_assert_eq!(position.epoch(last), epoch);
                prop_assert_eq!(position.has_ended(), step == Step::Ended);
            }
        }
    }
}
