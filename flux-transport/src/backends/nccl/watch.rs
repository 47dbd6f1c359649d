//! What the watchdog shares with the rank's calls.
//!
//! Invariant: a failure without a record on the device has a record here before any wait ends by
//! it. So a host that finds the stream past a failed call also finds the fault.

use super::collective_stall::{CollectiveStall, Verdict};
use super::flags::Flags;
use super::handle::Group;
use super::library::NcclError;
use super::link::Link;
use super::marks::{Bound, Mark, Marks, Stamps};
use super::messages::Use;
use super::outbox::Outbox;
use super::pause::Pause;
use super::peers::PeerCalls;
use super::progress::{Progress, ProgressWord, Stall, Step};
use crate::backends::device::calls::AHEAD;
use crate::backends::device::drain::FAILED;
use crate::backends::device::fault_block::FaultBlock;
use crate::backends::device::limits::{HostSteps, Limits, failing};
use crate::backends::error::TransportError;
use crate::bootstrap::world::World;
use crate::reason;
use crate::sync::locked;
use flux_core::Rank;
use flux_core::layout::{FaultRecord, fault};
use flux_core::signal::Epoch;
use flux_cuda::{CudaDevice, CudaError, Event, WordOp, is_by};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// For news of a peer that is gone to come to where NCCL has noticed: a closed connection's takes
/// milliseconds.
const NEWS: Duration = Duration::from_millis(400);

/// A rank's communicator, its fault, and where its calls stand.
#[derive(Debug)]
pub(crate) struct CallWatch {
    pub(super) link: Arc<Link>,
    pub(crate) fault: FaultBlock,
    pub(super) peers: PeerCalls,
    pub(super) rank: Rank,
    pub(super) deadline: Duration,
    pub(super) device: CudaDevice,
    pub(super) stop: AtomicBool,
    /// Whether a peer has said whom it gave up.
    pub(super) told: AtomicBool,
    pub(super) pause: Pause,
    word: ProgressWord,
    marks: Marks,
    /// The number of the last call that was made.
    made: AtomicU32,
    /// The number of the last call whose messages were enqueued.
    rounds: AtomicU32,
    failed: OnceLock<FaultRecord>,
    /// The flags in use.
    flags: Mutex<Option<Arc<Flags>>>,
}

/// An error of NCCL's, of which the cause may still be heard.
#[derive(Debug)]
pub(super) struct NcclFailure {
    error: NcclError,
    noticed: Instant,
}

impl NcclFailure {
    /// Whether it is the fault, as nothing else that it may come from is to be heard any more.
    fn is_the_fault(&self, told: bool, now: Instant) -> bool {
        told || now.saturating_duration_since(self.noticed) >= NEWS
    }
}

/// That `rank`'s call `epoch` does not go on: for want of a rank that has not told of it, and the
/// last call that it has, if there is one. No kernel has said so.
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

/// Whether a sum has begun, by the stamp of its kernel.
fn is_in(sum: &Mark, stamps: Stamps) -> bool {
    sum.bound == Bound::End && sum.epoch == stamps.closed
}

impl CallWatch {
    /// Of a rank of `world` whose first call is `epoch`.
    pub(crate) fn new(
        device: &CudaDevice,
        world: &World,
        link: Arc<Link>,
        epoch: Epoch,
        deadline: Duration,
    ) -> Result<Self, CudaError> {
        let before = epoch.before(1);
        let fault = FaultBlock::new(device)?;
        fault.set_closed(before);
        Ok(Self {
            link,
            fault,
            peers: PeerCalls::new(world, epoch),
            rank: world.rank(),
            deadline,
            device: device.clone(),
            stop: AtomicBool::new(false),
            told: AtomicBool::new(false),
            pause: Pause::new(deadline),
            word: ProgressWord::new(device, epoch)?,
            marks: Marks::default(),
            made: AtomicU32::new(before.get()),
            rounds: AtomicU32::new(before.get()),
            failed: OnceLock::new(),
            flags: Mutex::new(None),
        })
    }

    /// What calls from now on wait for: flags of `outbox`.
    pub(super) fn await_flags(&self, outbox: &Outbox) {
        *locked(&self.flags) = Some(Arc::clone(outbox.flags()));
    }

    /// Notes that call `epoch` is made, of the op with number `op`, before anything of it is
    /// enqueued.
    pub(super) fn begin(&self, epoch: Epoch, op: u32) {
        self.peers.say(epoch, op);
        self.made.store(epoch.get(), Ordering::Release);
    }

    /// Notes that messages of call `epoch` are enqueued, before any is.
    pub(super) fn begin_rounds(&self, epoch: Epoch) {
        self.rounds.store(epoch.get(), Ordering::Release);
    }

    /// Marks the start of what call `epoch` gathers, which is enqueued on `stream` next.
    pub(super) fn gather_begins(&self, epoch: Epoch, stream: usize) -> Result<(), CudaError> {
        self.marks.open(&self.device, epoch, Bound::Start)?.record(stream)?;
        self.marks.recorded();
        Ok(())
    }

    /// The event by which call `epoch` is to mark the end of its sum, which is enqueued next.
    pub(super) fn sum_begins(&self, epoch: Epoch) -> Result<Arc<Event>, CudaError> {
        self.marks.open(&self.device, epoch, Bound::End)
    }

    /// Notes that the event that ends the call in progress was recorded.
    pub(crate) fn call_is_marked(&self) {
        self.marks.recorded();
    }

    /// What has a stream note that call `epoch` is past `step`.
    pub(super) fn note(&self, epoch: Epoch, step: Step) -> WordOp {
        self.word.note(epoch, step)
    }

    /// The last call that had been made when this process was last paused for long.
    pub(crate) fn paused_in(&self) -> Option<Epoch> {
        self.pause.look(self.made(), Instant::now())
    }

    pub(super) fn made(&self) -> Epoch {
        Epoch::new(self.made.load(Ordering::Acquire))
    }

    /// This rank's record, or what stands for an error of NCCL, a stream that stands still, or what
    /// peers have told.
    pub(crate) fn record(&self) -> Option<FaultRecord> {
        // What was found here first has set the abort word, of which kernels then leave records.
        self.failed.get().copied().or_else(|| self.fault.record()).or_else(|| self.told_by_peers())
    }

    /// What the peers have told, if nothing else was found before.
    fn told_by_peers(&self) -> Option<FaultRecord> {
        let record = self.peers.fault()?;
        self.fail(record, reason_of(&record));
        self.failed.get().copied()
    }

    /// Why one of this rank's calls up to `epoch` has failed, if so, as peers are told.
    pub(super) fn failure_up_to(&self, epoch: Epoch) -> Option<u32> {
        let is_up_to = |record: &FaultRecord| !epoch.is_before(Epoch::new(record.epoch));
        self.record().filter(is_up_to).map(|record| reason_of(&record))
    }

    /// Returns when the peers have answered whether the calls that have ended here are whole.
    pub(crate) fn ask_peers(&self) {
        let (word, stamps) = self.stamps();
        let rounds = if word.has_ended() { stamps.rounds } else { stamps.rounds.before(1) };
        // Of a thread that makes calls, so that the driver may be asked.
        let closed = match self.marks.oldest(stamps) {
            Some(sum) if is_in(&sum, stamps) && !matches!(sum.is_passed(), Ok(true)) => {
                stamps.closed.before(1)
            }
            _ => stamps.closed,
        };
        self.peers.ask(if stamps.is_later(closed, rounds) { closed } else { rounds });
    }

    /// Where side streams stand, and what is known of all calls. Those that were made are read
    /// last, as they are at least as far.
    fn stamps(&self) -> (Progress, Stamps) {
        let (word, closed) = (self.word.read(), self.fault.closed());
        let rounds = word.epoch(Epoch::new(self.rounds.load(Ordering::Acquire)));
        (word, Stamps { closed, rounds, made: self.made() })
    }

    /// Where the calls stand.
    pub(crate) fn progress(&self) -> Progress {
        let (word, stamps) = self.stamps();
        let Stamps { closed, rounds, .. } = stamps;
        if stamps.is_later(closed, rounds) { Progress::new(closed, Step::Closed) } else { word }
    }

    /// Whether calls can no longer succeed.
    pub(super) fn has_failed(&self) -> bool {
        self.record().is_some() || self.fault.aborted()
    }

    /// NCCL's error, where something has failed.
    pub(super) fn nccl_failure(&self) -> Option<NcclFailure> {
        self.link.status().err().map(|error| NcclFailure { error, noticed: Instant::now() })
    }

    /// Whether calls can no longer succeed, where NCCL has failed. Over a network NCCL sees that a
    /// peer is gone, or has given up, before this rank hears which, which is the fault then, and
    /// known to all alike.
    pub(super) fn has_failed_with(&self, failure: &NcclFailure) -> bool {
        let error = &failure.error;
        if self.has_failed() {
            tracing::debug!(rank = self.rank.get(), %error, "NCCL has noticed, too");
            return true;
        }
        // Whoever leaves the communicator finds NCCL's error.
        let told = self.told.load(Ordering::Acquire);
        if self.stop.load(Ordering::Acquire) || !failure.is_the_fault(told, Instant::now()) {
            return false;
        }
        if !told {
            tracing::error!(rank = self.rank.get(), %error, "messages of NCCL have failed");
        }
        let (rank, epoch) = (self.rank.get(), self.made().get());
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

    /// Puts one group of NCCL's on `stream`. Before a call is refused for an error of NCCL's, what
    /// that comes from is the fault, or NCCL's error is.
    pub(super) fn group(
        &self,
        by: Use,
        stream: usize,
        fill: impl FnOnce(&Group<'_>) -> Result<(), NcclError>,
    ) -> Result<(), NcclError> {
        self.link.group(by, stream, fill).inspect_err(|_| {
            let Some(failure) = self.nccl_failure() else { return };
            let stopped = || self.stop.load(Ordering::Acquire);
            let news = || stopped() || self.has_failed_with(&failure);
            is_by(failure.noticed + 2 * NEWS, news);
        })
    }

    /// Whether a call does not go on: a fault where no kernel waits for it.
    pub(super) fn is_stalled(
        &self,
        rounds: &mut Stall<Progress>,
        collective: &mut CollectiveStall,
    ) -> bool {
        let ((word, stamps), now) = (self.stamps(), Instant::now());
        if rounds.is_too_long(word, self.deadline, now) {
            tracing::error!(rank = self.rank.get(), "a call does not go on: {word}");
            self.fail(stuck(self.rank, stamps.rounds, None), reason::NCCL);
            return true;
        }
        // A sum whose kernel has not ended has not begun.
        let next = self.marks.oldest(stamps);
        let next = next.filter(|mark| mark.bound == Bound::Start || is_in(mark, stamps));
        let epoch = next.as_ref().map_or(stamps.made, |mark| mark.epoch);
        match collective.look(next, self.deadline, now) {
            Verdict::Wait | Verdict::Ask => false,
            Verdict::Over => {
                self.marks.close(epoch);
                false
            }
            Verdict::Stalled => {
                let (rank, call) = (self.rank.get(), epoch.get());
                tracing::error!(rank, call, "the collective of a call does not end");
                // Peers tell of a call when they make it, long before its deadline.
                let silent = self.peers.silent_in(epoch);
                self.fail(stuck(self.rank, epoch, silent), reason::NCCL);
                true
            }
        }
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
        if let Some(flags) = &*locked(&self.flags) {
            flags.set(self.made().get().wrapping_add(AHEAD));
        }
    }

    /// Waits until calls are `done`, as long as they take steps. Where they take none for some
    /// deadlines though nothing has failed, the caller's stream does not come to the next call, or
    /// a kernel does not end. Failed calls are waited for as on the other transports. A device
    /// whose failed calls do not end is given up: a rebuild would wait for it in the driver.
    pub(crate) fn drain(
        &self,
        done: impl FnMut() -> Result<bool, CudaError>,
    ) -> Result<(), TransportError> {
        let mut steps = HostSteps::new(self.deadline);
        let drained = Limits::default().wait(done, || {
            (self.has_failed().then_some(failing(self.deadline)), steps.allowed(self.progress()))
        })?;
        if drained {
            return Ok(());
        }
        tracing::warn!(rank = self.rank.get(), "earlier calls do not end: {}", self.progress());
        if self.has_failed() {
            self.device.give_up(FAILED);
        }
        Err(TransportError::NotDrained)
    }
}

/// The reason of an abort that goes with a record.
fn reason_of(record: &FaultRecord) -> u32 {
    match record.code {
        fault::DISAGREED => reason::IN_ANOTHER_OP,
        fault::TIMEOUT => reason::TIMED_OUT,
        _ => record.abort.max(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::fault::Fault;

    /// Its verdict is the fault, so that the news of a lost peer are not waited for.
    #[test]
    fn an_error_of_nccl_is_not_held_back_where_a_peer_has_said_whom_it_gave_up() {
        let noticed = Instant::now();
        let failure = NcclFailure { error: NcclError::GivenUp, noticed };
        let is_the_fault = |told, after| failure.is_the_fault(told, noticed + after);
        assert!(is_the_fault(true, Duration::ZERO) && is_the_fault(false, NEWS));
        assert!(!is_the_fault(false, NEWS / 2));
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
