//! GPUs: the baseline GEMM, the harness kernels, and timing on the device.
//!
//! Invariant: a rank has one device and one stream, on which all of its launches are in order.

pub(crate) mod choice;
pub(crate) mod cublas;
mod harness;
pub(crate) mod kernel_names;
pub(crate) mod kernels;

pub(crate) use harness::Gpu;
