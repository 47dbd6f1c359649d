//! What a fork copies of a rank's connections.
//!
//! Invariant: only the process that connected is the rank. In a child of its fork every connection
//! is replaced by the null device under the same number. So the child neither sends nor receives,
//! and the rank's end shows at its peers while the child runs.

use crate::sync::locked;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, Once};

/// Descriptors of this process's connections; -1 is free. Read in a child without any lock, so the
/// list is fixed: each of a hundred worlds of a process may have ten.
static CONNECTED: [AtomicI32; 1024] = [const { AtomicI32::new(FREE) }; 1024];
const FREE: RawFd = -1;
/// Orders registrations, not what a child reads.
static REGISTERING: Mutex<()> = Mutex::new(());

/// A connection that children of a fork do not keep, until this is dropped.
#[derive(Debug)]
pub(super) struct NotForked(RawFd);

impl NotForked {
    /// Drop it before the descriptor is closed.
    pub(super) fn new(socket: BorrowedFd<'_>) -> Self {
        static HANDLER: Once = Once::new();
        HANDLER.call_once(|| {
            // SAFETY: the handler makes async-signal-safe system calls and reads atomics only.
            let code = unsafe { libc::pthread_atfork(None, None, Some(replace_in_child)) };
            if code != 0 {
                tracing::warn!(code, "a child of a fork will keep its parent's connections");
            }
        });
        let socket = socket.as_raw_fd();
        let _one = locked(&REGISTERING);
        let free = CONNECTED.iter().find(|place| place.load(Ordering::Relaxed) == FREE);
        if let Some(place) = free {
            place.store(socket, Ordering::Release);
        } else {
            tracing::warn!("too many connections: a child of a fork keeps this one");
        }
        Self(socket)
    }
}

impl Drop for NotForked {
    fn drop(&mut self) {
        let place = CONNECTED.iter().find(|place| place.load(Ordering::Relaxed) == self.0);
        if let Some(place) = place {
            place.store(FREE, Ordering::Release);
        }
    }
}

/// Runs in a child of a fork, before anything else of it.
extern "C" fn replace_in_child() {
    // SAFETY: a system call on a constant path.
    let null = unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
    if null < 0 {
        return;
    }
    for place in &CONNECTED {
        let socket = place.load(Ordering::Acquire);
        if socket != FREE {
            // SAFETY: two open descriptors of this child; whoever owns the number here has the null
            // device under it.
            unsafe { libc::dup3(null, socket, libc::O_CLOEXEC) };
        }
    }
    // SAFETY: opened above, and nobody else has it.
    unsafe { libc::close(null) };
}
