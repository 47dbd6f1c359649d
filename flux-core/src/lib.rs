//! Fused GEMMs as data: problems, plans, tile programs, the signal protocol, a cost model and a
//! simulator.
//!
//! This crate knows no CUDA, no I/O and no threads beyond the atomics of the signal protocol. A
//! [`TileProgram`](program::TileProgram) is a list of fixed-layout records. The CUDA kernel, the
//! CPU executor, the simulator and the checks walk the same list; [`layout`] gives the addresses
//! behind its indices.

mod debug;
pub mod layout;
pub mod machine;
pub mod metrics;
pub mod nodes;
pub mod numerics;
pub mod plan;
pub mod problem;
pub mod program;
pub mod rank;
pub mod signal;
pub mod simulate;
pub mod tile;
pub mod timeline;
pub mod words;

pub use nodes::Nodes;
pub use numerics::{DType, ElementType, Numerics, Partials, Scales};
pub use plan::Plan;
pub use problem::{OpKind, Problem, ProblemError, SumsTo};
pub use rank::{Rank, WorldSize};
pub use tile::TileShape;
