//! AllGather-GEMM and GEMM-ReduceScatter, fused at tile level, over any transport.
//!
//! Invariant: an op computes the same on every transport, from operands that were checked before
//! anything is launched. Nothing here knows how bytes move: an op hands a tile program to an
//! executor and the communicator's memory to both.
//!
//! [`AllGatherGemm`] and [`GemmReduceScatter`] are the two halves of a tensor-parallel MLP or
//! attention block; `examples/tp_mlp.rs` shows them together, and `examples/survive.rs` what a
//! service does when a rank is lost.
//!
//! The types of `flux_core` that an op takes and gives are here too, so that a program needs that
//! crate for nothing else:
//!
//! ```
//! use flux_ops::{AllGatherGemm, Chunk, DType, Location, RawTensor, Schedule, TensorRef, TileShape, WorldSize, bf16};
//! let world = WorldSize::new(4).expect("4 is a world size");
//! let schedule = Schedule { chunk: Chunk::Tiles(1), ..Schedule::of(TileShape::new(128, 128, 64)) };
//! let size = AllGatherGemm::<bf16>::builder(512, 1024, 256).schedule(schedule).workspace(world)?;
//! assert!(size.half_bytes >= 3 * 128 * 256 * 2, "the rows of 3 peers");
//!
//! let x = vec![bf16::ONE; 128 * 256];
//! let address = x.as_ptr().expose_provenance() as u64;
//! let raw = RawTensor { address, dtype: DType::Bf16, location: Location::Host, layout: (128, 256).into(), available: x.len() };
//! // SAFETY: the elements are those of `x`, which outlives the view and is not written.
//! let x = unsafe { TensorRef::<bf16>::from_raw(raw) }?;
//! # let _ = x;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;
mod execute;
mod fused;
mod ops;
mod planning;
mod table_file;
pub mod tensor;
mod timeline;
mod tune;

pub use error::{BuildError, CallError, Requests};
pub use execute::{Push, own_launch, own_schedule, own_sending};
pub use flux_core::layout::WorkspaceSize;
pub use flux_core::plan::{CommMode, KSplit, ParsePlanError, Plan, PlanOrigin, RowMapping, TableKind};
pub use flux_core::problem::Shape;
pub use flux_core::program::{Chunk, Schedule, ScheduleError, Sending};
pub use flux_core::tile::Raster;
pub use flux_core::{DType, OpKind, Problem, ProblemError, Rank, TileShape, WorldSize};
pub use flux_kernels::{Activation, Element};
pub use half::{bf16, f16};
pub use ops::{AllGatherGemm, Builder, GemmReduceScatter};
pub use planning::{explain_plan_table, ranked_plans};
pub use table_file::TableFileError;
pub use tensor::{Layout, Location, RawTensor, TensorError, TensorMut, TensorRef};
pub use timeline::{ItemStamps, TimedItem, Timeline, TimelineError, WorkerStamps};
pub use tune::{Candidate, Outcome, Timing, TuneError, TuneOptions, Tuned};
