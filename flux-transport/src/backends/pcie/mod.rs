//! GPUs of one host that cannot reach each other: everything goes through pinned host memory, by
//! copy engines, or by kernels for few rows of partial sums.
//!
//! Invariant: no device's memory is mapped for another. With copy engines a rank writes its own
//! shared region and reads its peers'; no SM takes part, so a waiting kernel may hold all of them.
//! Kernels that scatter rows write the peers' regions and read their own.
//!
//! ```text
//! rank s                          host memory                rank r
//! shard, or outbox   --D2H-->   region of s, flag   --H2D-->   data region, signal of its pad
//! ```
//!
//! Each rank has a sending and a receiving side stream, both forked where the call starts.

mod carry;
mod layout;
mod proof;
mod region;
mod transport;
mod watch;
mod words;
mod workspace;

pub(crate) use transport::Pcie;
