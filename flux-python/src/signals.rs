//! Signals in calls that wait for other ranks.
//!
//! Invariant: what a handler of a signal raises, as KeyboardInterrupt, ends the call within
//! [`LOOK`] and the time that its waits take to end. Python runs handlers on its main thread alone:
//! there the work is another thread's, and this one looks.

use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use std::panic::resume_unwind;
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Builder, Thread};
use std::time::Duration;

/// How often the main thread looks for signals.
const LOOK: Duration = Duration::from_millis(50);
/// The reason of an abort after a signal, as a shell names the end by SIGINT.
pub(crate) const INTERRUPTED: u32 = 130;

/// Runs work without the interpreter's lock; `end` ends its waits after a signal.
///
/// # Errors
/// What a handler has raised, when the work has ended.
pub(crate) fn heard<T: Send>(
    end: impl FnOnce(),
    work: impl FnOnce() -> T + Send,
) -> Result<T, PyErr> {
    if !is_main_thread() {
        return Ok(work());
    }
    thread::scope(|scope| {
        let (done, result) = sync_channel(1);
        // The other end stays until the work has ended.
        let run = move || drop(done.send(work()));
        let worker = Builder::new().name("flux-call".to_owned()).spawn_scoped(scope, run)?;
        loop {
            match result.recv_timeout(LOOK) {
                Ok(value) => return Ok(value),
                Err(RecvTimeoutError::Timeout) => {
                    if let Err(raised) = Python::attach(look) {
                        end();
                        return Err(raised);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    worker.join().unwrap_or_else(|panic| resume_unwind(panic));
                    unreachable!("work that does not panic leaves its result");
                }
            }
        }
    })
}

/// Waits for a future without the interpreter's lock; a signal drops it, which ends its waits.
///
/// # Errors
/// What a handler has raised.
pub(crate) fn awaited<T>(future: impl Future<Output = T>) -> Result<T, PyErr> {
    let (mut future, waker) = (pin!(future), Waker::from(Arc::new(Unpark(thread::current()))));
    let (mut context, main) = (Context::from_waker(&waker), is_main_thread());
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return Ok(value);
        }
        thread::park_timeout(LOOK);
        if main {
            Python::attach(look)?;
        }
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Has Python raise on its main thread, behind a kernel's error, what a handler raised in the call.
pub(crate) fn raise_later(raised: PyErr) {
    Python::attach(|py| {
        if raised.is_instance_of::<PyKeyboardInterrupt>(py) {
            // SAFETY: the interpreter runs, and this thread holds its lock.
            unsafe { pyo3::ffi::PyErr_SetInterrupt() };
        } else {
            raised.write_unraisable(py, None);
        }
    });
}

/// Runs the handlers of signals that have come.
fn look(py: Python<'_>) -> PyResult<()> {
    py.check_signals()
}

/// Whether Python runs handlers of signals on this thread.
fn is_main_thread() -> bool {
    // The first thread of a process, and the one that forked in a child.
    rustix::thread::gettid() == rustix::process::getpid()
}
