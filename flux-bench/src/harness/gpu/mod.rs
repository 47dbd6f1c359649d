//! Measuring on GPUs: the baselines, clocks of the device, and the harness kernels.
//!
//! Invariant: a rank has one device and one stream, and all that it launches is in order on that
//! stream.

pub(crate) mod choice;
pub(crate) mod cublas;
mod harness;
pub(crate) mod kernels;

pub(crate) use harness::Gpu;
