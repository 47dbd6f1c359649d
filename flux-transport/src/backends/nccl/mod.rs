//! NCCL, from whatever library a machine has, without a panic where it has none: its collectives as
//! a baseline, and the `nccl` transport.
//!
//! Invariant: at most one NCCL is loaded per process, and NVLink multicast (NVLS) is off in it
//! unless the environment asks for it. The library is found in this order: `FLUX_NCCL_LIB` (a file,
//! or a folder), the loader's path, the PyTorch wheel of the virtual environment or of the
//! `python3` on the path, the system's library folder.
//!
//! On the transport no rank reaches another's memory. Calls overlap their kernel with messages on a
//! side stream, or are sequential: one collective before or after the kernel.
//!
//! ```text
//! connect      identities, the unique id, a communicator and those split from it; each is proven
//! rows         begin, start: fork; group by group of rounds send and receive, raise own signals;
//!              kernel, finish: join
//! stored       begin, start: fork, kernel, launched: group by group wait for the chunks' flags,
//!              send and receive, raise own signals; finish: join
//! sequential   begin, start: AllGather, kernel, finish; or begin, kernel, launched: ReduceScatter
//!              or AllReduce, finish
//! comparing    the watchdog tells peers over the control plane which calls were made; `status()`
//!              asks
//! a fault      the record, the abort word, NCCL's error, other calls of a peer, or a call that
//!              stands still; then flags are released with a word that no call awaits, and all
//!              communicators are aborted
//! ```

mod abi;
mod collective;
mod collective_stall;
mod comm;
pub(crate) mod deferred;
mod flags;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod generation;
mod handle;
mod identity;
mod library;
mod link;
mod marks;
mod members;
mod messages;
mod outbox;
mod pause;
mod peers;
mod progress;
mod proof;
mod rounds;
mod settings;
mod sharing;
mod transport;
mod watch;
mod watchdog;
mod workspace;

pub(crate) use collective::enqueue_collective;
pub(crate) use generation::{Generation, Outgoing};
pub(crate) use link::Link;
pub(crate) use members::Members;
pub(crate) use outbox::{Outbox, Storing};
pub(crate) use rounds::{Memory, NO_GRAPHS, enqueue_rounds};
pub(crate) use transport::NcclTransport;
pub(crate) use watch::CallWatch;
pub(crate) use watchdog::Watchdog;

pub use abi::{ElementType, UniqueId};
pub use comm::Comm;
pub use library::{NcclError, NcclUnavailable, OLDEST, available, supported, version};
