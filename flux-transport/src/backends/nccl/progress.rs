//! Where a side stream stands, in a word of pinned memory that the stream itself writes.
//!
//! Invariant: the host only loads, so it finds and describes a stuck stream without the driver,
//! which might wait for it. Beside a kernel each step of a call takes at most the kernel's own
//! deadline and what the kernel computes before: [`ALLOWED`] deadlines. A collective that no kernel
//! waits for takes one.

use crate::cuda::{CudaDevice, CudaError, PinnedBlock};
use flux_core::signal::Epoch;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Deadlines that one step may take: that of the kernel's wait for it, and as long for what the
/// kernel does before.
const ALLOWED: u32 = 2;

/// What a side stream has done of a call. Rounds whose messages go together share their steps,
/// which are called after the last.
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
pub(super) struct Position(u32);

impl Position {
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

    /// As the stream writes it.
    pub(super) const fn word(self) -> u32 {
        self.0
    }

    /// Whether the stream is between calls.
    pub(super) const fn has_ended(self) -> bool {
        self.0 & 0xffff == Self::ENDED
    }

    /// Whether the call is in its collective, which no kernel waits for.
    pub(super) const fn is_collective(self) -> bool {
        self.0 & 0xffff == Self::COLLECTIVE
    }

    /// The call's number, where no later one than `last` was made.
    pub(super) const fn epoch(self, last: Epoch) -> Epoch {
        last.before(last.get().wrapping_sub(self.0 >> 16) & 0xffff)
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (call, step) = (self.0 >> 16, self.0 & 0xffff);
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

/// The word.
#[derive(Debug)]
pub(super) struct Progress {
    block: PinnedBlock,
}

impl Progress {
    /// Of a stream that has been given nothing.
    pub(super) fn new(device: &CudaDevice) -> Result<Self, CudaError> {
        let this = Self { block: PinnedBlock::new(device, size_of::<u32>())? };
        this.atomic().store(Position::new(Epoch::new(0), Step::Ended).word(), Ordering::Relaxed);
        Ok(this)
    }

    /// For the stream.
    pub(super) fn address(&self) -> u64 {
        self.block.address()
    }

    /// Where the stream stands.
    pub(super) fn position(&self) -> Position {
        Position(self.atomic().load(Ordering::Acquire))
    }

    fn atomic(&self) -> &AtomicU32 {
        // SAFETY: the block is a page or more, and lives as long as `self`; the device writes whole
        // words.
        unsafe { AtomicU32::from_ptr(self.block.host().cast()) }
    }
}

/// For how long a stream has stood where it stands.
#[derive(Debug)]
pub(super) struct Standing {
    position: Position,
    since: Instant,
    deadline: Duration,
}

impl Standing {
    pub(super) fn new(position: Position, deadline: Duration, now: Instant) -> Self {
        Self { position, since: now, deadline }
    }

    /// Whether it stands in a call for too long.
    pub(super) fn too_long(&mut self, position: Position, now: Instant) -> bool {
        if position.has_ended() || position != self.position {
            (self.position, self.since) = (position, now);
            return false;
        }
        let allowed = if position.is_collective() { 1 } else { ALLOWED };
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
        let at = |step| Position::new(Epoch::new(7), step);
        let mut standing = Standing::new(at(Step::Ended), SECOND, start);
        assert!(!standing.too_long(at(Step::Ended), start + 100 * SECOND));
        assert!(!standing.too_long(at(Step::Begun), start + 101 * SECOND));
        assert!(!standing.too_long(at(Step::Begun), start + 103 * SECOND));
        assert!(!standing.too_long(at(Step::Messages(0)), start + 104 * SECOND), "it took a step");
        assert!(!standing.too_long(at(Step::Messages(0)), start + 106 * SECOND));
        assert!(standing.too_long(at(Step::Messages(0)), start + 107 * SECOND));
        assert!(!standing.too_long(at(Step::Collective), start + 108 * SECOND));
        assert!(!standing.too_long(at(Step::Collective), start + 109 * SECOND));
        assert!(
            standing.too_long(at(Step::Collective), start + 110 * SECOND),
            "no kernel waits beside it, and names who is late in time"
        );
    }

    #[test]
    fn a_position_says_what_is_missing() {
        let text = |step| Position::new(Epoch::new(0x1_0031), step).to_string();
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
            let positions = steps.map(|step| Position::new(epoch, step));
            prop_assert!(positions.windows(2).all(|pair| pair[0].word() < pair[1].word()));
            for (position, step) in positions.into_iter().zip(steps) {
                prop_assert_eq!(position.epoch(last), epoch);
                prop_assert_eq!(position.has_ended(), step == Step::Ended);
            }
        }
    }
}
