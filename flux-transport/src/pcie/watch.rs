//! The thread that ends what side streams wait for, once this rank's calls can no longer succeed.
//!
//! Invariant: streams of a call wait at most as long as its kernel does, and a little longer. A kernel ends by data, by its deadline or by the abort word; where
//! it did not end by data it has left a record, or the abort word is set, and this thread sees either while the streams are not done.

use super::words::Words;
use crate::fault::reason;
use crate::nvlink::{FaultBlock, NvLinkError};
use flux_core::layout::{FaultRecord, fault};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often the thread looks while calls are under way.
const PERIOD: Duration = Duration::from_millis(2);

/// What the thread and the transport share.
#[derive(Debug)]
struct Shared {
    fault: FaultBlock,
    words: Mutex<Arc<Words>>,
    /// The last call whose streams were given something to wait for.
    begun: AtomicU32,
    /// 0, or why this rank gave up.
    reason: AtomicU32,
    stop: AtomicBool,
}

/// The thread, as long as it is wanted.
#[derive(Debug)]
pub(super) struct Watch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Shared {
    fn words(&self) -> MutexGuard<'_, Arc<Words>> {
        // One pointer, replaced as a whole.
        self.words.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reason(&self) -> u32 {
        match (self.reason.load(Ordering::Acquire), self.fault.record()) {
            (0, Some(record)) if record.code == fault::TIMEOUT => reason::TIMED_OUT,
            (0, Some(record)) => record.abort.max(1),
            (given, _) => given,
        }
    }

    /// Whether streams may still wait for something.
    fn look(&self) -> bool {
        // Held while they are looked at: whoever replaces them has the old ones to itself.
        let words = self.words();
        let begun = self.begun.load(Ordering::Acquire);
        let reason = self.reason();
        if reason != 0 {
            words.give_up(reason);
            words.end_waits(begun);
        }
        words.finished() != begun
    }
}

impl Watch {
    /// Starts the thread of rank `rank`, whose streams are done with call `begun`.
    pub(super) fn start(rank: u32, fault: FaultBlock, words: Arc<Words>, begun: u32) -> Result<Self, NvLinkError> {
        let (begun, reason, stop) = (AtomicU32::new(begun), AtomicU32::new(0), AtomicBool::new(false));
        let shared = Arc::new(Shared { fault, words: Mutex::new(words), begun, reason, stop });
        let watched = Arc::clone(&shared);
        let watch = move || {
            while !watched.stop.load(Ordering::Acquire) {
                if watched.look() { std::thread::park_timeout(PERIOD) } else { std::thread::park() }
            }
        };
        let thread = std::thread::Builder::new().name(format!("flux-watch-{rank}")).spawn(watch);
        let thread = thread.map_err(|source| NvLinkError::Io { what: "starting a thread that ends waits", source })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    /// Before streams are given something of call `epoch` to wait for.
    pub(super) fn begin(&self, epoch: u32) {
        self.shared.begun.store(epoch, Ordering::Release);
        self.wake();
    }

    /// Whether the streams are done with all calls.
    pub(super) fn idle(&self) -> bool {
        self.shared.words().finished() == self.shared.begun.load(Ordering::Acquire)
    }

    /// A peer that gave up before this rank's calls came to their end.
    pub(super) fn fault_of_a_peer(&self) -> Option<FaultRecord> {
        self.shared.words().fault_of_a_peer()
    }

    /// Takes a new generation's words, where no call is under way.
    pub(super) fn replace(&self, words: Arc<Words>) {
        self.shared.begun.store(words.finished(), Ordering::Release);
        *self.shared.words() = words;
    }

    /// This rank's fault block.
    pub(super) fn fault(&self) -> &FaultBlock {
        &self.shared.fault
    }

    /// Ends all waits of this rank, for a reason that is not 0. The first stays.
    pub(super) fn abort(&self, reason: u32) {
        self.shared.fault.abort(reason);
        let _ = self.shared.reason.compare_exchange(0, reason, Ordering::AcqRel, Ordering::Relaxed);
        self.wake();
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that ends waits has panicked");
        }
    }
}
