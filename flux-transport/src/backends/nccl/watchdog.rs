//! The threads that end streams' waits when a call has failed, and that tell peers of calls.
//!
//! Invariant: a stream waits for flags of this rank's kernel, for messages and for collectives; no
//! such wait has a deadline of its own. The watchdog looks for a fault record, an abort word, an
//! error of NCCL, other calls of a peer, and a call that stands still for too long. Then it gives
//! the communicator up and releases flags again and again until it is stopped. It asks the driver
//! for nothing, where another thread may wait for the device: what only the driver knows, [another
//! thread](super::collective_stall) asks. Nobody's calls depend on an endless wait of these
//! threads.
//!
//! First the kernel gets a [moment](RECORD) to leave its fault record, for which the abort word is
//! set. An aborted communicator may leave a torn chunk whose word has come, and streams pass both
//! on to node peers. A kernel that leaves a record has told its node peers before, so none of
//! them closes the call with such a chunk. Without a kernel the moment is for the message that
//! tells the peers (`Communicator::abort`).

use super::collective_stall::CollectiveStall;
use super::messages::GivenUp;
use super::progress::Stall;
use super::watch::CallWatch;
use crate::backends::connect_error::ConnectError;
use crate::backends::device::calls::OpHash;
use crate::bootstrap::control::{Notice, Watcher};
use crate::bootstrap::world::World;
use crate::sync::Listening;
use flux_cuda::is_by;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SendError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between looks at the record, the abort word and the stream's place, which are loads.
const LOOK: Duration = Duration::from_millis(2);
/// Looks until NCCL is asked, which takes a lock.
const ASK: u32 = 16;
/// For the kernel to see the abort word, which takes some milliseconds, and to leave its record.
/// Where none waits there will be none.
const RECORD: Duration = Duration::from_millis(100);
/// Between two releases of the flags.
const AGAIN: Duration = Duration::from_millis(10);
/// The longest that leaving waits for what was sent.
const CLOSE: Duration = Duration::from_secs(10);
/// For a thread that has nothing left to wait for.
const END: Duration = Duration::from_millis(500);

/// The threads; dropped, they end, but for one that gives a communicator up: that takes what NCCL
/// takes.
#[derive(Debug)]
pub(crate) struct Watchdog {
    watch: Arc<CallWatch>,
    thread: Option<JoinHandle<()>>,
    listener: PeerListener,
}

/// Hears what peers tell, until it is closed.
struct PeerListener {
    listening: Arc<Listening<CallWatch>>,
    _watcher: Arc<Watcher>,
}

impl fmt::Debug for PeerListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PeerListener")
    }
}

impl PeerListener {
    fn new(watch: &Arc<CallWatch>, world: &World) -> Self {
        let (number, listening) = (world.communicator(), Listening::new(watch));
        let watcher: Arc<Watcher> = {
            let listening = Arc::clone(&listening);
            Arc::new(move |notice| {
                let _ = listening.call(|watch| match notice {
                    Notice::Told { by, communicator, words } if communicator == number => {
                        watch.peers.hear(by, words, |epoch| watch.failure_up_to(epoch));
                    }
                    Notice::GaveUp { what, .. } if what.communicator == number => {
                        watch.told.store(true, Ordering::Release);
                    }
                    _ => {}
                });
            })
        };
        world.control().watch(Arc::downgrade(&watcher));
        Self { listening, _watcher: watcher }
    }
}

impl CallWatch {
    /// Until a call has failed; false where it is told to stop before.
    fn until_fault(&self, mut told: Vec<OpHash>) -> bool {
        let (mut rounds, mut collective) = (Stall::new(), CollectiveStall::new());
        let mut error = None;
        for look in 0_u32.. {
            if self.stop.load(Ordering::Acquire) {
                return false;
            }
            self.pause.look(self.made(), Instant::now());
            if self.has_failed() || self.is_stalled(&mut rounds, &mut collective) {
                return true;
            }
            if error.is_none() && look % ASK == 0 {
                error = self.nccl_failure();
            }
            if error.as_ref().is_some_and(|error| self.has_failed_with(error)) {
                return true;
            }
            self.peers.tell(&mut told);
            std::thread::park_timeout(LOOK);
        }
        false
    }

    fn run(&self, aborter: SyncSender<GivenUp>, told: Vec<OpHash>) {
        if !self.until_fault(told) {
            return;
        }
        // Whatever ended the calls without a record has set the abort word.
        let recorded = || self.fault.record().is_some() || self.stop.load(Ordering::Acquire);
        is_by(Instant::now() + RECORD, recorded);
        self.release();
        if let Some(Err(SendError(given_up))) =
            self.link.give_up().map(|given_up| aborter.send(given_up))
        {
            tracing::error!(
                rank = self.rank.get(),
                "the thread that gives up a communicator of NCCL is gone"
            );
            given_up.end(|| self.link.messages());
        }
        drop(aborter);
        let (began, mut logged) = (Instant::now(), false);
        // A kernel that was not stopped by the fault may still raise flags, and a call that was
        // being made may still wait for some.
        while !self.stop.load(Ordering::Acquire) {
            self.release();
            self.pause.look(self.made(), Instant::now());
            if !logged && began.elapsed() > self.deadline && !self.progress().has_ended() {
                logged = true;
                tracing::error!(
                    rank = self.rank.get(),
                    "after a failed call, and though all waits were ended: {}",
                    self.progress()
                );
            }
            std::thread::park_timeout(AGAIN);
        }
    }
}

/// Starts the thread that gives a communicator up, if it is given one, in the device's context,
/// which it enters now: then the driver might keep it waiting.
fn aborter(watch: &CallWatch) -> std::io::Result<SyncSender<GivenUp>> {
    let (send, receive): (_, Receiver<GivenUp>) = sync_channel(1);
    let (device, rank, link) = (watch.device.clone(), watch.rank, Arc::clone(&watch.link));
    let abort = move || {
        if let Err(error) = device.bind() {
            tracing::error!(%rank, %error, "a thread without the device's context");
        }
        if let Ok(given_up) = receive.recv() {
            given_up.end(|| link.messages());
        }
    };
    std::thread::Builder::new().name("flux-nccl-abort".to_owned()).spawn(abort)?;
    Ok(send)
}

impl Watchdog {
    pub(crate) fn new(watch: &Arc<CallWatch>, world: &World) -> Result<Self, ConnectError> {
        let io = |source| ConnectError::Io { what: "starting a thread to watch messages", source };
        let aborter = aborter(watch).map_err(io)?;
        // Before any call is made: what the thread finds when it starts may be of a first one.
        let (for_thread, told) = (Arc::clone(watch), watch.peers.untold());
        let name = format!("flux-nccl-{}", watch.rank);
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || for_thread.run(aborter, told))
            .map_err(io)?;
        let listener = PeerListener::new(watch, world);
        Ok(Self { watch: Arc::clone(watch), thread: Some(thread), listener })
    }

    /// Ends all waits of this rank, for `reason`.
    pub(crate) fn abort(&self, reason: u32) {
        self.watch.fault.abort(reason);
        self.wake();
    }

    /// Has the thread look at once.
    fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    /// Ends the threads, then leaves the communicator in good order, unless it was given up before:
    /// what NCCL may still use is then best [deferred](super::deferred::defer). With `drained` all
    /// calls have ended that the thread could end. Without, the communicator is given up and the
    /// device's memory stays.
    pub(crate) fn close(&mut self, drained: bool) {
        let watch = &self.watch;
        let rank = watch.rank.get();
        if !drained {
            watch.device.give_up("calls did not end");
        } else if watch.record().is_none() {
            watch.peers.close();
        }
        self.end();
        let link = &self.watch.link;
        if !drained {
            link.abort();
        } else if let Err(error) = link.close(Instant::now() + CLOSE.min(self.watch.deadline)) {
            tracing::warn!(%error, rank, "while leaving an NCCL communicator");
        }
    }

    /// Ends the thread. What is on the side stream then is on its own.
    fn end(&mut self) {
        // From then on no thread that brings notices is in the watch.
        self.listener.listening.close();
        self.watch.stop.store(true, Ordering::Release);
        self.wake();
        if self.thread.take().is_some_and(|thread| !ended(thread)) {
            self.watch.device.give_up("a call of NCCL that waits for nobody does not return");
        }
    }
}

/// Whether a thread has ended, in time.
fn ended<T>(thread: JoinHandle<T>) -> bool {
    let ended = is_by(Instant::now() + END, || thread.is_finished());
    if ended && thread.join().is_err() {
        tracing::error!("a thread that watches NCCL's messages has panicked");
    }
    ended
}

impl Drop for Watchdog {
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
