//! What the guard's thread shares with the rank's calls.
//!
//! Invariant: a failure without a record on the device has a record here before any wait ends by
//! it. So a host that finds the stream past a failed call also finds the fault.

use super::flags::Flags;
use super::hashes::CallHashes;
use super::link::Link;
use super::outbox::Outbox;
use super::progress::{Position, Progress, Standing};
use crate::TransportError;
use crate::backends::calls::AHEAD;
use crate::backends::drain::{FAILED, HostSteps, Limits, failing};
use crate::backends::fault::reason;
use crate::backends::nvlink::FaultBlock;
use crate::cuda::{CudaDevice, CudaError, done_by};
use flux_core::Rank;
use flux_core::layout::{FaultRecord, fault};
use flux_core::signal::Epoch;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// For news of a peer that is gone to come to where NCCL has noticed: a closed connection's takes
/// milliseconds.
const NEWS: Duration = Duration::from_millis(400);

/// A rank's communicator, its fault, and how far its side stream is.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(super) link: Arc<Link>,
    pub(crate) fault: FaultBlock,
    pub(super) rank: Rank,
    pub(super) deadline: Duration,
    pub(super) device: CudaDevice,
    pub(super) stop: AtomicBool,
    pub(super) progress: Progress,
    failed: OnceLock<FaultRecord>,
    awaited: Mutex<Awaited>,
}

/// That messages of `rank`'s call `epoch` do not go on: for want of a rank of whom nothing has come
/// in it, and what came last, if there is one. No kernel has said so.
fn stuck(rank: Rank, epoch: Epoch, silent: Option<(Rank, Epoch)>) -> FaultRecord {
    let (wait, (peer, seen)) = match silent {
        Some(silent) => (fault::CALL, silent),
        None => (fault::PUSHED, (rank, epoch.before(1))),
    };
    let (rank, peer, expected, seen) = (rank.get(), peer.get(), epoch.get(), seen.get());
    FaultRecord {
        state: 1,
        code: fault::TIMEOUT,
        wait,
        rank,
        peer,
        epoch: expected,
        expected,
        seen,
        ..FaultRecord::default()
    }
}

/// What came first while a fault was waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum News {
    Fault,
    Stop,
    None,
}

/// Over a network NCCL sees that a peer is gone before this rank hears which; that is the fault
/// then, and known to all alike. So it is waited for.
fn news(longest: Duration, fault: impl Fn() -> bool, stop: impl Fn() -> bool) -> News {
    let Ok(_) = done_by(Instant::now() + longest, || Ok::<_, Infallible>(fault() || stop()));
    match (fault(), stop()) {
        (true, _) => News::Fault,
        (_, true) => News::Stop,
        _ => News::None,
    }
}

/// The flags in use, the call that waits for them, and what comes ahead of its chunks.
#[derive(Debug)]
struct Awaited {
    flags: Option<Arc<Flags>>,
    hashes: Option<Arc<CallHashes>>,
    epoch: Epoch,
}

impl Watched {
    pub(crate) fn new(
        device: &CudaDevice,
        rank: Rank,
        link: Arc<Link>,
        deadline: Duration,
    ) -> Result<Self, CudaError> {
        Ok(Self {
            link,
            fault: FaultBlock::new(device)?,
            rank,
            deadline,
            device: device.clone(),
            stop: AtomicBool::new(false),
            progress: Progress::new(device)?,
            failed: OnceLock::new(),
            awaited: Mutex::new(Awaited { flags: None, hashes: None, epoch: Epoch::new(0) }),
        })
    }

    fn awaited(&self) -> MutexGuard<'_, Awaited> {
        // Replaced as a whole.
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What calls from now on wait for: flags of `at`, raised with `epoch` and later ones.
    pub(crate) fn await_flags(&self, at: &Outbox, epoch: Epoch) {
        *self.awaited() = Awaited {
            flags: Some(Arc::clone(at.flags())),
            hashes: Some(Arc::clone(at.hashes())),
            epoch,
        };
    }

    /// This rank's record, or what stands for an error of NCCL, a side stream that stands still, or
    /// what peers' hashes show.
    pub(crate) fn record(&self) -> Option<FaultRecord> {
        // What was found here first has set the abort word, of which kernels then leave records.
        self.failed.get().copied().or_else(|| self.fault.record()).or_else(|| self.seen_by_hashes())
    }

    /// What the peers' op-sequence hashes show, if nothing else was found before.
    fn seen_by_hashes(&self) -> Option<FaultRecord> {
        let record = self.awaited().hashes.as_ref()?.fault()?;
        self.fail(
            record,
            if record.code == fault::DISAGREED { reason::IN_ANOTHER_OP } else { record.abort },
        );
        self.failed.get().copied()
    }

    /// Where the side stream stands.
    pub(super) fn position(&self) -> Position {
        self.progress.position()
    }

    /// Where the side stream stands, in words.
    pub(crate) fn progress(&self) -> String {
        self.position().to_string()
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
        let Err(error) = self.link.status() else { return false };
        match news(NEWS, || self.has_failed(), || self.stop.load(Ordering::Acquire)) {
            News::Fault => {
                tracing::debug!(rank = self.rank.get(), %error, "NCCL has noticed, too");
                return true;
            }
            // Whoever leaves the communicator finds NCCL's error.
            News::Stop => return false,
            News::None => {}
        }
        tracing::error!(rank = self.rank.get(), %error, "messages of NCCL have failed");
        let (rank, epoch) = (self.rank.get(), self.awaited().epoch.get());
        let record = FaultRecord {
            state: 1,
            code: fault::ABORTED,
            rank,
            peer: rank,
            epoch,
            abort: reason::NCCL,
            ..FaultRecord::default()
        };
        self.fail(record, reason::NCCL);
        true
    }

    /// Before a call is refused for an error of NCCL's: what that comes from is the fault, or
    /// NCCL's error is.
    pub(crate) fn refused(&self, error: &TransportError) {
        if matches!(error, TransportError::Nccl(_)) {
            self.look(true);
        }
    }

    /// Whether the side stream is stuck in a call: a fault where no kernel waits for it.
    pub(super) fn stands_still(&self, standing: &mut Standing) -> bool {
        let position = self.position();
        if !standing.too_long(position, Instant::now()) {
            return false;
        }
        tracing::error!(rank = self.rank.get(), "a call does not go on: {position}");
        let (epoch, hashes) = {
            let awaited = self.awaited();
            (position.epoch(awaited.epoch), awaited.hashes.clone())
        };
        // All peers are asked at once then; else this rank may not have come to one of whom nothing
        // has come.
        let silent =
            hashes.filter(|_| position.is_collective()).and_then(|hashes| hashes.silent_in(epoch));
        self.fail(stuck(self.rank, epoch, silent), reason::NCCL);
        true
    }

    fn fail(&self, record: FaultRecord, reason: u32) {
        let _ = self.failed.set(record);
        self.fault.abort(reason);
    }

    /// Releases the side stream's waits, without the driver. Words that are sent from here on are
    /// those of no call. Should the stream set the word of rows once more, it is the number of the
    /// failed call, which no later call awaits.
    pub(super) fn release(&self) {
        // Held while they are set: whoever replaces them has the old ones to itself.
        let Awaited { flags, hashes, epoch } = &*self.awaited();
        let value = epoch.get().wrapping_add(AHEAD);
        if let Some(hashes) = hashes {
            hashes.set_number(value);
        }
        if let Some(flags) = flags {
            flags.set(value);
        }
    }

    /// Waits until calls are `done`, as long as the side stream takes steps. Where it takes none
    /// for some deadlines though nothing has failed, the caller's stream does not come to the next
    /// call, or a kernel does not end. Failed calls are waited for as on the other transports. A
    /// device whose failed calls do not end is given up: a rebuild would wait for it in the driver.
    pub(crate) fn drain(
        &self,
        done: impl FnMut() -> Result<bool, CudaError>,
    ) -> Result<(), TransportError> {
        let mut steps = HostSteps::new(self.deadline);
        let drained = Limits::default().wait(done, || {
            (self.has_failed().then_some(failing(self.deadline)), steps.allowed(self.position()))
        })?;
        if drained {
            return Ok(());
        }
        tracing::warn!(rank = self.rank.get(), "earlier calls do not end: {}", self.position());
        if self.has_failed() {
            self.device.give_up(FAILED);
        }
        Err(TransportError::NotDrained)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Fault;
    use crate::lateness::assert_soon;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn news_of_a_loss_is_waited_for_and_no_longer_than_a_moment() {
        let (looks, begun) = (AtomicU32::new(0), Instant::now());
        let third = || looks.fetch_add(1, Ordering::Relaxed) >= 2;
        assert_eq!(news(Duration::from_mins(1), third, || false), News::Fault);
        assert_eq!(news(Duration::from_mins(1), || false, || true), News::Stop);
        assert_soon(begun.elapsed(), Duration::from_secs(30));
        let (begun, moment) = (Instant::now(), Duration::from_millis(20));
        assert_eq!(news(moment, || false, || false), News::None);
        assert!(begun.elapsed() >= moment);
    }

    #[test]
    fn who_has_sent_nothing_is_named_where_no_kernel_waits_for_it() {
        let [rank, peer] = [2, 0].map(Rank::new);
        let said = |silent| {
            Fault::from_record(&stuck(rank, Epoch::new(8), silent), Vec::new()).to_string()
        };
        let named = said(Some((peer, Epoch::new(7))));
        assert!(
            named.starts_with("rank 2: rank 0 did not say which call it is in in call 8")
                && named.contains("expected 8, saw 7"),
            "{named}"
        );
        let unknown = said(None);
        assert!(unknown.starts_with("rank 2: the own mover did not finish in call 8"), "{unknown}");
    }
}
