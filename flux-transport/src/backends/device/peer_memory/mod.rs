//! Memory of devices that is mapped into every rank of a node: `nvlink`, and `mixed` within nodes.
//! `pcie` meets alike, and maps memory of the host.
//!
//! Invariant: this rank's device can read and write every address that this module hands out. When
//! the ranks connected, data proved that the owner sees what is stored there.
//!
//! - Connect: exchange identities, check peer access, allocate and clear memory, pass descriptors,
//!   map everything, prove it, clear it again.
//! - Reserve: drain, then connect a new generation of memory at the present epoch.
//!
//! NVLink multicast is not used.

mod build;
mod choice;
mod copies;
mod devices;
mod error;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod mig;
mod offer;
mod process;
mod proof;
mod push;
mod shared;
mod workspace;

pub(crate) use build::{Request, build};
pub(crate) use choice::own_device;
pub(crate) use devices::{PeerDevices, Reachability};
pub(crate) use error::PeerMemoryError;
pub(crate) use push::{Addresses, by_copy_engine};
pub(crate) use workspace::Workspace;
