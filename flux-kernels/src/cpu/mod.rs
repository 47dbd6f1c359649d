//! The CPU executor: walks a rank's tile program against the memory of a host transport.
//!
//! Invariant: results depend on the program alone, bit for bit. Split-K partials are added in the
//! order of `k`, peers' partial tiles in slot order, and values are rounded where the kernel
//! rounds.

mod buffers;
mod call;
mod epilogue;
mod error;
mod executor;
mod memory;
mod operands;
mod panel;
mod pause;
mod quantize;
mod rms_norm;
mod scaling;
mod sinks;
mod stamps;

pub use buffers::Buffers;
pub use epilogue::{Epilogue, Input};
pub use error::ExecuteError;
pub use executor::{CpuArgs, CpuWeight, Executor};
pub use memory::HostMemory;
pub use operands::{Rows, RowsMut};
pub use quantize::{Norm, quantize};
pub use rms_norm::rms_norm;
