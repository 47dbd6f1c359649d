//! Whether a communicator still works.
//!
//! Invariant: the first fault that is seen is the fault; it never changes and never goes away. Whoever sets it without a record on the device also sets
//! the abort word, so that no wait outlives it.

use crate::control::Notice;
use crate::fault::reason;
use crate::{Fault, Transport};
use flux_core::Rank;
use std::sync::OnceLock;

/// A transport and what went wrong with it.
#[derive(Debug)]
pub(super) struct Health {
    rank: Rank,
    transport: Box<dyn Transport>,
    /// With the value of the abort word, 0 where a wait failed by itself.
    first: OnceLock<(Fault, u32)>,
}

impl Health {
    pub(super) fn new(rank: Rank, transport: Box<dyn Transport>) -> Self {
        Self { rank, transport, first: OnceLock::new() }
    }

    pub(super) fn transport(&self) -> &dyn Transport {
        &*self.transport
    }

    /// The first fault, if there is one. Does not synchronise.
    pub(super) fn status(&self) -> Result<(), Fault> {
        if self.first.get().is_none() {
            let Some(record) = self.transport.read_fault() else {
                return Ok(());
            };
            // Loses to an abort noted since: the record may be what that abort led to.
            let _ = self.first.set((Fault::from_record(&record), record.abort));
        }
        self.first.get().map_or(Ok(()), |(fault, _)| Err(fault.clone()))
    }

    /// Takes note of what a peer did.
    pub(super) fn notice(&self, notice: Notice) {
        match notice {
            // a rank whose thread panicked is as gone as one whose process died
            Notice::Lost(rank) | Notice::Aborted { by: rank, reason: reason::PANICKED } => {
                self.abort(Fault::PeerLost { rank }, reason::PEER_LOST);
            }
            Notice::Aborted { by, reason } => self.abort(Fault::Aborted { rank: by, reason }, reason),
        }
    }

    /// This rank gives up.
    pub(super) fn give_up(&self, reason: u32) {
        self.abort(Fault::Aborted { rank: self.rank, reason }, reason);
    }

    fn abort(&self, fault: Fault, reason: u32) {
        let reason = reason.max(1);
        if self.status().is_ok() {
            let _ = self.first.set((fault, reason));
        }
        self.transport.set_abort(reason);
    }

    /// Sets the abort word of a new workspace if there was an abort before it.
    pub(super) fn carry_over(&self) {
        if let Some(&(_, reason)) = self.first.get() {
            self.transport.set_abort(reason.max(1));
        }
    }
}
