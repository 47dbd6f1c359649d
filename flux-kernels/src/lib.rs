//! The kernels that walk a tile program, what compiles them, and the CPU executor of the same
//! programs.
//!
//! Invariant: nothing here knows which transport is in use. A kernel and the executor alike see
//! addresses, signals and a [`TileProgram`](flux_core::program::TileProgram).

mod abi;
pub mod aot;
pub mod cache;
pub mod cpu;
pub mod cuda;
pub mod element;
pub mod epilogue;
pub mod harness;
pub mod inspect;
pub mod nvrtc;
pub mod sources;
pub mod variant;

pub use element::Element;
pub use epilogue::Activation;
pub use variant::Variant;
