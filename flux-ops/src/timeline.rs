//! One call's time line: when each phase of each of a rank's items ended.
//!
//! Invariant: times are nanoseconds of the rank's own GPU, or of the process on the host; only
//! differences within one timeline mean anything. To see ranks side by side, line them up by
//! [`Timeline::start_ns`].

use flux_core::Rank;
use flux_core::program::WorkItem;
use flux_cuda::CudaError;
use flux_kernels::cuda::LaunchError;
pub use flux_kernels::{ItemStamps, WorkerStamps};

/// What one rank's workers did in one call: CTAs, or threads on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeline {
    /// The rank.
    pub rank: Rank,
    /// The items in program order; worker `i` of `n` took `i`, `i + n`, ... one after the other.
    pub items: Vec<TimedItem>,
    /// The workers.
    pub workers: Vec<WorkerStamps>,
}

/// An item of the tile program with its times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedItem {
    /// What was done.
    pub item: WorkItem,
    /// When, in nanoseconds.
    pub times: ItemStamps,
}

impl Timeline {
    /// When the first worker began, in nanoseconds.
    pub fn start_ns(&self) -> u64 {
        self.workers.iter().map(|worker| worker.entered).min().unwrap_or(0)
    }

    /// When the last worker left, in nanoseconds.
    pub fn end_ns(&self) -> u64 {
        self.workers.iter().map(|worker| worker.left).max().unwrap_or(0)
    }
}

/// Why there is no timeline.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TimelineError {
    /// The op was not built to record one.
    #[error("the op records no time line: build it with .trace(true)")]
    NotTraced,
    /// Nothing has been recorded.
    #[error("the op has not been called since it was built")]
    NoCall,
    /// The stream is not one of the communicator's device.
    #[error("the time line is on a GPU and the stream is the host's: give the stream of the calls")]
    WrongStream,
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] CudaError),
    /// The records could not be read.
    #[error("the time line could not be read: {0}")]
    Read(#[from] LaunchError),
}

flux_core::debug_is_text!(TimelineError);
