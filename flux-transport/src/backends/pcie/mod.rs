//! GPUs of one host that cannot reach each other: everything goes through pinned memory of the
//! host, carried by copy engines, or by kernels where it is few rows of partial sums.
//!
//! Invariant: no device's memory is mapped for another. Where copy engines carry a call a rank
//! writes its own shared region, and reads those of its peers; no SM has a part in it, so the
//! kernel that waits for what comes may hold all of them. Where kernels scatter rows they write
//! those of their peers, and read their own.
//!
//! ```text
//! rank s                                         host memory                    rank r
//! shard, or outbox + flag of the kernel  --D2H--> region of s: half, flag --H2D--> data region, then the signal of its own pad
//! ```
//!
//! Two side streams a rank: one sends, one receives, so that one piece goes out beside another that
//! comes in. Both start where the call starts.

mod carry;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod layout;
mod offer;
mod proof;
mod region;
mod transport;
mod watch;
mod words;
mod workspace;

pub(crate) use transport::Pcie;
