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

/// Waits on `link` for the verdict, of which `taken` makes what rank `rank` wants; `None` for what
/// it does not expect. Keeps in `missing` who is missing, as the leader says.
///
/// Returns `None` if the connection ended without a verdict.
pub(super) fn await_verdict<T>(
    link: &Connection,
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
        let mut message = match received.map_err(BootstrapError::io("listening to the leader"))? {
            Received::Message(message) => message,
            Received::Nothing | Received::End => return Ok(None),
            Received::Oversized => {
                return Err(BootstrapError::Protocol(
                    "an answer of the leader is too long".to_owned(),
                ));
            }
        };
        if message.cut {
            return Err(BootstrapError::io("taking connections from the leader")(Errno::MFILE));
        }
        let none = message.descriptors.is_empty();
        match Reply::decode(&buffer[..message.length]) {
            Some(Reply::Waiting { missing: now }) if none => *missing = now,
            Some(Reply::Refused(refusal)) if none => return Err(refusal.into_error(rank, world)),
            reply => {
                let (bytes, count) = (&buffer[..message.length], message.descriptors.len());
                return taken(bytes, &mut message.descriptors).map(Some).ok_or_else(|| {
                    BootstrapError::Protocol(format!(
                        "the leader answered {reply:?} with {count} descriptors"
                    ))
                });
            }
        }
    }
}
