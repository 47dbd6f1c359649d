//! Runs blocking work for a future, on a thread of its own.
//!
//! Invariant: the future is ready once the work ends. A panic of the work is a panic of the poller.
//! Dropping the future cancels the work: its waits end within [`LOOK`].

use super::error::BootstrapError;
use crate::sync::locked;
use rustix::io::Errno;
use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::thread;
use std::time::Duration;

/// How often work that waits looks whether it is cancelled.
pub(crate) const LOOK: Duration = Duration::from_millis(50);

thread_local! {
    /// Whether the work of this thread is cancelled, where a future waits for it.
    static CANCELLED: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Whether nobody waits for this thread's work any more.
pub(crate) fn cancelled() -> bool {
    CANCELLED.with_borrow(|cancelled| {
        cancelled.as_ref().is_some_and(|cancelled| cancelled.load(Ordering::Relaxed))
    })
}

/// Whether this thread's work can be cancelled.
pub(crate) fn cancellable() -> bool {
    CANCELLED.with_borrow(Option::is_some)
}

/// Sleeps between two looks at the world, of [`LOOK`] or about that; `CANCELED` in cancelled work.
pub(crate) fn pause_for(pause: Duration) -> Result<(), Errno> {
    thread::sleep(pause);
    if cancelled() { Err(Errno::CANCELED) } else { Ok(()) }
}

/// Cancels the work when the future is dropped.
struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What the thread leaves for the future, and whom it wakes then.
struct Handover<T> {
    result: Option<thread::Result<T>>,
    waker: Option<Waker>,
}

/// Runs a step of a rendezvous.
///
/// # Errors
/// The work's, and the system's if it gives no thread.
pub(crate) async fn on_own_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, BootstrapError> + Send + 'static,
) -> Result<T, BootstrapError> {
    let done = unblock("flux-meet".to_owned(), work).await;
    done.map_err(|source| BootstrapError::Io { step: "starting a thread to meet on", source })?
}

/// Runs `work` on a thread of this name. Dropping the future cancels the work.
///
/// # Errors
/// The system's, if it gives no thread.
pub(crate) async fn unblock<T: Send + 'static>(
    name: String,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let handover = Arc::new(Mutex::new(Handover { result: None, waker: None }));
    let theirs = Arc::clone(&handover);
    let guard = CancelOnDrop(Arc::default());
    let cancelled = Arc::clone(&guard.0);
    let run = move || {
        CANCELLED.set(Some(cancelled));
        // What the work leaves half done is dropped with it: nobody else has it.
        let result = catch_unwind(AssertUnwindSafe(work));
        let mut handover = locked(&theirs);
        handover.result = Some(result);
        let waker = handover.waker.take();
        // A waker may poll here and now.
        drop(handover);
        if let Some(waker) = waker {
            waker.wake();
        }
    };
    thread::Builder::new().name(name).spawn(run)?;
    let result = poll_fn(|context| {
        let mut handover = locked(&handover);
        if let Some(result) = handover.result.take() {
            return Poll::Ready(result);
        }
        handover.waker = Some(context.waker().clone());
        Poll::Pending
    });
    let result = result.await;
    drop(guard);
    result.map_or_else(|panic| resume_unwind(panic), Ok)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lateness::AMPLE;
    use std::pin::{Pin, pin};
    use std::sync::mpsc;
    use std::task::{Context, Wake};

    #[test]
    fn work_is_done_on_a_thread_of_its_name() {
        let name = || thread::current().name().map(str::to_owned);
        assert_eq!(
            pollster::block_on(unblock("a-name".to_owned(), name)).unwrap().as_deref(),
            Some("a-name")
        );
    }

    #[test]
    fn a_panic_of_the_work_is_one_of_the_future() {
        let (sender, ended) = mpsc::channel();
        thread::spawn(move || {
            let work = || -> u32 { resume_unwind(Box::new("the work's own")) };
            let panic = catch_unwind(|| pollster::block_on(unblock("panics".to_owned(), work)))
                .unwrap_err();
            sender.send(*panic.downcast::<&str>().unwrap()).unwrap();
        });
        assert_eq!(
            ended.recv_timeout(AMPLE),
            Ok("the work's own"),
            "the future must not wait for ever"
        );
    }

    /// Polls as soon as it is woken, on the thread that wakes it, as some executors do.
    struct PollsAtOnce {
        future: Mutex<Pin<Box<dyn Future<Output = io::Result<u32>> + Send>>>,
        ready: mpsc::Sender<u32>,
    }

    impl PollsAtOnce {
        fn poll(self: &Arc<Self>) -> Poll<io::Result<u32>> {
            let waker = Waker::from(Arc::clone(self));
            self.future.lock().unwrap().as_mut().poll(&mut Context::from_waker(&waker))
        }
    }

    impl Wake for PollsAtOnce {
        fn wake(self: Arc<Self>) {
            if let Poll::Ready(result) = self.poll() {
                self.ready.send(result.unwrap()).unwrap();
            }
        }
    }

    #[test]
    fn a_waker_that_polls_finds_the_result() {
        let (go, gone) = mpsc::channel::<()>();
        let (sender, ready) = mpsc::channel();
        let work = move || {
            gone.recv().unwrap();
            7
        };
        let task = Arc::new(PollsAtOnce {
            future: Mutex::new(Box::pin(unblock("polls".to_owned(), work))),
            ready: sender,
        });
        assert!(task.poll().is_pending());
        go.send(()).unwrap();
        assert_eq!(ready.recv_timeout(AMPLE), Ok(7));
    }

    #[test]
    fn a_future_that_is_dropped_leaves_the_work_to_its_end() {
        let (go, gone) = mpsc::channel::<()>();
        let (sender, done) = mpsc::channel();
        let work = move || {
            gone.recv().unwrap();
            sender.send(()).unwrap();
        };
        {
            let future = pin!(unblock("goes on".to_owned(), work));
            assert!(future.poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        go.send(()).unwrap();
        assert_eq!(done.recv_timeout(AMPLE), Ok(()));
    }
}
