//! Deferred destruction: memory and streams that NCCL may still use while it aborts or destroys a
//! communicator, on threads that wait for peers.
//!
//! Invariant: deferred things are freed when every communicator of their device is gone that was
//! being ended when they were deferred. The thread that frees them has no call under way there:
//! freeing waits for the device and may hold the driver, which a half-enqueued call needs.
//!
//! NCCL frees its own memory whenever it likes, with the same effect on a call that awaits a peer.
//! So a new communicator first gives NCCL some time to end the old one ([`release_when_ended`]):
//! once, as what has not ended by then waits for a peer. So does the end of the process: libraries
//! that end with it take from those threads what they use.

use crate::sync::locked;
use flux_cuda::{CudaDevice, is_by};
use std::any::Any;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The longest that is waited for communicators that are being ended. One whose peer is stopped
/// takes longer.
const PATIENCE: Duration = Duration::from_secs(5);

/// A communicator that is being given up or destroyed; gone when this is dropped.
#[derive(Debug)]
pub(super) struct Ending {
    _mark: Arc<()>,
    ordinal: u32,
    since: Instant,
}

impl Ending {
    /// Of a communicator of `device`, from now on.
    pub(super) fn begin(device: &CudaDevice) -> Self {
        wait_at_exit();
        pending().begin(device.ordinal())
    }

    /// Has a thread of its own do `what`, which takes as long as peers take, and is under way until
    /// that has returned.
    pub(super) fn apart(
        self,
        name: &str,
        what: impl FnOnce() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        let noted = move || {
            let _under_way = self;
            what();
        };
        std::thread::Builder::new().name(name.to_owned()).spawn(noted)
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        tracing::debug!(
            device = self.ordinal,
            after = ?self.since.elapsed(),
            "a communicator of NCCL is gone",
        );
    }
}

/// Drops `things` of `device` when NCCL is past them: now, or in a later [`release`].
pub(crate) fn defer(device: &CudaDevice, things: impl Any + Send) {
    let mut pending = pending();
    let past = pending.defer(device.ordinal(), Box::new(things));
    if past.is_none() {
        tracing::info!(
            device = device.ordinal(),
            "NCCL still ends a communicator: its streams and memory are freed when a communicator \
             of the device next connects or grows"
        );
    }
    // What is dropped may wait for the device.
    drop(pending);
    drop(past);
}

/// Waits until NCCL has given up what it is giving up on `device`, then frees what was deferred
/// there. What it began to give up longer ago than half of the `deadline` is not waited for: that
/// was done before. By whoever has no call under way.
pub(crate) fn release_when_ended(device: &CudaDevice, deadline: Duration) {
    let (allowed, ordinal) = (PATIENCE.min(deadline / 2), device.ordinal());
    is_by(Instant::now() + allowed, || !pending().is_ending(ordinal, allowed, Instant::now()));
    if pending().is_ending(ordinal, Duration::MAX, Instant::now()) {
        tracing::info!(
            device = ordinal,
            "NCCL still ends a communicator: what it frees may hold up the calls of the next"
        );
    }
    release(device);
}

/// Frees what was deferred on `device` and NCCL is past. The caller has no call under way, nor have
/// its peers: unpinning waits for all devices of the process, where a peer's kernel may wait for
/// this rank's next call.
pub(crate) fn release(device: &CudaDevice) {
    let done = pending().release(device.ordinal());
    // What is dropped may wait for the device.
    drop(done);
}

/// Has the end of the process wait, before what was registered earlier: the ends of NCCL and of the
/// CUDA runtime in it, as both are loaded by now. An abort beside those uses what they have
/// unloaded, and the process dies of a signal.
fn wait_at_exit() {
    // By which process: in a child of it, which has forked, none of these threads is.
    static REGISTERED: OnceLock<u32> = OnceLock::new();
    extern "C" fn wait() {
        if REGISTERED.get() == Some(&std::process::id()) {
            all_have_ended(Instant::now() + PATIENCE);
        }
    }
    REGISTERED.get_or_init(|| {
        // SAFETY: the function lives as long as the process: nothing unloads it before its end,
        // unless it unloads all that calls it.
        if unsafe { libc::atexit(wait) } != 0 {
            tracing::warn!(
                "the end of the process does not wait for communicators of NCCL that are being \
                 ended then"
            );
        }
        std::process::id()
    });
}

/// Waits until no communicator is being ended on any device, at the longest `until`, and says
/// whether.
fn all_have_ended(until: Instant) -> bool {
    is_by(until, || !pending().ending.iter().any(Mark::is_under_way))
}

static PENDING: Mutex<Pending> = Mutex::new(Pending { ending: Vec::new(), deferred: Vec::new() });

fn pending() -> MutexGuard<'static, Pending> {
    // Whole after every line below.
    locked(&PENDING)
}

type Things = Box<dyn Any + Send>;

/// The communicators that are being given up, and what they may use.
struct Pending {
    ending: Vec<Mark>,
    deferred: Vec<Deferred>,
}

/// A look at an [`Ending`].
#[derive(Clone, Debug)]
struct Mark {
    ordinal: u32,
    since: Instant,
    under_way: Weak<()>,
}

impl Mark {
    fn is_under_way(&self) -> bool {
        self.under_way.strong_count() > 0
    }
}

struct Deferred {
    ordinal: u32,
    until: Vec<Mark>,
    things: Things,
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending")
            .field("ending", &self.ending)
            .field("deferred", &self.deferred.len())
            .finish()
    }
}

impl Pending {
    fn begin(&mut self, ordinal: u32) -> Ending {
        let (mark, since) = (Arc::new(()), Instant::now());
        self.ending.retain(Mark::is_under_way);
        self.ending.push(Mark { ordinal, since, under_way: Arc::downgrade(&mark) });
        Ending { _mark: mark, ordinal, since }
    }

    /// Whether a communicator of a device is being ended, for no longer than is `allowed`.
    fn is_ending(&self, ordinal: u32, allowed: Duration, now: Instant) -> bool {
        let is_young = |mark: &Mark| now.duration_since(mark.since) < allowed;
        self.ending_on(ordinal).any(is_young)
    }

    fn ending_on(&self, ordinal: u32) -> impl Iterator<Item = &Mark> {
        self.ending.iter().filter(move |mark| mark.ordinal == ordinal && mark.is_under_way())
    }

    /// Takes `things`, or gives them back where nothing is being given up on their device.
    fn defer(&mut self, ordinal: u32, things: Things) -> Option<Things> {
        let until: Vec<_> = self.ending_on(ordinal).cloned().collect();
        if until.is_empty() {
            return Some(things);
        }
        self.deferred.push(Deferred { ordinal, until, things });
        None
    }

    /// What may be freed of a device.
    fn release(&mut self, ordinal: u32) -> Vec<Things> {
        let past = |deferred: &mut Deferred| {
            deferred.ordinal == ordinal && !deferred.until.iter().any(Mark::is_under_way)
        };
        self.deferred.extract_if(.., past).map(|deferred| deferred.things).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lateness::AMPLE;

    fn empty() -> Pending {
        Pending { ending: Vec::new(), deferred: Vec::new() }
    }

    fn is_ending(pending: &Pending, ordinal: u32) -> bool {
        pending.is_ending(ordinal, Duration::MAX, Instant::now())
    }

    /// Things, and a look at whether they are still there.
    fn things() -> (Things, Weak<()>) {
        let thing = Arc::new(());
        let look = Arc::downgrade(&thing);
        (Box::new(thing), look)
    }

    #[test]
    fn things_stay_until_what_was_given_up_before_them_is_gone() {
        let mut pending = empty();
        let first = pending.begin(0);
        let (thing, look) = things();
        assert!(pending.defer(0, thing).is_none());
        let later = pending.begin(0);
        assert!(pending.release(0).is_empty() && look.strong_count() > 0);
        drop(first);
        let freed = pending.release(0);
        assert!(
            freed.len() == 1 && pending.deferred.is_empty(),
            "what is given up later has no part in them"
        );
        drop(freed);
        assert!(look.strong_count() == 0);
        assert!(is_ending(&pending, 0) && !is_ending(&pending, 1));
        drop(later);
        assert!(!is_ending(&pending, 0));
    }

    #[test]
    fn things_of_a_device_on_which_nothing_is_given_up_do_not_stay() {
        let mut pending = empty();
        let other = pending.begin(1);
        assert!(pending.defer(0, things().0).is_some());
        drop(pending.begin(0));
        assert!(pending.defer(0, things().0).is_some(), "it is gone");
        let (thing, look) = things();
        assert!(pending.defer(1, thing).is_none());
        drop(other);
        assert!(
            pending.release(0).is_empty() && look.strong_count() > 0,
            "those of device 1 are for who is idle there"
        );
        assert_eq!(pending.release(1).len(), 1);
    }

    #[test]
    fn a_communicator_that_does_not_end_is_waited_for_once() {
        let (mut pending, allowed) = (empty(), Duration::from_secs(1));
        let ending = pending.begin(0);
        let began = pending.ending[0].since;
        assert!(pending.is_ending(0, allowed, began));
        assert!(!pending.is_ending(0, allowed, began + allowed), "who comes later waits no more");
        let next = pending.begin(0);
        assert!(pending.is_ending(0, allowed, began + allowed / 2));
        drop((ending, next));
        assert!(!is_ending(&pending, 0));
    }

    #[test]
    fn what_takes_as_long_as_peers_take_holds_up_nobody_and_things_stay_meanwhile() {
        let mut pending = empty();
        let (peer, until_it_leaves) = std::sync::mpsc::channel::<()>();
        let destroy = move || assert!(until_it_leaves.recv().is_err());
        let thread = pending.begin(0).apart("test", destroy).unwrap();
        let (thing, look) = things();
        assert!(pending.defer(0, thing).is_none());
        // A second communicator of the device, whose peers leave with it, comes and goes meanwhile.
        pending.begin(0).apart("test", || {}).unwrap().join().unwrap();
        assert!(!thread.is_finished() && is_ending(&pending, 0));
        assert!(pending.release(0).is_empty() && look.strong_count() > 0);
        drop(peer);
        thread.join().unwrap();
        assert_eq!((pending.release(0).len(), is_ending(&pending, 0)), (1, false));
    }

    /// The only test that uses the process's own pending.
    #[test]
    fn the_end_of_the_process_waits_for_what_is_being_ended_but_not_for_ever() {
        let (peer, until_it_leaves) = std::sync::mpsc::channel::<()>();
        let thread = pending()
            .begin(0)
            .apart("test", move || assert!(until_it_leaves.recv().is_err()))
            .unwrap();
        assert!(!all_have_ended(Instant::now() + Duration::from_millis(20)));
        drop(peer);
        assert!(all_have_ended(Instant::now() + AMPLE));
        thread.join().unwrap();
    }

    #[test]
    fn a_panic_of_the_thread_that_gives_up_ends_the_wait_too() {
        let mut pending = empty();
        let ending = pending.begin(0);
        assert!(pending.defer(0, things().0).is_none());
        let thread = std::thread::spawn(move || {
            let _giving_up = ending;
            std::panic::resume_unwind(Box::new(()));
        });
        assert!(thread.join().is_err());
        assert_eq!(pending.release(0).len(), 1);
    }
}
