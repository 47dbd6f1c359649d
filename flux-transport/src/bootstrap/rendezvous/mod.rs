//! How the processes of a launch meet.
//!
//! Invariant: every step ends by its deadline, with connections to all ranks or an error that names
//! who is at fault. A waiting rank holds nothing in the file system, but for the first rank of a
//! host, which holds the name of a socket.

pub(super) mod auth;
mod directory;
mod gather;
pub(super) mod hello;
mod listener;
mod network;
pub(super) mod roster;
mod unix;

use super::environment::{Environment, Place};
use super::error::BootstrapError;
use super::mesh::Mesh;
use network::TcpRendezvous;
use std::time::Instant;
use unix::UnixRendezvous;

/// Connects this rank to all others of its launch. Blocks until all are there.
///
/// # Errors
/// At the deadline, [`BootstrapError::Timeout`] names the missing ranks.
pub(super) fn meet(environment: &Environment, deadline: Instant) -> Result<Mesh, BootstrapError> {
    let (rank, world) = (environment.rank, environment.world);
    match &environment.place {
        Place::Host(place) => UnixRendezvous::new(rank, world, place.clone()).meet(deadline),
        Place::Network(place) => TcpRendezvous { rank, world, place: place.clone() }.meet(deadline),
    }
}
