//! How ranks in processes of their own find each other, and how they talk from then on.
//!
//! Invariant: every step ends by its deadline with sockets to all ranks or an error that names who is at fault, and nothing is left in the
//! file system. Only processes of the same user take part: the directory of the rendezvous is private and every connection's user is asked of
//! the kernel. Within one user there is no secret: memory is shared with the peers later anyway.
//!
//! ```text
//! rank 0                                        rank r
//! takes the name, listens                       connects, again and again until the name is there
//! accepts, checks the user           <- hello   rank, world, version, launch, process
//!   tells who is missing             waiting -> kept for the error at the deadline
//! all there: a socket pair per two ranks
//!   deals each rank its row          welcome -> W - 1 sockets by SCM_RIGHTS
//! removes the name
//! ```
//!
//! The result is a full mesh without a second round of names and connections: a pair of sockets that rank 0 made needs no proof of who is at
//! its other end, and every rank sees every other's death by itself.

mod directory;
mod environment;
mod error;
mod frame;
mod hello;
mod inquiry;
mod lobby;
mod monitor;
mod plane;
mod regroup;
mod rendezvous;
mod socket;

use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) use environment::runtime_directory;
pub use environment::{Environment, FLUX_LOCAL_RANK, FLUX_RANK, FLUX_RENDEZVOUS, FLUX_WORLD_SIZE, Place};
pub use error::BootstrapError;
pub use rendezvous::{Mesh, Rendezvous, UnixRendezvous};

use crate::control::ControlPlane;
use crate::{World, WorldError};

const WAITING_FOR_RANKS: &str = "waiting for all ranks to start";
/// How long the ranks of a launch may come one after another: a program may load a large framework first.
pub(crate) const START: Duration = Duration::from_mins(1);

/// This process's rank, from the variables of a launcher.
///
/// # Errors
/// [`WorldError::NoLauncher`] where no launcher's variables are set, [`WorldError::Bootstrap`] for the rest.
pub(crate) fn from_env() -> Result<World, WorldError> {
    let environment = Environment::read()?;
    let control = join(&environment, Instant::now() + START)?;
    Ok(World::launched(environment, control))
}

/// Meets the other ranks of a launch: this rank's end of their control plane. Blocks until all are there.
///
/// # Errors
/// See [`BootstrapError`].
pub fn join(environment: &Environment, deadline: Instant) -> Result<Arc<dyn ControlPlane>, BootstrapError> {
    UnixRendezvous::new(environment.clone()).meet_blocking(deadline)?.into_control_plane()
}
