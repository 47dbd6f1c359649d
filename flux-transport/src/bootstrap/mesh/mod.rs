//! Connections between all ranks, made with what they have exchanged.
//!
//! Invariant: a mesh has a connection to every other rank: to those of the same host by a Unix
//! socket, which passes descriptors, to others by TCP, under a secret. So each rank sees every
//! other's death by itself, whatever the rendezvous was.

mod connect;
mod deal;
mod pairs;
pub(super) mod whereabouts;

pub(crate) use self::connect::{Joining, Site};
use super::connection::Connection;
use super::control::Hosts;
use super::socket;
use flux_core::{Rank, WorldSize};
use rustix::io::Errno;
use std::os::fd::OwnedFd;

/// One rank's connections to all others.
#[derive(Debug)]
pub(crate) struct Mesh {
    pub(crate) rank: Rank,
    pub(crate) world: WorldSize,
    pub(crate) hosts: Hosts,
    pub(crate) links: Vec<Option<Connection>>,
}

impl Mesh {
    /// Takes the sockets to the other ranks, all of this host, in rank order.
    pub(crate) fn new(rank: Rank, world: WorldSize, sockets: Vec<OwnedFd>) -> Self {
        let peers = world.ranks().filter(|&peer| peer != rank);
        let links = peers.zip(sockets.into_iter().map(Connection::Unix));
        Self::across(rank, world, Hosts::one(world), links)
    }

    fn across(
        rank: Rank,
        world: WorldSize,
        hosts: Hosts,
        connected: impl IntoIterator<Item = (Rank, Connection)>,
    ) -> Self {
        let mut links: Vec<Option<Connection>> = world.ranks().map(|_| None).collect();
        for (peer, link) in connected {
            links[peer.index()] = Some(link);
        }
        debug_assert!(
            world.ranks().all(|peer| peer == rank || links[peer.index()].is_some()),
            "every rank is connected"
        );
        Self { rank, world, hosts, links }
    }
}

/// Makes a socket pair for every two of `count` ranks; returns, by rank, its sockets to the others.
pub(crate) fn socket_rows(count: usize) -> Result<Vec<Vec<OwnedFd>>, Errno> {
    let mut rows: Vec<Vec<OwnedFd>> = (0..count).map(|_| Vec::new()).collect();
    for first in 0..count {
        for second in first + 1..count {
            let (a, b) = socket::pair()?;
            rows[first].push(a);
            rows[second].push(b);
        }
    }
    Ok(rows)
}
