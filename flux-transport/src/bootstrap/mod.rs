//! How ranks in processes of their own find each other, and how they talk from then on.
//!
//! Invariant: every step ends by its deadline, with connections to all ranks or an error that names
//! who is at fault, and leaves nothing in the file system. On one host only processes of one user
//! take part, across hosts only those that hold the launch's secret.
//!
//! ```text
//! first rank of a host                          another rank of it
//! takes the name, listens                       connects, again and again until the name is there
//! accepts, checks the user           <- hello   rank, world, version, launch, process
//!   tells who is missing             waiting -> kept for the error at the deadline
//! all there: a socket pair per two ranks
//!   deals each rank its row          welcome -> sockets to the others by SCM_RIGHTS
//! removes the name
//! ```
//!
//! The result is a full mesh: every rank sees every other's death by itself. Ranks of several hosts
//! first meet at rank 0's address over TCP, learn who shares their host, and connect in pairs.

pub(crate) mod control;
mod credentials;
mod deadlines;
mod environment;
mod error;
mod fork;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod host_id;
mod join;
pub(crate) mod launch;
mod link;
mod mesh;
mod names;
mod process;
mod random;
mod rendezvous;
mod secret;
mod socket;
mod tcp;
pub(crate) mod unblock;
pub(crate) mod world;

pub(crate) use deadlines::START;
pub use environment::{Address, Environment, HostPlace, NetworkPlace, Place};
pub use error::BootstrapError;
pub use join::join;
pub use names::{
    FLUX_HOST_ID, FLUX_LAUNCHER, FLUX_LOCAL_RANK, FLUX_RANK, FLUX_RENDEZVOUS, FLUX_SECRET,
    FLUX_SECRET_FILE, FLUX_WORLD_SIZE,
};
pub(crate) use random::random;
pub use secret::Secret;
