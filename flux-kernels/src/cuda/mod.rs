//! Launching the fused kernel.
//!
//! Invariant: every function here expects a current context on the calling thread, the one of the device that it is meant for. None of
//! them waits for the device, and [`launch`] allocates nothing.

mod call;
mod error;
mod launch;
pub(crate) mod module;
mod params;
mod program;
mod tensor_map;
mod trace;

pub use error::LaunchError;
pub use launch::{Kernel, LaunchArgs, Matrix, Pace, launch};
pub use program::DeviceProgram;
pub use trace::{ItemStamps, Stamps, TraceBuffer, WorkerStamps};
