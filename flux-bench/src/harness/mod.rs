//! What every measurement stands on: operands, their reference, memory, and a rank's device.
//!
//! Invariant: data and reference are functions of seed and position, so no check trusts what it
//! checks.

mod context;
mod defect;
pub(crate) mod epilogue;
mod exchange;
pub(crate) mod gpu;
mod memory;
mod op;
mod operand_set;
mod operands;
mod planned;
pub(crate) mod ranks;
pub(crate) mod reference;
mod stats;
mod verdict;

pub use context::RankContext;
pub(crate) use defect::Defect;
pub use epilogue::EpilogueArgs;
pub(crate) use exchange::told;
pub use flux_kernels::harness::Fill;
pub(crate) use flux_kernels::harness::data::{elements, y_window};
pub use flux_kernels::harness::data::{w_window, x_window};
pub(crate) use flux_kernels::harness::{HostBuffer, NoMemory, data, room, scaled};
pub use flux_ops::EpilogueSpec;
pub use memory::Buffer;
pub(crate) use op::{build, build_with, ops_on};
pub use operand_set::{Norm, OperandSet, Weight};
pub use operands::Operands;
pub(crate) use operands::{bias_window, result_window};
pub(crate) use planned::{FIRST, PlannedLayer};
pub(crate) use stats::{Span, Times, of_slowest, percentile};
pub(crate) use verdict::Verdict;
pub use verdict::{MadeBy, Violation};
