//! The communicator of a rank's calls, which another thread may take away.
//!
//! Invariant: whoever uses the communicator holds the lock, and holds it only for calls that wait for nobody; once it was taken, nobody uses it. One that
//! nobody has taken is given up with the link.

use super::library::NcclError;
use super::messages::{Group, Messages};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What a multiprocessor carries at most of one message before NCCL gives the message twice as many: within a host, 32 pieces of 512 KiB (2.28, `addP2pToPlan`).
const PART_BYTES: u64 = 16 << 20;

/// The largest message that leaves some of `ctas` multiprocessors to others.
fn alone(ctas: u32) -> u64 {
    u64::from(ctas).next_power_of_two() * PART_BYTES / 2
}

/// One rank's end of the messages.
#[derive(Debug)]
pub(crate) struct Link {
    messages: Mutex<Option<Messages>>,
    deadline: Duration,
    alone: u64,
}

impl Link {
    /// Of a communicator whose kernels take `ctas` multiprocessors.
    pub(super) fn new(messages: Messages, ctas: u32, deadline: Duration) -> Self {
        Self { messages: Mutex::new(Some(messages)), deadline, alone: alone(ctas) }
    }

    /// Larger messages have all multiprocessors and go by themselves; the same on all ranks.
    pub(super) const fn alone(&self) -> u64 {
        self.alone
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_goes_by_itself_once_it_has_all_multiprocessors() {
        // As NCCL counts, from one.
        let given = |bytes: u64, ctas: u64| {
            let mut channels = 1;
            while bytes.div_ceil(channels) > PART_BYTES && channels <= ctas / 2 {
                channels *= 2;
            }
            channels
        };
        for ctas in [2, 4, 8, 16, 32] {
            assert!(given(alone(ctas), ctas.into()) < ctas.into());
            assert_eq!(given(alone(ctas) + 1, ctas.into()), ctas.into());
        }
    }
}
