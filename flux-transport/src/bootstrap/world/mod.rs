//! A rank's place in a launch.
//!
//! Invariant: the rank is present to its peers as long as a [`World`] or a communicator of it
//! lives. The last one to go says goodbye, unless its thread is panicking.

mod builder;
mod error;

pub use builder::Builder;
pub use error::WorldError;

use crate::bootstrap::control::{
    Collective, ControlPlane, Hosts, Launch, LocalControl, local_planes,
};
use crate::bootstrap::deadlines::{START, start_by};
use crate::bootstrap::environment::Environment;
use crate::bootstrap::mesh::Joining;
use flux_core::{Rank, WorldSize};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// One rank's view of a launch.
#[derive(Debug)]
pub struct World {
    membership: Arc<Membership>,
    /// Of which communicator the [steps](Self::steps) are that are taken by this handle.
    communicator: u32,
    /// Identifies a communicator and its rebuilt successors, each of which is the first of a new
    /// world.
    lineage: u32,
}

/// Says goodbye when nobody needs the rank's peers any more.
#[derive(Debug)]
pub(crate) struct Membership {
    control: Arc<dyn ControlPlane>,
    local_rank: u32,
    /// How the rank joined, and joins again; threads do not.
    joining: Option<Joining>,
    /// Communicators connected so far. All ranks connect in one order, so a number names one
    /// communicator.
    communicators: AtomicU32,
}

impl World {
    /// Takes this process's rank from its launcher: flux's own, torchrun, Open MPI, MPICH or Slurm
    /// (variables: [`Environment`](crate::Environment)). Blocks until the other ranks come, a
    /// minute at most; asynchronous programs use `spawn_blocking`.
    ///
    /// # Errors
    /// [`WorldError::NoLauncher`] without a launcher; others name the variable or the missing
    /// ranks.
    pub fn from_env() -> Result<Self, WorldError> {
        Self::from_env_with(START)
    }

    /// As [`from_env`](Self::from_env), with more time for ranks that load a model first. All ranks
    /// give the same.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_env_with(deadline: Duration) -> Result<Self, WorldError> {
        pollster::block_on(Self::join(deadline))
    }

    /// As [`from_env_with`](Self::from_env_with), for asynchronous programs; dropping the future
    /// ends the wait.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub async fn join(deadline: Duration) -> Result<Self, WorldError> {
        let environment = Environment::read()?;
        let joining = Joining::new(&environment);
        let control = joining.join(start_by(deadline)).await?;
        Ok(Self::joined(environment.local_rank, joining, control))
    }

    /// Makes `n` ranks as threads of this process; move each into its thread.
    ///
    /// # Errors
    /// [`WorldError::Size`] if `n` is 0 or above [`MAX_WORLD`](flux_core::rank::MAX_WORLD).
    pub fn local(n: u32) -> Result<Vec<Self>, WorldError> {
        let planes = local_planes(n).ok_or(WorldError::Size { size: n })?;
        Ok(planes.into_iter().map(|plane| Self::new(plane.rank().get(), plane)).collect())
    }

    /// A world of one rank.
    pub fn single() -> Self {
        const ONE: WorldSize = WorldSize::new(1).expect("1 is a world size");
        Self::new(0, Arc::new(LocalControl::world_of(ONE).remove(0)))
    }

    /// A rank over a control plane. `local_rank` numbers the ranks of this machine.
    pub(crate) fn new(local_rank: u32, control: Arc<dyn ControlPlane>) -> Self {
        Self::with(local_rank, control, None)
    }

    /// A rank that has joined, and can do so again.
    fn joined(local_rank: u32, joining: Joining, control: Arc<dyn ControlPlane>) -> Self {
        Self::with(local_rank, control, Some(joining))
    }

    /// The same process or thread as a rank of another world.
    pub(crate) fn moved(&self, control: Arc<dyn ControlPlane>) -> Self {
        Self::with(self.local_rank(), control, self.joining_again())
    }

    fn with(local_rank: u32, control: Arc<dyn ControlPlane>, joining: Option<Joining>) -> Self {
        Self {
            membership: Arc::new(Membership {
                control,
                local_rank,
                joining,
                communicators: AtomicU32::new(0),
            }),
            communicator: 0,
            lineage: 0,
        }
    }

    /// How the rank joins the next generation of its launch.
    pub(crate) fn joining_again(&self) -> Option<Joining> {
        let joining = self.membership.joining.clone()?;
        Some(Joining { generation: joining.generation + 1, ..joining })
    }

    /// A handle for the communicator about to be connected. The number is taken before the ranks
    /// meet, so threads that connect at once are told apart.
    pub(crate) fn connecting(&self) -> Self {
        let communicator = self.membership.communicators.fetch_add(1, Ordering::Relaxed);
        Self { communicator, lineage: communicator, ..self.share() }
    }

    /// A handle of the same communicator, which succeeds those of `lineage`.
    pub(crate) fn of_lineage(&self, lineage: u32) -> Self {
        Self { lineage, ..self.share() }
    }

    /// Gives this handle's number back, as the ranks have not met to connect.
    pub(crate) fn not_met(&self) {
        // If another thread has taken a number meanwhile, connecting reports the mismatch.
        let taken = self.communicator.wrapping_add(1);
        let _ = self.membership.communicators.compare_exchange(
            taken,
            self.communicator,
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
    }

    /// Which of the world's communicators this handle is of.
    pub(crate) const fn communicator(&self) -> u32 {
        self.communicator
    }

    /// Of which lineage of successors its communicator is.
    pub(crate) const fn lineage(&self) -> u32 {
        self.lineage
    }

    /// The steps of this handle's communicator.
    pub(crate) fn steps(&self) -> Collective<'_> {
        Collective::new(self.control(), self.communicator)
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.control().rank()
    }

    /// Number of ranks.
    pub fn size(&self) -> WorldSize {
        self.control().world()
    }

    /// This rank's number on its machine: its device by default.
    pub fn local_rank(&self) -> u32 {
        self.membership.local_rank
    }

    /// What the ranks are.
    pub fn launch(&self) -> Launch {
        self.control().kind()
    }

    /// Which ranks share a host, and so can share memory.
    pub fn hosts(&self) -> &Hosts {
        self.control().hosts()
    }

    /// This rank's end of the control plane. No part of the API: for the other crates of this
    /// workspace.
    #[doc(hidden)]
    pub fn control(&self) -> &dyn ControlPlane {
        self.membership.control()
    }

    /// The same, for who may outlive the rank's presence.
    pub(crate) fn control_handle(&self) -> Weak<dyn ControlPlane> {
        Arc::downgrade(&self.membership.control)
    }

    /// Another handle to the same rank.
    pub(crate) fn share(&self) -> Self {
        Self {
            membership: Arc::clone(&self.membership),
            communicator: self.communicator,
            lineage: self.lineage,
        }
    }
}

impl Membership {
    fn control(&self) -> &dyn ControlPlane {
        &*self.control
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.control.goodbye();
        }
    }
}
