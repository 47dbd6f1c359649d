//! The ranks of several hosts meet at rank 0's address, over TCP.
//!
//! Invariant: nobody takes part without the secret, on any connection; every wait ends by the
//! deadline. All ranks take three steps:
//!
//! 1. All come to rank 0 with hello, host and own address, and get the roster of all.
//! 2. Across hosts each rank connects to the lower ranks, then accepts the higher ones.
//! 3. Within a host the first rank connects the others by a Unix socket in a private directory.
//!
//! A connection to rank 0 becomes the link to it where the hosts differ. In step 2 a rank waits for
//! lower ones only, so no two wait for each other.

mod lead;
mod pairs;
mod resolve;
mod visit;

use std::os::fd::OwnedFd;
use std::time::Instant;

use flux_core::{Rank, WorldSize};

use super::hello::Hello;
use super::roster::Roster;
use super::unix::UnixRendezvous;
use crate::bootstrap::control::Hosts;
use crate::bootstrap::environment::{HostPlace, NetworkPlace};
use crate::bootstrap::error::BootstrapError;
use crate::bootstrap::host_id::HostId;
use crate::bootstrap::link::Link;
use crate::bootstrap::mesh::Mesh;

/// One rank of a launch that may be on several hosts.
#[derive(Clone, Debug)]
pub(crate) struct TcpRendezvous {
    pub(crate) rank: Rank,
    pub(crate) world: WorldSize,
    pub(crate) place: NetworkPlace,
}

/// What a rank has after the first step.
#[derive(Debug)]
struct Met {
    roster: Roster,
    /// At rank 0, connections to all others; elsewhere the one to rank 0.
    links: Vec<(Rank, Link)>,
    /// Where this rank listens to higher ones; none at rank 0, which they know already.
    listener: Option<OwnedFd>,
}

impl TcpRendezvous {
    fn hello(&self, nonce: u128) -> Hello {
        Hello::of(self.rank, self.world, nonce)
    }

    fn host(&self) -> HostId {
        HostId::here(&self.place.directory, self.place.host_id.as_deref())
    }

    /// Sockets to the ranks of this host.
    fn neighbours(
        &self,
        group: Vec<Rank>,
        meeting: u128,
        deadline: Instant,
    ) -> Result<Vec<OwnedFd>, BootstrapError> {
        // Ranks that were set apart may see the same directory; each host id has its own below it.
        let place =
            HostPlace::below(&self.place.directory, meeting ^ u128::from_le_bytes(self.host().0));
        UnixRendezvous { rank: self.rank, world: self.world, group, place }.sockets(deadline)
    }
}

impl TcpRendezvous {
    pub(crate) fn meet(&self, deadline: Instant) -> Result<Mesh, BootstrapError> {
        if self.world.peers() == 0 {
            return Ok(Mesh::new(self.rank, self.world, Vec::new()));
        }
        let listener = if self.rank == Rank::new(0) { self.take_address(deadline)? } else { None };
        let Met { roster, mut links, listener } = match listener {
            Some(listener) => self.lead(listener, deadline)?,
            // A second rank 0 knocks like any other, so that the first tells everybody.
            None => self.visit(deadline)?,
        };
        let names: Vec<HostId> = roster.ranks.iter().map(|whereabouts| whereabouts.host).collect();
        let hosts = Hosts::group(&names);
        links.retain(|&(peer, _)| !hosts.together(self.rank, peer));
        if let Some(listener) = listener {
            links.extend(self.connect_pairs(&roster, &hosts, listener, deadline)?);
        }
        let group: Vec<Rank> = hosts.ranks(hosts.of(self.rank)).collect();
        let neighbours = group.iter().copied().filter(|&peer| peer != self.rank);
        let sockets = self.neighbours(group.clone(), roster.meeting, deadline)?;
        links.extend(neighbours.zip(sockets.into_iter().map(Link::Unix)));
        Ok(Mesh::across(self.rank, self.world, hosts, links))
    }
}
