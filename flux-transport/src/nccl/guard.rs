//! The thread that ends what the side stream waits for, when a call has failed.
//!
//! Invariant: the side stream waits for flags that this rank's kernel raises, and for messages of peers; neither has a deadline of its own. Once there is a
//! fault record, an abort word or an error of NCCL, flags are let go again and again, and the communicator is aborted, until the stream is empty.

use super::link::Link;
use super::messages::Messages;
use super::outbox::{Outbox, RELEASE};
use crate::ConnectError;
use crate::cuda::{CudaDevice, CudaError, SideStream, fill_words};
use crate::fault::reason;
use crate::nvlink::FaultBlock;
use flux_core::Rank;
use flux_core::layout::{FaultRecord, fault};
use flux_core::signal::Epoch;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// Between looks at the record and the abort word, which are loads.
const LOOK: Duration = Duration::from_millis(2);
/// Looks until NCCL is asked, which takes a lock.
const ASK: u32 = 16;
/// Between two releases of the flags.
const AGAIN: Duration = Duration::from_millis(10);

/// The longest that leaving waits for what was sent.
const LEAVE: Duration = Duration::from_secs(10);

/// What the thread shares with the rank's calls.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) link: Link,
    pub(crate) fault: FaultBlock,
    rank: Rank,
    failed: OnceLock<FaultRecord>,
    flags: Mutex<Flags>,
    // Not the side stream, which waits for what is written here.
    stream: SideStream,
    device: CudaDevice,
    stop: AtomicBool,
}

/// The flags in use, and the call that waits for them.
#[derive(Clone, Copy, Debug, Default)]
struct Flags {
    address: u64,
    words: usize,
    epoch: u32,
}

/// The thread; dropped, it ends.
#[derive(Debug)]
pub(crate) struct Guard {
    watched: Arc<Watched>,
    thread: Option<JoinHandle<()>>,
}

impl Watched {
    pub(crate) fn new(device: &CudaDevice, rank: Rank, link: Link) -> Result<Self, CudaError> {
        Ok(Self {
            link,
            fault: FaultBlock::new(device)?,
            rank,
            failed: OnceLock::new(),
            flags: Mutex::default(),
            stream: SideStream::new(device)?,
            device: device.clone(),
            stop: AtomicBool::new(false),
        })
    }

    /// What calls from now on wait for: flags of `at`, raised with `epoch` and later ones.
    pub(crate) fn await_flags(&self, at: &Outbox, epoch: Epoch) {
        let (address, words) = at.flags();
        *self.flags.lock().unwrap_or_else(PoisonError::into_inner) = Flags { address, words, epoch: epoch.get() };
    }

    /// This rank's record, or what stands for an error of NCCL.
    pub(crate) fn record(&self) -> Option<FaultRecord> {
        self.fault.record().or_else(|| self.failed.get().copied())
    }

    fn look(&self, ask: bool) -> bool {
        if self.fault.record().is_some() || self.fault.aborted() {
            return true;
        }
        if !ask {
            return false;
        }
        match self.link.is_ready() {
            Err(error) => {
                tracing::error!(rank = self.rank.get(), %error, "messages of NCCL have failed");
                let (rank, epoch) = (self.rank.get(), self.flags.lock().unwrap_or_else(PoisonError::into_inner).epoch);
                let record =
                    FaultRecord { state: 1, code: fault::ABORTED, rank, peer: rank, epoch, abort: reason::NCCL, ..FaultRecord::default() };
                // Before any wait ends by it, so that whoever finds the stream past a failed call also finds the fault.
                let _ = self.failed.set(record);
                self.fault.abort(reason::NCCL);
                true
            }
            Ok(_) => false,
        }
    }

    fn release(&self) -> Result<(), CudaError> {
        let Flags { address, words, epoch } = *self.flags.lock().unwrap_or_else(PoisonError::into_inner);
        if words == 0 {
            return Ok(());
        }
        let _current = self.device.enter()?;
        // SAFETY: the flags of the workspace in use, which is replaced only when this rank's work is drained, and then told here.
        unsafe { fill_words(&self.device, address, epoch.wrapping_add(RELEASE), words, self.stream.raw()) }?;
        self.stream.synchronize()
    }

    fn run(&self) {
        for look in 0_u32.. {
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            if self.look(look % ASK == 0) {
                break;
            }
            std::thread::park_timeout(LOOK);
        }
        let _thread = self.link.take().map(Messages::abort);
        // A kernel that was not stopped by the fault may still raise flags, and a call that was being made may still wait for some.
        while !self.stop.load(Ordering::Acquire) {
            if let Err(error) = self.release() {
                tracing::error!(rank = self.rank.get(), %error, "the flags of a failed call cannot be released");
                return;
            }
            std::thread::park_timeout(AGAIN);
        }
    }
}

impl Guard {
    pub(crate) fn new(watched: &Arc<Watched>) -> Result<Self, ConnectError> {
        let for_thread = Arc::clone(watched);
        let name = format!("flux-nccl-{}", watched.rank);
        let thread = std::thread::Builder::new().name(name).spawn(move || for_thread.run());
        let thread = thread.map_err(|source| ConnectError::Io { what: "starting a thread to watch messages", source })?;
        Ok(Self { watched: Arc::clone(watched), thread: Some(thread) })
    }

    /// Ends all waits of this rank, for `reason`.
    pub(crate) fn abort(&self, reason: u32) {
        self.watched.fault.abort(reason);
        self.wake();
    }

    /// Has the thread look at once.
    fn wake(&self) {
        if let Some(thread) = self.thread() {
            thread.unpark();
        }
    }

    fn thread(&self) -> Option<&Thread> {
        self.thread.as_ref().map(JoinHandle::thread)
    }

    /// Drains the device, ends the thread, then leaves the communicator in good order, unless it was given up before.
    pub(crate) fn leave(&mut self, deadline: Duration) {
        // The thread is needed until nothing waits any more.
        if let Err(error) = self.watched.device.synchronize() {
            tracing::warn!(%error, rank = self.watched.rank.get(), "while draining the device");
        }
        self.end();
        let left = self.watched.link.take().map(|messages| messages.leave(Instant::now() + LEAVE.min(deadline)));
        if let Some(Err(error)) = left {
            tracing::warn!(%error, rank = self.watched.rank.get(), "while leaving an NCCL communicator");
        }
    }

    /// Ends the thread. What is on the side stream then is on its own.
    fn end(&mut self) {
        self.watched.stop.store(true, Ordering::Release);
        self.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that watches NCCL's messages has panicked");
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.end();
    }
}
