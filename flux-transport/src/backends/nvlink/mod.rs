//! NVLink peer memory: every rank's workspace mapped into every rank, and copy engines that push.
//!
//! Invariant: this rank's device can read and write every address that this module hands out. When
//! the ranks connected, data proved that the owner sees what is stored there.
//!
//! - Connect: exchange identities, check peer access, allocate and clear memory, pass descriptors,
//!   map everything, prove it, clear it again.
//! - Call: order after the last call; for a push fork a side stream, copy and flag there, join it.
//! - Reserve: drain, then connect a new generation of memory at the present epoch.
//!
//! NVLink multicast is not used.

mod choice;
mod collective;
mod error;
mod fault;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod lane;
mod mig;
mod mover;
mod offer;
mod plan;
mod process;
mod proof;
mod shared;
mod transport;
mod workspace;

pub(crate) use choice::ordinal;
pub(crate) use collective::{Meeting, PeerDevices, Reach, Wanted, build};
pub(crate) use fault::FaultBlock;
pub(crate) use lane::Lane;
pub(crate) use mover::{Addresses, by_copy_engine};
pub(crate) use transport::NvLink;
pub(crate) use workspace::Workspace;

pub(crate) use error::NvLinkError;
