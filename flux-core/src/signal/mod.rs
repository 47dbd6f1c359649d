//! The signal protocol: how ranks tell each other that data has arrived, and that something failed.
//!
//! Invariant: whatever the memory is and whoever waits, it is this code that runs, with the
//! orderings of [`Word`]: host transport and CPU executor over [`SharedMemory`], the model checker
//! over loom's atomics (`tests/loom_protocol.rs`). The CUDA kernel mirrors it in
//! `flux-kernels/cuda/`.
//!
//! A call is one [`Protocol`] on each worker of each rank:
//!
//! 1. [`Protocol::open`] reads the epoch, which says which half of the data region is the call's.
//! 2. [`Protocol::wait`] before a peer's data is read; [`Protocol::complete`] or
//!    [`Protocol::publish`] after data for a peer is written.
//! 3. [`Protocol::leave`] after the last read. The last worker to leave advances the epoch. That
//!    room is free again nobody has to say.
//!
//! A wait that cannot end poisons the call ([`Poisoned`]): one record says what was missing, and
//! every other wait of the rank gives up.
//!
//! # What loom does not show
//! Loom checks the orderings between CPU threads. It knows nothing of PTX scopes, of the fence
//! between generic and bulk loads, or of writes by copy engines, and it treats sequentially
//! consistent accesses as acquire and release.

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
