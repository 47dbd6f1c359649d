//! Bounded waits for the end of a rank's calls.
//!
//! Invariant: kernels' waits end by the deadline, so a drain is short. What was waited for in vain
//! may still use its memory: its device is given up and nothing of it is freed.

use super::limits::{Limits, failing, working};
use crate::backends::error::TransportError;
use crate::sync::locked;
use flux_cuda::{CudaDevice, CudaError};
use std::convert::Infallible;
use std::sync::Mutex;
use std::thread::JoinHandle;
use std::time::Duration;

/// Why a device is given up whose calls had failed.
pub(crate) const FAILED: &str = "calls that had failed did not end";

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
    use std::time::Instant;

    const SHORT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_mins(1);

    fn waits(failed: Duration, working: Duration) -> Waits {
        Waits { failed, working, last: Mutex::new(None) }
    }

    // Another thread that waited would find the device idle.
    const IDLE: fn() -> Result<(), CudaError> = || Ok(());

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
