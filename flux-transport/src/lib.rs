//! Ranks, how they meet, the memory that they share and who moves data between them.
//!
//! Invariant: whatever the transport, a [`Communicator`] shows its memory as addresses laid out by
//! [`flux_core::layout`], and every wait on a peer, in a kernel or here, ends with data, a
//! deadline, a loss or an abort. Nothing here knows what a GEMM is.
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
//!     let ranks: Vec<_> = worlds.into_iter().map(|world| scope.spawn(move || rank(world))).collect();
//!     ranks.into_iter().try_for_each(|rank| rank.join().expect("no rank panics"))
//! })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The types of `flux_core` that ranks are connected and told apart with are here too: [`Rank`],
//! [`WorldSize`], [`Nodes`], [`Epoch`] and [`WorkspaceSize`].

pub mod bootstrap;
mod calls;
mod comm;
pub mod control;
pub mod cuda;
mod device;
mod drain;
mod fault;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod hints;
mod host;
pub mod launch;
#[doc(hidden)]
pub mod limited;
#[doc(hidden)]
pub mod loading;
mod mixed;
pub mod nccl;
pub mod nvlink;
mod options;
mod pcie;
pub mod probe;
pub mod route;
pub mod topology;
mod transport;
mod unblock;
mod world;

pub use comm::{Call, CallRecord, CallState, Communicator, ConnectError, Doing, Failure, Label, RankReport, Rebuild};
pub use control::{ControlError, ControlPlane, Hosts, Launch};
pub use device::{Device, Stream};
pub use fault::{Fault, Wait, reason};
pub use flux_core::layout::WorkspaceSize;
pub use flux_core::signal::Epoch;
pub use flux_core::{Nodes, Rank, WorldSize};
pub use options::{Options, ParseSelectError, Select};
pub use transport::{
    Capabilities, Carry, Exchange, Heard, Mover, MoverJob, PeerStores, Source, Transport, TransportError, TransportKind, WorkspaceView,
};
pub use world::{Builder, World, WorldError};
