//! What a rendezvous gives: connections to all ranks.
//!
//! Invariant: whoever waits here holds nothing in the file system but, at the first rank of a host,
//! the name of a socket.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use flux_core::{Rank, WorldSize};

use super::error::BootstrapError;
use super::link::Link;
use super::plane::ProcessControl;
use crate::bootstrap::control::{ControlPlane, Hosts};
use crate::bootstrap::unblock::unblock;

/// How the ranks of a launch meet.
#[async_trait]
pub trait Rendezvous: Send + Sync {
    /// Returns when every rank has come, on this thread.
    ///
    /// # Errors
    /// See [`BootstrapError`]; at the deadline, [`BootstrapError::Timeout`] names the ranks that
    /// are missing.
    fn meet_blocking(&self, deadline: Instant) -> Result<Mesh, BootstrapError>;

    /// Returns when every rank has come; the caller's thread stays free. A future dropped before
    /// leaves the attempt to end by its deadline, and then to the peers this rank is lost.
    ///
    /// # Errors
    /// As [`meet_blocking`](Self::meet_blocking).
    async fn meet(&self, deadline: Instant) -> Result<Mesh, BootstrapError>;
}

/// Connections to all ranks.
#[derive(Debug)]
pub struct Mesh {
    pub(super) rank: Rank,
    pub(super) world: WorldSize,
    pub(super) hosts: Hosts,
    /// By rank, none to itself.
    pub(super) links: Vec<Option<Link>>,
}

impl Mesh {
    /// Of the sockets to the other ranks, all of this host, in rank order.
    pub(super) fn new(rank: Rank, world: WorldSize, sockets: Vec<OwnedFd>) -> Self {
        let peers = world.ranks().filter(|&peer| peer != rank);
        let links = peers.zip(sockets.into_iter().map(Link::Unix));
        Self::across(rank, world, Hosts::one(world), links)
    }

    /// Of the connections to the other ranks.
    pub(super) fn across(rank: Rank, world: WorldSize, hosts: Hosts, links: impl IntoIterator<Item = (Rank, Link)>) -> Self {
        let mut places: Vec<Option<Link>> = world.ranks().map(|_| None).collect();
        for (peer, link) in links {
            places[peer.index()] = Some(link);
        }
        debug_assert!(world.ranks().all(|peer| peer == rank || places[peer.index()].is_some()), "every rank is connected");
        Self { rank, world, hosts, links: places }
    }

    /// Keeps the connections as a control plane, watched by a thread of its own.
    ///
    /// # Errors
    /// [`BootstrapError::Io`] where the system gives no thread.
    pub fn into_control_plane(self) -> Result<Arc<dyn ControlPlane>, BootstrapError> {
        Ok(Arc::new(ProcessControl::start(self)?))
    }
}

/// Meets on a thread of its own.
pub(super) async fn apart(meet: impl FnOnce() -> Result<Mesh, BootstrapError> + Send + 'static) -> Result<Mesh, BootstrapError> {
    let thread = unblock("flux-rendezvous".to_owned(), meet).await;
    thread.map_err(|source| BootstrapError::Io { step: "starting the thread of the rendezvous", source })?
}
