//! NVLink peer memory: every rank's workspace mapped into every rank, and copy engines that push.
//!
//! Invariant: an address that this module hands out is readable and writable by the rank's device,
//! and what is stored there is seen by the owner, as was proven by data when the ranks connected.
//!
//! ```text
//! connect   identities -> peer access -> memory of each rank, cleared -> descriptors -> mapped everywhere -> proven -> cleared
//! a call    begin: order after the last call | push, if any: fork, copies and flags on the side stream | finish: join if forked, mark the end
//! reserve   drain -> a new generation of all memory, as at connect, starting at the epoch where the old one stood
//! ```
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
