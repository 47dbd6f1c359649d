//! GPUs: the baseline GEMM, the harness kernels, and timing on the device.
//!
//! Invariant: a rank has one device and one stream, on which all of its launches are in order.

pub(crate) mod choice;
pub(crate) mod cublas;
mod harness;
pub(crate) mod kernel_names;
pub(crate) mod kernels;
mod library_operands;

pub(crate) use harness::Gpu;
pub(crate) use library_operands::LibraryOperands;
