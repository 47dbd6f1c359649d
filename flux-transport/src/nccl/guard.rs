//! The thread that ends what the side stream waits for, when a call has failed.
//!
//! Invariant: the side stream waits for flags that this rank's kernel raises, and for messages of peers; neither has a deadline of its own. Once there is a
//! fault record, an abort word or an error of NCCL, or the stream has stood still in a call for too long, flags are let go again and again, and the
//! communicator is aborted, until the stream is empty. No wait of this thread, or for it, is without an end.

use super::messages::Messages;
use super::progress::Standing;
use super::watched::Watched;
use crate::ConnectError;
use crate::cuda::done_by;
use crate::drain::FAILED;
use crate::nccl::NcclError;
use std::convert::Infallible;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// Between looks at the record, the abort word and the stream's place, which are loads.
const LOOK: Duration = Duration::from_millis(2);
/// Looks until NCCL is asked, which takes a lock.
const ASK: u32 = 16;
/// Between two releases of the flags.
const AGAIN: Duration = Duration::from_millis(10);
/// The longest that leaving waits for what was sent.
const LEAVE: Duration = Duration::from_secs(10);
/// For threads that have nothing left to wait for.
const END: Duration = Duration::from_millis(500);

/// The thread; dropped, it ends.
#[derive(Debug)]
pub(crate) struct Guard {
    watched: Arc<Watched>,
    thread: Option<JoinHandle<()>>,
    /// Gives up NCCL's communicator, after a fault.
    aborting: Arc<Mutex<Option<JoinHandle<()>>>>,
}

impl Watched {
    /// Until a call has failed; false where it is told to stop before.
    fn until_fault(&self) -> bool {
        let mut standing = Standing::new(self.place(), self.deadline, Instant::now());
        for look in 0_u32.. {
            if self.stop.load(Ordering::Acquire) {
                return false;
            }
            if self.look(look % ASK == 0) || self.stands_still(&mut standing) {
                return true;
            }
            std::thread::park_timeout(LOOK);
        }
        false
    }

    fn run(&self, aborting: &Mutex<Option<JoinHandle<()>>>) {
        if !self.until_fault() {
            return;
        }
        let (mut releasing, mut aborted, mut told) = (true, false, false);
        let began = Instant::now();
        // A kernel that was not stopped by the fault may still raise flags, and a call that was being made may still wait for some.
        while !self.stop.load(Ordering::Acquire) {
            // Flags before the communicator: giving that up waits for the stream, and the driver may then take no more work.
            if releasing && let Err(error) = self.release() {
                releasing = false;
                tracing::error!(rank = self.rank.get(), %error, "the flags of a failed call cannot be released");
            }
            if !aborted {
                *aborting.lock().unwrap_or_else(PoisonError::into_inner) = self.link.take().and_then(Messages::abort);
                aborted = true;
            }
            if !told && began.elapsed() > self.deadline && !self.place().has_ended() {
                told = true;
                tracing::error!(rank = self.rank.get(), "after a failed call, and though all waits were ended: {}", self.place());
            }
            std::thread::park_timeout(AGAIN);
        }
    }
}

impl Guard {
    pub(crate) fn new(watched: &Arc<Watched>) -> Result<Self, ConnectError> {
        let aborting = Arc::new(Mutex::new(None));
        let (for_thread, abort) = (Arc::clone(watched), Arc::clone(&aborting));
        let name = format!("flux-nccl-{}", watched.rank);
        let thread = std::thread::Builder::new().name(name).spawn(move || for_thread.run(&abort));
        let thread = thread.map_err(|source| ConnectError::Io { what: "starting a thread to watch messages", source })?;
        Ok(Self { watched: Arc::clone(watched), thread: Some(thread), aborting })
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

    /// Ends the thread, which was needed until nothing waited any more, then leaves the communicator in good order, unless it was given up before. With `drained`
    /// calls all that the thread could end has ended; without, the communicator is given up and the device's memory stays.
    pub(crate) fn leave(&mut self, drained: bool) {
        let watched = &self.watched;
        let rank = watched.rank.get();
        if !drained {
            watched.device.give_up(FAILED);
        }
        self.end();
        let Some(messages) = self.watched.link.take() else {
            let aborting = self.aborting.lock().unwrap_or_else(PoisonError::into_inner).take();
            if aborting.is_some_and(|thread| !ended(thread)) {
                tracing::warn!(rank, "NCCL still gives up a communicator when its streams are freed");
            }
            return;
        };
        let left = if drained {
            messages.leave(Instant::now() + LEAVE.min(self.watched.deadline))
        } else {
            drop(messages.abort());
            Err(NcclError::GivenUp)
        };
        if let Err(error) = left {
            tracing::warn!(%error, rank, "while leaving an NCCL communicator");
        }
    }

    /// Ends the thread. What is on the side stream then is on its own.
    fn end(&mut self) {
        self.watched.stop.store(true, Ordering::Release);
        self.wake();
        if self.thread.take().is_some_and(|thread| !ended(thread)) {
            self.watched.device.give_up("a call into its driver does not return");
        }
    }
}

/// Whether a thread has ended, in time.
fn ended<T>(thread: JoinHandle<T>) -> bool {
    let Ok(ended) = done_by(Instant::now() + END, || Ok::<_, Infallible>(thread.is_finished()));
    if ended && thread.join().is_err() {
        tracing::error!("a thread that watches or ends NCCL's messages has panicked");
    }
    ended
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_does_not_end_is_not_waited_for_for_ever() {
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let stuck = std::thread::spawn(move || wait.recv());
        let began = Instant::now();
        assert!(!ended(stuck));
        assert!(began.elapsed() >= END);
        drop(end);
        assert!(ended(std::thread::spawn(|| {})));
    }
}
