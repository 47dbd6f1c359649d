//! Why an op was not built.

use crate::tensor::Location;
use flux_core::plan::{Plan, SumOrder};
use flux_core::program::ScheduleError;
use flux_core::tile::Generation;
use flux_core::{DType, Numerics, OpKind, Problem, ProblemError, Rank, Scales, TileShape};
use flux_cuda::CudaError;
use flux_kernels::cpu::ExecuteError;
use flux_kernels::cuda::LaunchError;
use flux_kernels::nvrtc::CompileError;
use flux_kernels::{NoKernel, NoSuchTile, Operand, WeightLayout};
use flux_transport::{ControlError, TransportError, TransportKind};

/// Why an op was not built. Where all ranks build, all have then left the build.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The shape cannot be executed on this world.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// The plan does not suit the shape.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// No plan is legal for the shape. Every generation has tiles for every op, so this is a
    /// defect.
    #[error(
        "no kernel tile suits {problem}, which is a defect of flux: report it with this message"
    )]
    NoPlan {
        /// The shape.
        problem: Problem,
    },
    /// The caller's plan of a batch-invariant op has no order of sums that holds for every `m`.
    #[error(
        "batch_invariant(true): {order} by `{plan}`: use rows=flattened, k=whole and no library's \
         sum, or name no plan"
    )]
    SumOrder {
        /// The plan, in its canonical form.
        plan: Plan,
        /// The order.
        order: SumOrder,
    },
    /// The caller's plan leaves the sum to a library's collective, which adds sums of the op's
    /// type.
    #[error(
        "partials(F32): comm=sequential sums {dtype} by the library's collective: use \
         comm=overlapped, or name no plan"
    )]
    SequentialPartials {
        /// The op's element type.
        dtype: DType,
    },
    /// No plan of a batch-invariant op has one order of sums.
    #[error(
        "no plan of {problem} over the {transport} transport adds up alike for every m: build \
         without batch_invariant(true), or connect over another transport"
    )]
    NoInvariantPlan {
        /// The shape.
        problem: Problem,
        /// The transport.
        transport: TransportKind,
    },
    /// There is no worker, or more than can run at once.
    #[error("workers = {value}: at least 1 and at most {max} can run at once on {place}")]
    Workers {
        /// The value asked for.
        value: u32,
        /// Most that the device runs at once.
        max: u32,
        /// The device.
        place: Location,
    },
    /// A call needs a kernel that the build has not loaded.
    #[error(
        "the kernel {kernel} was not loaded when the op was built, which is a defect of flux: \
         report it, with op.explain()"
    )]
    NotLoaded {
        /// The kernel.
        kernel: String,
    },
    /// Tensor cores read 8-bit weights along `k`.
    #[error(
        "weights of {weights} with {numerics} operands: tensor cores read 8-bit operands along k; \
         give w as [n, k]"
    )]
    ScaledWeights {
        /// How they lie.
        weights: WeightLayout,
        /// The element types.
        numerics: Numerics,
    },
    /// The device's kernel multiplies no such operands.
    #[error(
        "{numerics} operands on {device}, whose kernel is {generation}: they need compute \
         capability 8.9 or later, and its kernel; use bf16 or fp16 operands"
    )]
    NoNumerics {
        /// The element types.
        numerics: Numerics,
        /// The device's name and compute capability.
        device: String,
        /// The device's kernel.
        generation: Generation,
    },
    /// The device's kernels write no rows of 8 bits.
    #[error(
        "rows of 8 bits on {device}, whose kernel is {generation}: they need compute capability \
         8.9 or later, and its kernel; use rows of 16 bits, and a norm of 16 bits"
    )]
    NoQuantizedRows {
        /// The device's name and compute capability.
        device: String,
        /// The device's kernel.
        generation: Generation,
    },
    /// The norm's addend is no number that a mean of squares can have.
    #[error("rms_norm({value}): eps must be a finite number, 0 or above")]
    Epsilon {
        /// The value asked for.
        value: f32,
    },
    /// Normalised rows cannot be quantised with such scales.
    #[error(
        "normalised rows of n = {n} elements cannot be quantised with {scales} scales: n must be \
         a multiple of {multiple}; use other scales, or a norm of 16 bits"
    )]
    QuantizedNorm {
        /// Elements of a row.
        n: usize,
        /// The form of the scales.
        scales: Scales,
        /// Required divisor of `n`.
        multiple: usize,
    },
    /// Gates in weights that cannot have them.
    #[error(
        "gated weights are read as [n, k], and w was to lie as {weights}: leave out \
         weights({weights:?}), or gated"
    )]
    GatedWeights {
        /// How they were to lie.
        weights: WeightLayout,
    },
    /// Tiles of the caller's plan have gates without their ups.
    #[error(
        "tiles of {tile} split gates from their ups: with gated a tile has a multiple of \
         {multiple} columns"
    )]
    GatedTile {
        /// The plan's tile.
        tile: TileShape,
        /// Required divisor of its columns.
        multiple: u32,
    },
    /// Several weights that lie as no kernel reads them.
    #[error(
        "several weights are read as [n, k], and were to lie as {weights}: leave out \
         weights({weights:?}), or several_weights"
    )]
    SeveralWeights {
        /// How they were to lie.
        weights: WeightLayout,
    },
    /// The op's kind does not have the option.
    #[error("{op} has no {option}: {}", ops_with(option))]
    Option {
        /// The op.
        op: OpKind,
        /// An optional operand's name, `rms_norm`, `partials`, `activation`, `gates` or
        /// `several_weights`.
        option: &'static str,
    },
    /// Calls need more workspace than the caller allows.
    #[error(
        "calls need {needed} bytes of workspace, above the limit of {limit}: raise max_workspace, \
         or build the op with a smaller max_m"
    )]
    Workspace {
        /// Bytes that calls with `max_m` rows need.
        needed: u64,
        /// The caller's limit.
        limit: u64,
    },
    /// No SM is left.
    #[error("sm_margin = {value}: the device has {sms} SMs and a call needs one, so at most {} can \
             be left to others", sms - 1)]
    SmMargin {
        /// The value asked for.
        value: u32,
        /// SMs of the device.
        sms: u32,
    },
    /// There is no room for the program of a call.
    #[error(
        "the program of {problem} takes {bytes} bytes of the {limit} that a communicator has for \
         programs, of which captured and prepared calls keep {pinned}: use a larger tile, or \
         prepare fewer m"
    )]
    ProgramMemory {
        /// The problem.
        problem: Problem,
        /// Bytes of the program.
        bytes: u64,
        /// Bytes for all programs.
        limit: u64,
        /// Bytes of programs that stay.
        pinned: u64,
    },
    /// The plan runs a library's collective, for which ranks of a node need devices of their own.
    #[error(
        "NCCL has no collective of all ranks on the {transport} transport, as some share a device, \
         and {op} with `comm=sequential` needs one: give each rank a device, or use another op"
    )]
    NoCollectives {
        /// The transport.
        transport: TransportKind,
        /// The op.
        op: OpKind,
    },
    /// The transport carries messages, each a whole range of one owner's memory.
    #[error(
        "the {transport} transport sends whole rows, or tiles of one owner, which `{plan}` has \
         not: use rows=per-shard:1, or chunk=shard"
    )]
    NoMessages {
        /// The transport.
        transport: TransportKind,
        /// The plan, in its canonical form.
        plan: Plan,
    },
    /// No kernel has been written for this tile.
    #[error(transparent)]
    NoKernel(#[from] NoSuchTile),
    /// No kernel runs on the device.
    #[error(transparent)]
    Compute(#[from] NoKernel),
    /// The ranks do not build the same op. The same on every rank.
    #[error(
        "the ranks build different ops: {requests}; build the same ops with the same options, in \
         the same order, on every rank"
    )]
    Disagreement {
        /// Which ranks ask for what.
        requests: Requests,
    },
    /// This rank could have built the op, but another could not.
    #[error("rank {rank} could not build the op: {reason}")]
    Peer {
        /// The first rank that failed.
        rank: Rank,
        /// Its error.
        reason: String,
    },
    /// The kernel could not be compiled.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The kernel could not be loaded, or its program not be put on the device.
    #[error("the kernel could not be prepared: {0}")]
    Load(#[from] LaunchError),
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] CudaError),
    /// The host executor does not take the program.
    #[error(transparent)]
    Execute(#[from] ExecuteError),
    /// The ranks could not exchange their requests, or not grow the communicator's workspace.
    #[error("while building {op}: {source}{}", hint(source))]
    Transport {
        /// The op and its global extents.
        op: String,
        /// What went wrong.
        source: TransportError,
    },
}

/// What may have kept the other ranks from coming.
const fn hint(source: &TransportError) -> &'static str {
    match source {
        TransportError::Control(ControlError::Timeout { .. }) => {
            "; build blocks its thread, so ranks that are asynchronous tasks call it in \
             spawn_blocking or on threads of their own"
        }
        _ => "",
    }
}

/// The ops that have an option.
fn ops_with(option: &str) -> &'static str {
    match option {
        "activation" => "only ag_gemm has one",
        "gates" | "several_weights" => "only ag_gemm has them",
        "partials" => "only gemm_rs and gemm_ar send partial sums",
        _ => match Operand::named(option) {
            Some((operand, _)) if operand.is_of(OpKind::AllGatherGemm) => "only ag_gemm has one",
            _ => "only gemm_rs and gemm_ar have one",
        },
    }
}

/// What each group of ranks asked for, ordered by rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requests(pub Vec<(Vec<Rank>, String)>);

impl std::fmt::Display for Requests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, (ranks, request)) in self.0.iter().enumerate() {
            let ranks: Vec<String> = ranks.iter().map(ToString::to_string).collect();
            let (separator, plural) =
                (if i == 0 { "" } else { "; " }, if ranks.len() == 1 { "" } else { "s" });
            write!(f, "{separator}rank{plural} {} `{request}`", ranks.join(", "))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_do_not_come_to_a_build_are_told_that_it_blocks() {
        let building = |source: ControlError| {
            BuildError::Transport { op: "ag_gemm 8x8x8".to_owned(), source: source.into() }
                .to_string()
        };
        let late =
            building(ControlError::Timeout { step: "building an op", missing: vec![Rank::new(1)] });
        assert!(
            late.starts_with(
                "while building ag_gemm 8x8x8: building an op: the deadline passed while waiting \
                 for rank 1; "
            ),
            "{late}"
        );
        assert!(late.contains("spawn_blocking"), "{late}");
        assert!(
            !building(ControlError::PeerLost { rank: Rank::new(1) }).contains("spawn_blocking")
        );
    }

    #[test]
    fn an_option_names_the_ops_that_have_it() {
        let said = |op, option| BuildError::Option { op, option }.to_string();
        let texts = ["residual", "partials"].map(|option| said(OpKind::AllGatherGemm, option));
        assert_eq!(texts[0], "ag_gemm has no residual: only gemm_rs and gemm_ar have one");
        assert_eq!(texts[1], "ag_gemm has no partials: only gemm_rs and gemm_ar send partial sums");
        let texts =
            ["activation", "several_weights"].map(|option| said(OpKind::GemmAllReduce, option));
        assert_eq!(
            texts,
            [
                "gemm_ar has no activation: only ag_gemm has one",
                "gemm_ar has no several_weights: only ag_gemm has them"
            ]
        );
    }
}
