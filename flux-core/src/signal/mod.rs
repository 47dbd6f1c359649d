//! The signal protocol: how ranks announce data and failures.
//!
//! Invariant: the host transport and the CPU executor run this code over [`SharedMemory`], and the
//! model checker (`loom/tests/loom_protocol.rs`) over loom's atomics, with the orderings of
//! [`Word`]. The CUDA kernel mirrors it in `flux-kernels/cuda/`.
//!
//! A call is one [`Protocol`] on each worker of each rank:
//!
//! 1. [`Protocol::open`] reads the epoch, which selects the half of the data region.
//! 2. [`Protocol::wait`] precedes reads of a peer's data. [`Protocol::complete`] or
//!    [`Protocol::publish`] follow writes of data for a peer.
//! 3. [`Protocol::leave`] follows the last read. The last worker to leave advances the epoch, and
//!    no rank has to announce that a half is free.
//!
//! A wait that cannot end poisons the call ([`Poisoned`]): one record names what was missing, and
//! every other wait of the rank gives up.
//!
//! # Limits of loom
//! Loom checks the orderings between CPU threads. It does not model PTX scopes, the fence between
//! generic and bulk loads, or writes by copy engines. It treats sequentially consistent accesses as
//! acquire and release.

mod epoch;
mod fault;
mod memory;
mod protocol;
mod word;
mod words;

pub use epoch::Epoch;
pub use fault::{Poisoned, read_fault};
pub use memory::SharedMemory;
pub use protocol::{Left, Protocol};
pub use word::Word;
pub use words::{Control, Words, initialise};
