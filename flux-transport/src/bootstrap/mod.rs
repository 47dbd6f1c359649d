//! How ranks in processes of their own find each other, and how they talk from then on.
//!
//! Invariant: every step ends by its deadline, with connections to all ranks or an error that names
//! who is at fault, and leaves nothing in the file system. On one host only processes of one user
//! take part, across hosts only those that hold the launch's secret.
//!
//! First they exchange bytes, by a [`Rendezvous`]: where each is. With that they make a mesh, and
//! every rank sees every other's death by itself. The first rank of a host connects the others:
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

mod connection;
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
mod mesh;
mod names;
mod process;
mod random;
mod rendezvous;
mod resolve;
mod route;
mod secret;
mod socket;
mod tcp;
pub(crate) mod unblock;
pub(crate) mod world;

pub(crate) use deadlines::START;
pub use environment::{Environment, HostPlace, Place};
pub use error::BootstrapError;
pub use join::join;
pub(crate) use mesh::{Joining, Site};
pub use names::{
    FLUX_ADDRESS, FLUX_HOST_ID, FLUX_LAUNCHER, FLUX_LOCAL_RANK, FLUX_RANK, FLUX_RENDEZVOUS,
    FLUX_SECRET, FLUX_SECRET_FILE, FLUX_WORLD_SIZE,
};
pub(crate) use random::random;
pub use rendezvous::{Rendezvous, ThreadRendezvous};
pub use secret::Secret;
