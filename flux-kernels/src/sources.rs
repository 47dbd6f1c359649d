//! The CUDA sources, embedded: own headers only, so that NVRTC alone compiles them.
//!
//! Invariant: a file's name here is the name by which the sources include it.

use crate::abi;
use crate::arch::Arch;
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
    "ptx/async_copy.cuh",
    "ptx/bulk.cuh",
    "ptx/e4m3.cuh",
    "ptx/element.cuh",
    "ptx/grid.cuh",
    "ptx/mbarrier.cuh",
    "ptx/memory.cuh",
    "ptx/mma.cuh",
    "ptx/warp.cuh",
    "ptx/wgmma.cuh",
    "common/accumulate.cuh",
    "common/close.cuh",
    "common/copy.cuh",
    "common/epilogue.cuh",
    "common/mover.cuh",
    "common/progress.cuh",
    "common/raise.cuh",
    "common/reduce_rows.cuh",
    "common/scales.cuh",
    "common/scatter.cuh",
    "common/shards.cuh",
    "common/trace.cuh",
    "common/wait.cuh",
    "common/walk.cuh",
    "common/weights.cuh",
    "norm/quantize.cuh",
    "norm/rms_norm.cuh",
    "sm80/config.cuh",
    "sm80/consumer.cuh",
    "sm80/fused_gemm.cuh",
    "sm80/output.cuh",
    "sm80/producer.cuh",
    "sm80/scales.cuh",
    "sm80/signaller.cuh",
    "sm90/config.cuh",
    "sm90/consumer.cuh",
    "sm90/fused_gemm.cuh",
    "sm90/partials.cuh",
    "sm90/producer.cuh",
    "sm90/scales.cuh",
    "sm90/signal_poller.cuh",
    "sm90/storer.cuh",
    "sm90/swap_ab.cuh",
    "harness/data.cuh",
];

/// A translation unit that is compiled to one cubin.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// Name of the cubin, and what logs call it.
    pub name: String,
    /// The text; it includes our headers.
    pub text: String,
    /// The oldest PTX that has its instructions.
    pub ptx: Arch,
}

impl Source {
    /// RMSNorm of finished rows.
    pub fn rms_norm() -> Self {
        Self {
            name: "flux_rms_norm".to_owned(),
            text: include_str!("../cuda/norm/rms_norm.cu").to_owned(),
            ptx: Arch::Compute80,
        }
    }

    /// Rows as E4M3 with scales, for devices that convert to it.
    pub fn quantize() -> Self {
        Self {
            name: "flux_quantize".to_owned(),
            text: include_str!("../cuda/norm/quantize.cu").to_owned(),
            ptx: Arch::Compute89,
        }
    }

    /// Copies of gathered rows.
    pub fn gathered_rows() -> Self {
        Self {
            name: "flux_gathered_rows".to_owned(),
            text: include_str!("../cuda/gather/gathered_rows.cu").to_owned(),
            ptx: Arch::Compute80,
        }
    }

    /// Operand data, verification and timing.
    pub fn harness() -> Self {
        Self {
            name: "flux_harness".to_owned(),
            text: include_str!("../cuda/harness/harness.cu").to_owned(),
            ptx: Arch::Compute80,
        }
    }

    /// Bulk copies and signal latency, of Hopper alone.
    pub fn links() -> Self {
        Self {
            name: "flux_links".to_owned(),
            text: include_str!("../cuda/harness/links.cu").to_owned(),
            ptx: Arch::Compute80,
        }
    }
}
