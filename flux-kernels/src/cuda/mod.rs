//! Launching the fused kernel.
//!
//! Invariant: every function here expects a current context on the calling thread, the one of the
//! device that it is meant for. [`launch`] neither waits for the device nor allocates.

mod args;
mod encode;
mod error;
mod gathered_rows;
mod kernel;
mod launch;
mod loaded;
mod program;
mod quantize;
mod rms_norm;
mod row_wise;
mod tensor_map;
mod trace;
mod warm_up;

pub use args::{LaunchArgs, LaunchStart, Matrix, Pace, ResultRows};
pub use error::LaunchError;
pub use gathered_rows::{GatheredRows, GatheredRowsArgs};
pub use kernel::Kernel;
pub use launch::launch;
pub use loaded::{is_loaded, loaded, loaded_gathered_rows, loaded_quantize, loaded_rms_norm};
pub use program::{DeviceProgram, EpilogueStaging};
pub use quantize::{Quantize, QuantizeArgs};
pub use rms_norm::{RmsNorm, RmsNormArgs};
pub use trace::TraceBuffer;
