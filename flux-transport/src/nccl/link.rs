//! The communicator of a rank's calls, which another thread may take away.
//!
//! Invariant: whoever uses the communicator holds the lock, and holds it only for calls that wait for nobody; once it was taken, nobody uses it. One that
//! nobody has taken is given up with the link.

use super::library::NcclError;
use super::messages::{Group, Messages};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// One rank's end of the messages.
#[derive(Debug)]
pub(crate) struct Link {
    messages: Mutex<Option<Messages>>,
    deadline: Duration,
}

impl Link {
    /// Whose calls of NCCL have `deadline`.
    pub(super) fn new(messages: Messages, deadline: Duration) -> Self {
        Self { messages: Mutex::new(Some(messages)), deadline }
    }

    fn messages(&self) -> MutexGuard<'_, Option<Messages>> {
        // Every critical section leaves the communicator usable, or taken.
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts one group of messages on `stream`; returns when it is there.
    pub(super) fn group(&self, stream: usize, fill: impl FnOnce(&Group<'_>) -> Result<(), NcclError>) -> Result<(), NcclError> {
        let until = Instant::now() + self.deadline;
        {
            let messages = self.messages();
            let group = messages.as_ref().ok_or(NcclError::GivenUp)?.group(stream)?;
            fill(&group)?;
            group.end()?;
        }
        // NCCL puts it there by a thread of its own: tens of microseconds.
        while !self.is_ready()? {
            if Instant::now() >= until {
                return Err(NcclError::Slow { what: "a group of messages" });
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// NCCL's error, where something has failed.
    pub(super) fn is_ready(&self) -> Result<bool, NcclError> {
        self.messages().as_ref().ok_or(NcclError::GivenUp)?.is_ready()
    }

    /// Takes the communicator, to end it.
    pub(crate) fn take(&self) -> Option<Messages> {
        self.messages().take()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some(messages) = self.take() {
            messages.abort();
        }
    }
}
