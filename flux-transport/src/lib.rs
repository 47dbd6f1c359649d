//! Ranks, how they meet, the memory that they share and what moves data between them.
//!
//! Invariant: on every transport a [`Communicator`] shows its memory as addresses laid out by
//! [`flux_core::layout`]. Every wait for a peer ends with data, a deadline, a loss or an abort.
//! Nothing here knows what a GEMM is.
//!
//! ```
//! use flux_transport::{Communicator, ConnectError, Select, World};
//! let worlds = World::local(2)?;
//! std::thread::scope(|scope| {
//!     let rank = |world| {
//!         let comm = Communicator::connect_blocking(&world, Select::Host)?;
//!         assert_eq!(comm.world_size().get(), 2);
//!         Ok::<(), ConnectError>(())
//!     };
//!     let spawn = |world| scope.spawn(move || rank(world));
//!     let ranks: Vec<_> = worlds.into_iter().map(spawn).collect();
//!     ranks.into_iter().try_for_each(|rank| rank.join().expect("no rank panics"))
//! })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The types of `flux_core` that ranks are connected and told apart with are here too: [`Rank`],
//! [`WorldSize`], [`Nodes`], [`Epoch`] and [`WorkspaceSize`].

mod backends;
mod bootstrap;
mod comm;
mod device;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
#[cfg(test)]
#[path = "../tests/lateness/mod.rs"]
mod lateness;
#[cfg(test)]
#[path = "../tests/loopback/mod.rs"]
mod loopback;
pub mod reason;
mod sync;
mod topology;

pub use backends::{
    Capabilities, CollectiveKind, ConnectError, Fault, HeldBytes, Job, LibraryCollective,
    MessageRounds, Mover, Options, ParseSelectError, PeerStores, RowTransfers, Select, Source,
    StagedTransfer, Started, TransportError, TransportKind, Wait, WorkspaceView,
};
pub use bootstrap::control::{ControlError, Hosts, Launch};
pub use bootstrap::world::{Builder, World, WorldError};
pub use bootstrap::{
    BootstrapError, Environment, FLUX_ADDRESS, FLUX_HOST_ID, FLUX_LAUNCHER, FLUX_LOCAL_RANK,
    FLUX_RANK, FLUX_RENDEZVOUS, FLUX_SECRET, FLUX_SECRET_FILE, FLUX_WORLD_SIZE, Rendezvous, Secret,
    ThreadRendezvous,
};
pub use comm::{
    Call, CallRecord, CallState, Communicator, CommunicatorMemory, Doing, Failure, Label,
    RankReport, Rebuild,
};
pub use device::{Device, Stream};
pub use flux_core::layout::WorkspaceSize;
pub use flux_core::signal::Epoch;
pub use flux_core::{Nodes, Rank, WorldSize};
pub use flux_cuda::{CudaError, DeviceInfo, DeviceUuid, ParseUuidError, device_count};

/// Starts ranks as processes of this machine and ends them together.
pub mod launch {
    pub use crate::bootstrap::launch::{
        Failed, LaunchError, Launcher, Others, Signals, exit_code, hear_of_children, one_host_each,
    };
}

/// The proof of peer access, in a process of its own.
pub mod probe {
    pub use crate::topology::probe::{
        Direction, LIMIT, Proof, Report, Verdict, forbidden, prove, serve, vetoed,
    };
}

/// For the other crates of this workspace and for tests; not covered by semantic versioning.
#[doc(hidden)]
pub mod internal {
    /// How ranks talk beside their shared memory.
    pub mod control {
        pub use crate::bootstrap::control::{
            Answer, Answerer, ControlPlane, GaveUp, Notice, Step, Watcher, local_planes, ranks,
            shortened,
        };
        pub use crate::bootstrap::{HostPlace, Place, join};
    }

    pub mod nccl {
        pub use crate::backends::nccl::{
            Comm, ElementType, NcclError, NcclUnavailable, OLDEST, UniqueId, available, supported,
            version,
        };
    }

    /// Limits on processes that this one has started.
    pub mod limited {
        pub use crate::topology::limited::{wait, wait_unless};
    }

    /// How this machine connects its GPUs.
    pub mod topology {
        pub use crate::topology::{instances, nvidia_gpus, unseen};
    }
}
