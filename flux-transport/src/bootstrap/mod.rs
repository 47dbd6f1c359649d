//! How ranks in processes of their own find each other, and how they talk from then on.
//!
//! Invariant: every step ends by its deadline with connections to all ranks or an error that names
//! who is at fault, and nothing is left in the file system. On one host only processes of the same
//! user take part: the directory of the rendezvous is private and every connection's user is asked
//! of the kernel. Within one user there is no secret: memory is shared with the peers later anyway.
//! Across hosts only processes take part that prove to hold the launch's secret.
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
//! The result is a full mesh: every rank sees every other's death by itself. Within a host it takes
//! no second round of names and connections, as a pair of sockets that the first rank made needs no
//! proof of who is at its other end. Ranks of several hosts first meet at rank 0's address over
//! TCP, learn who shares their host, and connect in pairs across hosts.

mod auth;
pub(crate) mod control;
mod directory;
mod door;
mod environment;
mod error;
mod frame;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod hello;
mod host_id;
mod inquiry;
pub(crate) mod launch;
mod link;
mod lobby;
mod monitor;
mod network;
mod plane;
mod regroup;
mod rendezvous;
mod roster;
mod secret;
mod socket;
mod tcp;
pub(crate) mod unblock;
mod unix;
pub(crate) mod world;

use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) use auth::random;
pub(crate) use environment::runtime_directory;
pub use environment::{
    Address, Environment, FLUX_LAUNCHER, FLUX_LOCAL_RANK, FLUX_RANK, FLUX_RENDEZVOUS, FLUX_WORLD_SIZE, HostPlace, NetworkPlace, Place,
};
pub use error::BootstrapError;
pub use host_id::FLUX_HOST_ID;
pub use rendezvous::{Mesh, Rendezvous};
pub use secret::{FLUX_SECRET, FLUX_SECRET_FILE, Secret};

use crate::bootstrap::control::ControlPlane;
use crate::{World, WorldError};

const WAITING_FOR_RANKS: &str = "waiting for all ranks to start";
/// How long the ranks of a launch may come one after another: a program may load a large framework
/// first.
pub(crate) const START: Duration = Duration::from_mins(1);
/// For one answer. A rank reads its answers at once; who does not is not waited for.
const ANSWER: Duration = Duration::from_millis(100);

/// This process's rank, from the variables of a launcher; the ranks may take so long to come.
///
/// # Errors
/// [`WorldError::NoLauncher`] where no launcher's variables are set, [`WorldError::Bootstrap`] for
/// the rest.
pub(crate) fn from_env(deadline: Duration) -> Result<World, WorldError> {
    let environment = Environment::read()?;
    let control = join(&environment, start_by(deadline))?;
    Ok(World::launched(environment, control))
}

/// When ranks that may take so long have to be there.
pub(crate) fn start_by(deadline: Duration) -> Instant {
    // Longer waits are a mistake, and their ends could not be computed.
    Instant::now() + deadline.min(Duration::from_hours(24))
}

/// Meets the other ranks of a launch: this rank's end of their control plane. Blocks until all are
/// there.
///
/// # Errors
/// See [`BootstrapError`].
pub fn join(environment: &Environment, deadline: Instant) -> Result<Arc<dyn ControlPlane>, BootstrapError> {
    environment.rendezvous().meet_blocking(deadline)?.into_control_plane()
}
