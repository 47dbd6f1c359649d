//! Bounded waits for the end of a rank's calls.
//!
//! Invariant: kernels' waits end by the deadline, so a drain is short. What was waited for in vain
//! may still use its memory: its device is given up and nothing of it is freed.

use crate::backends::error::TransportError;
use crate::sync::locked;
use flux_cuda::{CudaDevice, CudaError, look};
use std::convert::Infallible;
use std::sync::Mutex;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Deadlines that a kernel may take when nothing is missing that it waits for: it computes.
const COMPUTING: u32 = 4;
/// Why a device is given up whose calls had failed.
pub(crate) const FAILED: &str = "calls that had failed did not end";
/// Besides, for work of the device that is not this communicator's.
const OTHERS: Duration = Duration::from_secs(20);

/// Deadlines for waits without an end of their own, each from when it was first needed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Limits {
    failed: Option<Instant>,
    works: Option<Instant>,
}

impl Limits {
    /// Polls `done`: true; false once the limits are over. `allowed` returns how long failed calls,
    /// and working ones, are waited for.
    pub(crate) fn wait<E>(
        &mut self,
        mut done: impl FnMut() -> Result<bool, E>,
        mut allowed: impl FnMut() -> (Option<Duration>, Option<Duration>),
    ) -> Result<bool, E> {
        look(|now| {
            if done()? {
                return Ok(Some(true));
            }
            let (failed, works) = allowed();
            Ok(self.are_over(failed, works, now).then_some(false))
        })
    }

    fn are_over(
        &mut self,
        failed: Option<Duration>,
        works: Option<Duration>,
        now: Instant,
    ) -> bool {
        for (limit, allowed) in [(&mut self.failed, failed), (&mut self.works, works)] {
            *limit = allowed.map(|allowed| limit.unwrap_or(now + allowed));
        }
        [self.failed, self.works].into_iter().flatten().any(|limit| now >= limit)
    }
}

/// How long is waited for what has failed, where calls have this deadline.
pub(crate) const fn failing(deadline: Duration) -> Duration {
    deadline.saturating_add(OTHERS)
}

/// How long is waited for what works, where calls have this deadline.
const fn working(deadline: Duration) -> Duration {
    deadline.saturating_mul(COMPUTING).saturating_add(OTHERS)
}

/// What is waited for as long as it takes steps, however many it has before it.
#[derive(Debug)]
pub(crate) struct HostSteps<P> {
    allowed: Duration,
    at: Option<P>,
}

impl<P: PartialEq> HostSteps<P> {
    pub(crate) const fn new(deadline: Duration) -> Self {
        Self { allowed: working(deadline), at: None }
    }

    /// How long a host at `place` may take to its next step, counted anew from each.
    pub(crate) fn allowed(&mut self, place: P) -> Option<Duration> {
        let stands = self.at.as_ref() == Some(&place);
        self.at = Some(place);
        stands.then_some(self.allowed)
    }
}

/// Waits for all work of a device, replayed graphs included: freeing waits for it, too.
#[derive(Debug)]
pub(crate) struct Drain {
    device: CudaDevice,
    waits: Waits,
}

impl Drain {
    pub(crate) const fn new(device: CudaDevice, deadline: Duration) -> Self {
        Self {
            device,
            waits: Waits {
                failed: failing(deadline),
                working: working(deadline),
                last: Mutex::new(None),
            },
        }
    }

    /// Waits until the device is idle; `failed`: whether calls have failed, which shortens the
    /// wait.
    ///
    /// # Errors
    /// [`TransportError::NotDrained`]; after failed calls the device is given up.
    pub(crate) fn wait(&self, failed: impl Fn() -> bool) -> Result<(), TransportError> {
        let device = self.device.clone();
        let drained = self.waits.wait(&failed, move || device.synchronize());
        if matches!(drained, Err(TransportError::NotDrained)) && failed() {
            self.device.give_up(FAILED);
        }
        drained
    }

    /// The last wait, before resources are freed. A device that is not idle in time is given up.
    pub(crate) fn close(&self, rank: u32, failed: impl Fn() -> bool) {
        let Err(error) = self.wait(failed) else { return };
        // A device that has failed runs nothing any more.
        if !matches!(error, TransportError::Cuda(_)) {
            self.device.give_up("calls did not end");
        }
        tracing::warn!(%error, rank, "while draining the device");
    }
}

/// Waits on threads, one after the other, as the driver's own have no end.
#[derive(Debug)]
struct Waits {
    /// How long is waited where calls have failed, and where they have not.
    failed: Duration,
    working: Duration,
    /// A wait that was not over in time; one at most, so a stuck device does not collect threads.
    last: Mutex<Option<OnThread>>,
}

#[derive(Debug)]
struct OnThread {
    thread: JoinHandle<Result<(), CudaError>>,
    limits: Limits,
}

impl Waits {
    fn wait(
        &self,
        failed: impl Fn() -> bool,
        idle: impl FnOnce() -> Result<(), CudaError> + Send + 'static,
    ) -> Result<(), TransportError> {
        let mut last = locked(&self.last);
        let is_over = |wait: &mut OnThread| {
            let allowed = || (failed().then_some(self.failed), Some(self.working));
            let Ok(over) =
                wait.limits.wait(|| Ok::<_, Infallible>(wait.thread.is_finished()), allowed);
            over
        };
        // Its limits are its own: what was waited for in vain is not waited for again.
        if last.as_mut().is_some_and(|earlier| !is_over(earlier)) {
            return Err(TransportError::NotDrained);
        }
        let thread = std::thread::Builder::new().name("flux-drain".to_owned()).spawn(idle);
        let thread = thread.map_err(|source| TransportError::Io {
            what: "starting a thread to wait for the device",
            source,
        })?;
        let mut wait = OnThread { thread, limits: Limits::default() };
        if !is_over(&mut wait) {
            *last = Some(wait);
            return Err(TransportError::NotDrained);
        }
        *last = None;
        // A wait that panicked has not shown anything.
        wait.thread.join().map_err(|_| TransportError::NotDrained)?.map_err(TransportError::Cuda)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    const SHORT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_mins(1);

    fn waits(failed: Duration, working: Duration) -> Waits {
        Waits { failed, working, last: Mutex::new(None) }
    }

    // Another thread that waited would find the device idle.
    const IDLE: fn() -> Result<(), CudaError> = || Ok(());

    #[test]
    fn what_works_is_waited_for_and_what_has_failed_for_the_deadline() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut limits = Limits::default();
        let mut over = |failed: bool, stands: bool, after: u32| {
            limits.are_over(
                failed.then_some(second),
                stands.then_some(4 * second),
                start + after * second,
            )
        };
        assert!(!over(false, false, 1000));
        assert!(!over(false, true, 1001));
        assert!(!over(false, true, 1004));
        assert!(!over(false, false, 1006), "it has taken a step");
        assert!(!over(true, true, 1007));
        assert!(over(true, true, 1008));
        let mut limits = Limits::default();
        assert!(!limits.are_over(None, Some(4 * second), start));
        assert!(
            limits.are_over(None, Some(4 * second), start + 4 * second),
            "a kernel that does not end, without a fault"
        );
    }

    #[test]
    fn who_takes_steps_is_waited_for_and_who_stands_is_given_up_though_nothing_has_failed() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let (mut steps, mut limits) = (HostSteps::new(second), Limits::default());
        let mut over = |place: u32, after: u32| {
            limits.are_over(None, steps.allowed(place), start + after * second)
        };
        assert!((0..1000).all(|step| !over(step, 20 * step)), "a long queue");
        assert!(!over(999, 20_000));
        assert!(!over(999, 20_023));
        assert!(!over(1000, 20_024), "it came in time");
        assert!(!over(1000, 20_025));
        assert!(
            over(1000, 20_049),
            "four deadlines and 20 s after it was first seen to stand there"
        );
    }

    #[test]
    fn a_device_that_becomes_idle_is_drained_each_time() {
        let waits = waits(LONG, LONG);
        for _ in 0..2 {
            waits.wait(|| true, IDLE).unwrap();
        }
        let refused = || {
            Err(CudaError::Call {
                call: "cuCtxSynchronize",
                code: 719,
                name: "launch failure".to_owned(),
            })
        };
        assert!(matches!(waits.wait(|| false, refused), Err(TransportError::Cuda(error))
                if error.code() == Some(719)));
    }

    #[test]
    fn a_device_that_is_stuck_is_waited_for_once_and_drained_when_it_is_idle_after_all() {
        for (limits, failed) in [((SHORT, LONG), true), ((LONG, SHORT), false)] {
            let waits = waits(limits.0, limits.1);
            let (busy, until_idle) = channel::<()>();
            let stuck = move || {
                // Its sender is dropped when the device is idle.
                until_idle.recv().unwrap_err();
                Ok(())
            };
            let began = Instant::now();
            assert!(matches!(waits.wait(|| failed, stuck), Err(TransportError::NotDrained)));
            assert!((SHORT..LONG).contains(&began.elapsed()), "{:?}", began.elapsed());
            assert!(matches!(waits.wait(|| failed, IDLE), Err(TransportError::NotDrained)));
            drop(busy);
            // The thread sees it in its own time.
            while !locked(&waits.last).as_ref().unwrap().thread.is_finished() {
                std::thread::yield_now();
            }
            waits.wait(|| failed, IDLE).unwrap();
        }
    }
}
