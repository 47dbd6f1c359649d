//! The kernels that walk a tile program, what compiles them, and the CPU executor of the same
//! programs.
//!
//! Invariant: nothing here knows which transport is in use. A kernel and the executor alike see
//! addresses, signals and a [`TileProgram`](flux_core::program::TileProgram).

mod abi;
mod aot;
mod arch;
mod cache;
pub mod cpu;
pub mod cuda;
mod device;
mod element;
mod epilogue;
pub mod harness;
mod inspect;
pub mod nvrtc;
mod on_threads;
mod operand;
mod shipped;
mod sources;
mod variant;
mod weights;

pub use abi::{ItemStamps, Stamps, WorkerStamps};
pub use aot::{Selection, compile_ahead, sources_ahead};
pub use cache::{AheadError, Cubin, Cubins, Origin, cubin, cubins, image_key};
pub use device::{KernelTarget, NoKernel};
pub use element::{Element, QuantizedElement, TensorElement};
pub use epilogue::{Activation, GatedNames, NoSuchActivation};
pub use inspect::{FunctionReport, ImageError, Report};
pub use operand::{Extent, Operand, OperandList, OperandSet, Presence, QuantizedRows, Shapes};
pub use sources::Source;
pub use variant::{NoSuchTile, Variant};
pub use weights::{GateLayout, WeightLayout};

pub use float8::F8E4M3;
pub use flux_core::{DType, Numerics};
pub use half::{bf16, f16};
