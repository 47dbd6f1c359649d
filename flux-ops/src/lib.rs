//! AllGather-GEMM and GEMM-ReduceScatter, fused at tile level, over any transport.
//!
//! Invariant: an op computes the same on every transport, from operands that were checked before anything is launched. Nothing here knows how
//! bytes move: an op hands a tile program to an executor and the communicator's memory to both.
//!
//! [`AllGatherGemm`] and [`GemmReduceScatter`] are the two halves of a tensor-parallel MLP or attention block; `examples/tp_mlp.rs`
//! shows them together.

mod error;
mod execute;
mod fused;
mod ops;
pub mod tensor;
mod timeline;

pub use error::{BuildError, CallError, Requests};
pub use execute::{Push, own_launch, own_schedule, own_sending};
pub use flux_kernels::{Activation, Element};
pub use half::{bf16, f16};
pub use ops::{AllGatherGemm, Builder, GemmReduceScatter};
pub use tensor::{Layout, Location, RawTensor, TensorError, TensorMut, TensorRef};
pub use timeline::{ItemStamps, TimedItem, Timeline, TimelineError, WorkerStamps};
