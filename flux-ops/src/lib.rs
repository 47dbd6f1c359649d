//! AllGather-GEMM, GEMM-ReduceScatter and GEMM-AllReduce, fused at tile level, over any transport.
//!
//! Invariant: an op computes the same on every transport, from operands that were checked before
//! anything is launched. Nothing here knows how bytes move.
//!
//! [`AllGatherGemm`] and [`GemmReduceScatter`] are the two halves of a tensor-parallel MLP or
//! attention block; with [`GemmAllReduce`] in place of the second, activations are replicated.
//! `examples/tp_mlp.rs` shows the first two, `examples/decode.rs` the third, and
//! `examples/survive.rs` a service that goes on when a rank is lost.
//!
//! An engine on GPUs calls an op where it called a matmul and an all-reduce. It is one process a
//! GPU, under torchrun, srun, mpirun or `flux-bench launch`:
//!
//! ```no_run
//! use cudarc::driver::{CudaContext, DriverError};
//! use flux_ops::{GemmAllReduce, TensorMut, TensorRef, bf16};
//! use flux_transport::{Communicator, Select, World};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//!     flux_transport::probe::serve(); // first: a probe of peer access is this program again
//!     let comm = Communicator::connect_blocking(&World::from_env()?, Select::Auto)?;
//!     let ordinal = comm.device().ordinal().ok_or("the ranks have no GPUs")?;
//!     let stream = CudaContext::new(ordinal as usize)?.new_stream()?;
//!
//!     // An op holds no weights: one serves the layers of this n and k, for up to 8192 rows.
//!     let (n, k) = (8192, 28672);
//!     let op = GemmAllReduce::<bf16>::builder(8192, n, k).build(&comm)?;
//!     // This rank's columns of the global x [m, k] and w [n, k].
//!     let inner = op.inner(comm.rank());
//!     let weight = |_layer| stream.alloc_zeros::<bf16>(n * inner.len());
//!     let weights = (0..80).map(weight).collect::<Result<Vec<_>, DriverError>>()?;
//!
//!     let m = 300; // another in every step
//!     let x = stream.alloc_zeros::<bf16>(m * inner.len())?;
//!     let mut y = stream.alloc_zeros::<bf16>(m * n)?;
//!     for w in &weights {
//!         let x = TensorRef::cuda(&x, (m, inner.len()), &stream)?;
//!         let w = TensorRef::cuda(w, (n, inner.len()), &stream)?;
//!         let mut y = TensorMut::cuda(&mut y, (m, n), &stream)?;
//!         op.forward(&x, &w, &mut y, &stream)?; // returns at once
//!     }
//!     stream.synchronize()?;
//!     comm.status()?; // y is valid, the same on every rank
//!     Ok(())
//! }
//! ```
//!
//! A [`Plan`] says how an op is executed. Without one in the [`Builder`], a plan table or the cost
//! model chooses:
//!
//! ```
//! use flux_ops::{AllGatherGemm, DType, Location, Plan, RawTensor, TensorRef, bf16};
//! use flux_transport::{Communicator, Select, World};
//! let comm = Communicator::connect_blocking(&World::single(), Select::Host)?;
//! let plan: Plan = "tile=128x128x64 k=split-k:2".parse()?;
//! let builder = AllGatherGemm::<bf16>::builder(512, 1024, 256).plan(plan);
//! let size = builder.workspace(&comm)?;
//! assert_eq!(builder.build(&comm)?.workspace(), size);
//!
//! // Memory of another framework, as an operand.
//! let x = vec![bf16::ONE; 512 * 256];
//! let address = x.as_ptr().expose_provenance() as u64;
//! let (dtype, location, layout) = (DType::Bf16.into(), Location::Host, (512, 256).into());
//! let raw = RawTensor { address, dtype, location, layout, available: x.len() };
//! // SAFETY: the elements are those of `x`, which outlives the view and is not written.
//! let x = unsafe { TensorRef::<bf16>::from_raw(raw) }?;
//! # let _ = x;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod agreement;
/// No part of the API: for flux-python and flux-c.
#[doc(hidden)]
pub mod binding;
mod error;
mod execute;
mod op;
mod operands;
mod planning;
mod quantize;
mod spec;
mod table_file;
mod tensor;
mod timeline;
mod tune;

pub use error::{BuildError, CallError, Requests};
pub use execute::Execution;
pub use flux_core::layout::WorkspaceSize;
pub use flux_core::plan::{
    Chunk, CommMode, KSplit, Mover, ParsePlanError, Plan, PlanOrigin, RowMapping, SumOrder,
    TableKind,
};
pub use flux_core::problem::{MAX_WEIGHTS, Shape, WeightList};
pub use flux_core::program::ScheduleError;
pub use flux_core::{
    DType, ElementType, Numerics, OpKind, Partials, Problem, ProblemError, Rank, Scales, SumsTo,
    TileShape, WorldSize,
};
pub use flux_kernels::{
    Activation, Element, Extent, F8E4M3, GateLayout, Operand, OperandSet, Presence,
    QuantizedElement, TensorElement, WeightLayout,
};
pub use half::{bf16, f16};
pub use op::{
    AllGatherGemm, Builder, Call, FusedLinear, GemmAllReduce, GemmReduceScatter, TypedLinear,
};
pub use operands::Operands;
pub use operands::QuantizeOperands;
pub use planning::{explain_plan_table, modelled_ns, ranked_plans};
pub use quantize::{QuantizeCall, Quantizer};
pub use spec::{EpilogueSpec, Epsilon, LaunchOptions, NormSpec, OpSpec};
pub use table_file::TableFileError;
pub use tensor::{Layout, Location, RawTensor, TensorError, TensorMut, TensorRef};
pub use timeline::{ItemStamps, TimedItem, Timeline, TimelineError, WorkerStamps};
pub use tune::{Candidate, Outcome, Timing, TuneError, TuneOptions, Tuned};

/// No part of the API: for the replay of an op's kernel in flux-bench, and for tests.
#[doc(hidden)]
pub mod internal {
    pub use crate::execute::{launch_of, limit_programs};
}
