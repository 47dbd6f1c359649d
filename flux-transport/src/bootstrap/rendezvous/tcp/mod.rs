//! The ranks of several hosts exchange bytes at rank 0's address, over TCP.
//!
//! Invariant: nobody takes part without the secret; every wait ends by the deadline. All come to
//! rank 0 with hello and payload, and get the roster of all.

mod lead;
mod visit;

use async_trait::async_trait;
use flux_core::{Rank, WorldSize};
use std::time::Instant;

use super::Rendezvous;
use super::hello::Hello;
use crate::bootstrap::environment::NetworkPlace;
use crate::bootstrap::error::BootstrapError;
use crate::bootstrap::unblock::on_own_thread;

/// One rank's end.
#[derive(Clone, Debug)]
pub(crate) struct TcpRendezvous {
    pub(crate) rank: Rank,
    pub(crate) world: WorldSize,
    pub(crate) place: NetworkPlace,
}

impl TcpRendezvous {
    fn hello(&self) -> Hello {
        Hello::of(self.rank, self.world, self.place.launch)
    }

    fn exchanged(
        &self,
        payload: Vec<u8>,
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let listener = if self.rank == Rank::new(0) { self.take_address(deadline)? } else { None };
        match listener {
            Some(listener) => self.lead(listener, payload, deadline),
            // A second rank 0 knocks like any other, so that the first tells everybody.
            None => self.visit(&payload, deadline),
        }
    }
}

#[async_trait]
impl Rendezvous for TcpRendezvous {
    async fn exchange(
        &self,
        _generation: u64,
        payload: Vec<u8>,
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let end = self.clone();
        on_own_thread(move || end.exchanged(payload, deadline)).await
    }
}
