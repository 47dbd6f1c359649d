//! How the ranks of a launch exchange bytes before they are connected.
//!
//! Invariant: every step ends by its deadline, with the bytes of all ranks or an error that names
//! who is at fault. What is built with the bytes, and all that follows, is the mesh's affair.

pub(super) mod auth;
mod directory;
mod gather;
pub(super) mod hello;
mod host_group;
mod listener;
pub(super) mod roster;
mod tcp;
mod threads;
mod unix;
mod verdict;

pub(super) use self::gather::{Member, dismiss};
pub(super) use self::host_group::HostGroup;
pub(super) use self::listener::{Caller, LaunchKey, Listener};
pub(super) use self::tcp::TcpRendezvous;
pub use self::threads::ThreadRendezvous;
pub(super) use self::unix::UnixRendezvous;
use super::error::BootstrapError;
use async_trait::async_trait;
use std::fmt::Debug;
use std::time::Instant;

/// How the ranks of a launch exchange bytes before they are connected: one rank's end.
///
/// Threads ([`ThreadRendezvous`]), a Unix socket
/// ([`Builder::on_host`](crate::Builder::on_host)) and TCP
/// ([`Builder::across_hosts`](crate::Builder::across_hosts)) are three. A program may bring its
/// own, as an engine's channel or a key-value store, for [`Builder::meet`](crate::Builder::meet):
/// `flux-transport/examples/rendezvous.rs` has one over files.
///
/// Ranks connect with what they have exchanged, so only ranks may read and write it.
#[async_trait]
pub trait Rendezvous: Debug + Send + Sync {
    /// Gives `payload`, at most 4 KiB, to every rank; returns what each gave, by rank, this one
    /// included.
    ///
    /// `generation` tells the exchanges of one group apart, and is the same on all ranks: 0, or
    /// what [`Builder::generation`](crate::Builder::generation) says, and one more for each
    /// [rebuild](crate::Rebuild::Whole). Dropping the future ends the wait.
    ///
    /// # Errors
    /// At the deadline [`BootstrapError::Timeout`] with the missing ranks;
    /// [`BootstrapError::Rendezvous`] for what else goes wrong.
    async fn exchange(
        &self,
        generation: u64,
        payload: Vec<u8>,
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, BootstrapError>;
}
