//! How a rank hears its leader's verdict.
//!
//! Invariant: the wait ends by its deadline, and the leader hears who gives up.

use std::os::fd::OwnedFd;
use std::time::Instant;

use flux_core::{Rank, WorldSize};
use rustix::io::Errno;

use super::hello::{GIVING_UP, Reply};
use super::roster::MAX_ROSTER;
use crate::bootstrap::connection::Connection;
use crate::bootstrap::error::BootstrapError;
use crate::bootstrap::socket::Received;

/// The rank that others listen to, in the words of errors.
pub(super) struct Leader {
    pub name: &'static str,
    /// The step of listening to it.
    pub listening: &'static str,
}

/// Waits on `link` for the verdict of `leader`. `taken` reads what a rank that is taken in
/// receives, or returns `None` where that is something else. `missing` becomes the ranks that are
/// missing, as the leader says.
///
/// Returns `None` if the connection ended without a verdict.
pub(super) fn await_verdict<T>(
    (link, leader): (&Connection, &Leader),
    (rank, world): (Rank, WorldSize),
    deadline: Instant,
    missing: &mut u32,
    taken: impl Fn(&[u8], &mut Vec<OwnedFd>) -> Option<T>,
) -> Result<Option<T>, BootstrapError> {
    let mut buffer = vec![0; MAX_ROSTER];
    loop {
        let received = link.await_message(&mut buffer, deadline);
        if matches!(received, Ok(Received::Nothing) | Err(Errno::CANCELED)) {
            // Tells all ranks now who is missing, if the leader still lives.
            let _ = link.send(&[&GIVING_UP], &[], deadline);
        }
        let mut message = match received.map_err(BootstrapError::io(leader.listening))? {
            Received::Message(message) => message,
            Received::Nothing | Received::End => return Ok(None),
            Received::Oversized => {
                return Err(BootstrapError::Protocol(format!(
                    "an answer of {} is too long",
                    leader.name
                )));
            }
        };
        if message.cut {
            return Err(BootstrapError::io(leader.listening)(Errno::MFILE));
        }
        let none = message.descriptors.is_empty();
        match Reply::decode(&buffer[..message.length]) {
            Some(Reply::Waiting { missing: now }) if none => *missing = now,
            Some(Reply::Refused(refusal)) if none => return Err(refusal.into_error(rank, world)),
            reply => {
                let (bytes, count) = (&buffer[..message.length], message.descriptors.len());
                return taken(bytes, &mut message.descriptors).map(Some).ok_or_else(|| {
                    BootstrapError::Protocol(format!(
                        "{} answered {reply:?} with {count} descriptors",
                        leader.name
                    ))
                });
            }
        }
    }
}
