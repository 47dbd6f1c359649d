//! What the guard's thread shares with the rank's calls.
//!
//! Invariant: whatever ended this rank's calls without a record on the device has a record here before any wait ends by it, so whoever finds the stream past a
//! failed call also finds the fault.

use super::flags::Flags;
use super::link::Link;
use super::outbox::{Outbox, RELEASE};
use super::progress::{Place, Progress, Standing};
use crate::TransportError;
use crate::cuda::{CudaDevice, CudaError, look};
use crate::fault::reason;
use crate::nvlink::FaultBlock;
use flux_core::Rank;
use flux_core::layout::{FaultRecord, fault};
use flux_core::signal::Epoch;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Deadlines that a kernel may take when its side stream has nothing left to do for it: all that it waits for is there then, and it computes.
const COMPUTING: u32 = 4;

/// A rank's communicator, its fault, and how far its side stream is.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) link: Link,
    pub(crate) fault: FaultBlock,
    pub(super) rank: Rank,
    pub(super) deadline: Duration,
    pub(super) device: CudaDevice,
    pub(super) stop: AtomicBool,
    pub(super) progress: Progress,
    failed: OnceLock<FaultRecord>,
    awaited: Mutex<Awaited>,
}

/// The flags in use, and the call that waits for them.
#[derive(Debug)]
struct Awaited {
    flags: Option<Arc<Flags>>,
    epoch: Epoch,
}

impl Watched {
    pub(crate) fn new(device: &CudaDevice, rank: Rank, link: Link, deadline: Duration) -> Result<Self, CudaError> {
        Ok(Self {
            link,
            fault: FaultBlock::new(device)?,
            rank,
            deadline,
            device: device.clone(),
            stop: AtomicBool::new(false),
            progress: Progress::new(device)?,
            failed: OnceLock::new(),
            awaited: Mutex::new(Awaited { flags: None, epoch: Epoch::new(0) }),
        })
    }

    fn awaited(&self) -> MutexGuard<'_, Awaited> {
        // Replaced as a whole.
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What calls from now on wait for: flags of `at`, raised with `epoch` and later ones.
    pub(crate) fn await_flags(&self, at: &Outbox, epoch: Epoch) {
        *self.awaited() = Awaited { flags: Some(Arc::clone(at.flags())), epoch };
    }

    /// This rank's record, or what stands for an error of NCCL or a side stream that stands still.
    pub(crate) fn record(&self) -> Option<FaultRecord> {
        // What was found here first has set the abort word, of which kernels then leave records.
        self.failed.get().copied().or_else(|| self.fault.record())
    }

    /// Where the side stream stands.
    pub(super) fn place(&self) -> Place {
        self.progress.place()
    }

    /// Where the side stream stands, in words.
    pub(crate) fn progress(&self) -> String {
        self.place().to_string()
    }

    /// Whether calls can no longer succeed.
    fn has_failed(&self) -> bool {
        self.record().is_some() || self.fault.aborted()
    }

    /// Whether calls can no longer succeed; NCCL is asked, too, if `ask`.
    pub(super) fn look(&self, ask: bool) -> bool {
        if self.has_failed() {
            return true;
        }
        if !ask {
            return false;
        }
        let Err(error) = self.link.is_ready() else { return false };
        tracing::error!(rank = self.rank.get(), %error, "messages of NCCL have failed");
        let (rank, epoch) = (self.rank.get(), self.awaited().epoch.get());
        let record = FaultRecord { state: 1, code: fault::ABORTED, rank, peer: rank, epoch, abort: reason::NCCL, ..FaultRecord::default() };
        self.fail(record);
        true
    }

    /// Whether the side stream is stuck in a call: a fault where no kernel waits for it.
    pub(super) fn stands_still(&self, standing: &mut Standing) -> bool {
        let place = self.place();
        if !standing.too_long(place, Instant::now()) {
            return false;
        }
        tracing::error!(rank = self.rank.get(), "a call does not go on: {place}");
        let (rank, epoch) = (self.rank.get(), place.epoch(self.awaited().epoch));
        let (expected, seen) = (epoch.get(), epoch.before(1).get());
        let record = FaultRecord {
            state: 1,
            code: fault::TIMEOUT,
            wait: fault::PUSHED,
            rank,
            peer: rank,
            epoch: expected,
            expected,
            seen,
            ..FaultRecord::default()
        };
        self.fail(record);
        true
    }

    fn fail(&self, record: FaultRecord) {
        let _ = self.failed.set(record);
        self.fault.abort(reason::NCCL);
    }

    /// Lets go of what the side stream waits for, without the driver.
    pub(super) fn release(&self) {
        // Held while they are set: whoever replaces them has the old ones to itself.
        let Awaited { flags, epoch } = &*self.awaited();
        if let Some(flags) = flags {
            flags.set(epoch.get().wrapping_add(RELEASE));
        }
    }

    /// Waits until calls are `done`, the last of which has number `last`. A device that works is waited for as long as it takes; once calls have failed, for
    /// the deadline; and for some deadlines more than once the side stream has nothing left to do for them.
    pub(crate) fn drain(&self, last: Epoch, mut done: impl FnMut() -> Result<bool, CudaError>) -> Result<(), TransportError> {
        let mut limits = Limits::default();
        let drained = look(|now| {
            if done()? {
                return Ok::<_, CudaError>(Some(true));
            }
            let failed = self.has_failed().then_some(self.deadline);
            let ended = self.place().has_ended_call(last).then_some(self.deadline.saturating_mul(COMPUTING));
            Ok(limits.are_over(failed, ended, now).then_some(false))
        })?;
        if drained {
            return Ok(());
        }
        tracing::warn!(rank = self.rank.get(), "earlier calls do not end: {}", self.place());
        Err(TransportError::NotDrained)
    }
}

/// Until when something is waited for that has no end of its own, each from when it was first said to need one.
#[derive(Clone, Copy, Debug, Default)]
struct Limits {
    failed: Option<Instant>,
    ended: Option<Instant>,
}

impl Limits {
    fn are_over(&mut self, failed: Option<Duration>, ended: Option<Duration>, now: Instant) -> bool {
        for (limit, allowed) in [(&mut self.failed, failed), (&mut self.ended, ended)] {
            *limit = allowed.map(|allowed| limit.unwrap_or(now + allowed));
        }
        [self.failed, self.ended].into_iter().flatten().any(|limit| now >= limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_works_is_waited_for_and_what_has_failed_for_the_deadline() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut limits = Limits::default();
        let mut over = |failed: bool, ended: bool, after: u32| {
            limits.are_over(failed.then_some(second), ended.then_some(4 * second), start + after * second)
        };
        assert!(!over(false, false, 1000));
        assert!(!over(false, true, 1001));
        assert!(!over(false, true, 1004));
        assert!(!over(false, false, 1006), "the stream was given more");
        assert!(!over(true, true, 1007));
        assert!(over(true, true, 1008));
        let mut limits = Limits::default();
        assert!(!limits.are_over(None, Some(4 * second), start));
        assert!(limits.are_over(None, Some(4 * second), start + 4 * second), "a kernel that does not end, without a fault");
    }
}
