//! The CUDA sources, embedded: own headers only, so that NVRTC alone compiles them.
//!
//! Invariant: a file's name here is the name by which the sources include it.

use crate::abi;
use std::sync::LazyLock;

macro_rules! headers {
    ($($name:literal),* $(,)?) => {
        /// Every header, by the name in `#include "..."`.
        pub(crate) fn headers() -> &'static [(&'static str, &'static str)] {
            static HEADERS: LazyLock<Vec<(&str, &str)>> = LazyLock::new(|| {
                vec![("abi.cuh", abi::header()), $(($name, include_str!(concat!("../cuda/", $name)))),*]
            });
            &HEADERS
        }
    };
}

headers![
    "types.cuh",
    "program.cuh",
    "ptx/bulk.cuh",
    "ptx/mbarrier.cuh",
    "ptx/memory.cuh",
    "ptx/warp.cuh",
    "ptx/wgmma.cuh",
    "common/close.cuh",
    "common/copy.cuh",
    "sm90/config.cuh",
    "sm90/consumer.cuh",
    "common/epilogue.cuh",
    "common/reduce_rows.cuh",
    "sm90/fused_gemm.cuh",
    "common/mover.cuh",
    "sm90/partials.cuh",
    "sm90/producer.cuh",
    "common/scatter.cuh",
    "sm90/storer.cuh",
    "common/trace.cuh",
    "sm90/swap_ab.cuh",
    "common/wait.cuh",
    "sm90/signal_poller.cuh",
    "harness/data.cuh",
];

/// A translation unit that is compiled to one cubin.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// Name of the cubin, and what logs call it.
    pub name: String,
    /// The text; it includes our headers.
    pub text: String,
}

impl Source {
    /// Operand data, verification and timing.
    pub fn harness() -> Self {
        Self { name: "flux_harness".to_owned(), text: include_str!("../cuda/harness/harness.cu").to_owned() }
    }

    /// Bulk copies and signal latency.
    pub fn links() -> Self {
        Self { name: "flux_links".to_owned(), text: include_str!("../cuda/harness/links.cu").to_owned() }
    }
}
