//! The thread that releases side streams once this rank's calls can no longer succeed.
//!
//! Invariant: streams of a call wait little longer than its kernel, which ends by data, deadline or
//! abort word. A failed kernel leaves a record or finds the abort word set, and this thread sees
//! either.

use super::words::Words;
use crate::backends::device::fault_block::FaultBlock;
use crate::backends::error::TransportError;
use crate::reason;
use crate::sync::locked;
use flux_core::layout::{FaultRecord, fault};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
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
    clean: Clean,
    /// A peer that was found in another op.
    disagreed: OnceLock<FaultRecord>,
    /// 0, or why this rank gave up.
    reason: AtomicU32,
    stop: AtomicBool,
}

/// The last call at whose end no peer had given up: its data, and all before, is whole.
#[derive(Debug)]
struct Clean(AtomicU32);

impl Clean {
    /// Looks at the peers if a call has ended since the last look, or none is under way. During a
    /// call, an own wait may still fail, and knows better who is late.
    fn look(
        &self,
        finished: u32,
        begun: u32,
        of_a_peer: impl FnOnce() -> Option<FaultRecord>,
    ) -> Option<FaultRecord> {
        if finished == self.0.load(Ordering::Acquire) && finished != begun {
            return None;
        }
        let fault = of_a_peer();
        if fault.is_none() {
            self.0.store(finished, Ordering::Release);
        }
        fault
    }
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
        locked(&self.words)
    }

    fn reason(&self) -> u32 {
        match (self.reason.load(Ordering::Acquire), self.fault.record()) {
            (0, Some(record)) if record.code == fault::TIMEOUT => reason::TIMED_OUT,
            (0, Some(record)) => record.abort.max(1),
            (given, _) => given,
        }
    }

    fn abort(&self, reason: u32) {
        self.fault.abort(reason);
        let _ = self.reason.compare_exchange(0, reason, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// A peer in another op, if that was found first. It ends all waits of this rank.
    fn disagreement(&self, words: &Words) -> Option<FaultRecord> {
        if self.disagreed.get().is_none() && self.reason() == 0 {
            let record = words.disagreement()?;
            // Before a wait ends by the abort word, of which the kernel leaves a record.
            let _ = self.disagreed.set(record);
            self.abort(reason::IN_ANOTHER_OP);
        }
        self.disagreed.get().copied()
    }

    /// Whether streams may still wait for something.
    fn look(&self) -> bool {
        // Held while they are looked at: whoever replaces them has the old ones to itself.
        let words = self.words();
        self.disagreement(&words);
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
    pub(super) fn start(
        rank: u32,
        fault: FaultBlock,
        words: Arc<Words>,
        begun: u32,
    ) -> Result<Self, TransportError> {
        let (begun, clean) = (AtomicU32::new(begun), Clean(AtomicU32::new(begun)));
        let (reason, stop) = (AtomicU32::new(0), AtomicBool::new(false));
        let shared = Arc::new(Shared {
            fault,
            words: Mutex::new(words),
            begun,
            clean,
            disagreed: OnceLock::new(),
            reason,
            stop,
        });
        let watched = Arc::clone(&shared);
        let watch = move || {
            while !watched.stop.load(Ordering::Acquire) {
                if watched.look() { std::thread::park_timeout(PERIOD) } else { std::thread::park() }
            }
        };
        let thread = std::thread::Builder::new().name(format!("flux-watch-{rank}")).spawn(watch);
        let thread = thread.map_err(|source| TransportError::Io {
            what: "starting a thread that ends waits",
            source,
        })?;
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

    /// What is wrong with this rank's calls: a peer in another op, an own failed wait, or a peer
    /// that gave up before their end.
    pub(super) fn record(&self) -> Option<FaultRecord> {
        let words = self.shared.words();
        self.shared
            .disagreement(&words)
            .or_else(|| self.shared.fault.record())
            .or_else(|| self.fault_of_a_peer(&words))
    }

    fn fault_of_a_peer(&self, words: &Words) -> Option<FaultRecord> {
        // Before the peers' words: what a call ended with was let go of after its rank had said so.
        let finished = words.finished();
        self.shared
            .clean
            .look(finished, self.shared.begun.load(Ordering::Acquire), || words.fault_of_a_peer())
    }

    /// Takes a new generation's words, where no call is under way.
    pub(super) fn replace(&self, words: Arc<Words>) {
        self.shared.begun.store(words.finished(), Ordering::Release);
        *self.shared.words() = words;
    }

    pub(super) fn fault(&self) -> &FaultBlock {
        &self.shared.fault
    }

    /// Ends all waits of this rank, for a reason that is not 0. The first stays.
    pub(super) fn abort(&self, reason: u32) {
        self.shared.abort(reason);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_ended_with_what_a_peer_let_go_of_is_not_taken_for_whole_though_the_next_is_under_way()
     {
        let (record, clean) =
            (FaultRecord { state: 1, ..FaultRecord::default() }, Clean(AtomicU32::new(6)));
        let broken = || Some(record);
        assert_eq!(
            clean.look(6, 7, || unreachable!("none has ended: a wait of call 7 may yet fail")),
            None
        );
        assert_eq!(clean.look(7, 8, || None), None);
        assert_eq!(clean.look(7, 8, || unreachable!("call 7 was whole")), None);
        assert_eq!(clean.look(8, 9, broken), Some(record));
        assert_eq!(clean.look(8, 9, broken), Some(record), "it stays");
        assert_eq!(clean.look(9, 9, broken), Some(record));
        let clean = Clean(AtomicU32::new(u32::MAX));
        assert_eq!(
            (clean.look(0, 0, || None), clean.look(0, 0, broken)),
            (None, Some(record)),
            "with none under way nobody else will tell"
        );
    }
}
