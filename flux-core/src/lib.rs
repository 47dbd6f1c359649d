//! What a fused GEMM does and when, as data: problems, tiles, tile programs, the signal protocol
//! and the measures of overlap.
//!
//! This crate knows no CUDA, no I/O and no threads beyond the atomics of the signal protocol. A
//! schedule is a [`TileProgram`](program::TileProgram), a list of fixed-layout records that the
//! CUDA kernel, the CPU executor, the simulator and the property tests walk alike; the addresses
//! behind its indices are laid out by [`layout`].

pub mod dtype;
pub mod layout;
pub mod machine;
pub mod metrics;
pub mod nodes;
pub mod plan;
pub mod problem;
pub mod program;
pub mod rank;
pub mod signal;
pub mod simulate;
pub mod tile;

pub use dtype::DType;
pub use nodes::Nodes;
pub use plan::Plan;
pub use problem::{OpKind, Problem, ProblemError};
pub use rank::{Rank, WorldSize};
pub use tile::TileShape;
