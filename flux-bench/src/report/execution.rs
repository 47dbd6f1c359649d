//! What executed the op of a row.

use serde::{Deserialize, Serialize};

/// What executed an op on rank 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Execution {
    /// The kernel and its device, or the CPU executor.
    pub kernel: String,
    /// CTAs, or threads.
    pub workers: u32,
    /// What moves data between ranks.
    pub mover: String,
    /// Gaps between a worker's stores to peers, in nanoseconds.
    pub gap_ns: u32,
}

impl From<flux_ops::Execution> for Execution {
    fn from(flux_ops::Execution { kernel, workers, mover, gap_ns }: flux_ops::Execution) -> Self {
        Self { kernel, workers, mover, gap_ns }
    }
}
