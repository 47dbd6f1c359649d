//! The ranks of one host exchange bytes at a Unix socket in a private directory.

use async_trait::async_trait;
use flux_core::{Rank, WorldSize};
use std::time::Instant;

use super::host_group::HostGroup;
use super::roster::Roster;
use super::{Rendezvous, gather};
use crate::bootstrap::environment::HostPlace;
use crate::bootstrap::error::BootstrapError;
use crate::bootstrap::unblock::on_own_thread;

/// One rank's end.
#[derive(Clone, Debug)]
pub(crate) struct UnixRendezvous(HostGroup);

impl UnixRendezvous {
    pub(crate) fn new(rank: Rank, world: WorldSize, place: HostPlace) -> Self {
        Self(HostGroup { rank, world, group: world.ranks().collect(), place })
    }
}

#[async_trait]
impl Rendezvous for UnixRendezvous {
    async fn exchange(
        &self,
        _generation: u64,
        payload: Vec<u8>,
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let Self(ranks) = self.clone();
        let exchange = move || match ranks.gather(deadline)? {
            Some(members) => Ok(gather::tell_all(payload, members)),
            None => ranks.visit(&payload, deadline, |bytes, sockets| {
                let none = sockets.is_empty();
                Roster::decode(bytes, ranks.world).filter(|_| none).map(|roster| roster.payloads)
            }),
        };
        on_own_thread(exchange).await
    }
}
