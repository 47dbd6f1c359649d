//! The instantiations of the fused kernel.
//!
//! Invariant: a variant's numbers are those of `struct Config` in
//! `flux-kernels/cuda/sm90/config.cuh`.

use crate::epilogue::Activation;
use crate::sources::Source;
use flux_core::program::TileProgram;
use flux_core::tile::{HOPPER_SHARED_BYTES, Staging};
use flux_core::{DType, OpKind, TileShape};
use std::fmt;

/// One instantiation: operation, element type, tile, how a finished tile is staged, how many stages
/// of operands are in flight, what is applied to the result, and whether it records its time line.
/// Both sums over the ranks have one kernel.
///
/// The activation is part of it, because its formula is unrolled over a thread's accumulators: a
/// kernel that chose at run time would hold a copy for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    op: OpKind,
    dtype: DType,
    tile: TileShape,
    staging: Staging,
    stages: u32,
    activation: Activation,
    traced: bool,
}

/// There is no kernel for a tile, or none that does what the program asks of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no kernel for tiles of {tile} here: {}", advice())]
pub struct NoSuchTile {
    /// The requested tile.
    pub tile: TileShape,
}

/// The tiles that there are kernels for, in words.
fn advice() -> String {
    let list = |kept: fn(TileShape) -> bool| {
        TileShape::all().filter(|&tile| kept(tile)).map(|tile| tile.to_string()).collect::<Vec<_>>().join(", ")
    };
    format!(
        "use {}; for gemm_rs and gemm_ar of several ranks with flattened rows also {}, and with rows per shard also {}",
        list(|tile| tile.scatters() && tile.sends_partials()),
        list(|tile| !tile.sends_partials()),
        list(|tile| !tile.scatters()),
    )
}

/// The op whose kernel executes `op`: the program alone tells sums for one owner from sums for all.
const fn kernel_of(op: OpKind) -> OpKind {
    if op.reduces() { OpKind::GemmReduceScatter } else { op }
}

impl Variant {
    /// Threads of a CTA: a warpgroup with producer, storer, mover and signal poller, and two
    /// consumers.
    pub const THREADS: u32 = 384;
    const CONSUMERS: u32 = 2;

    /// Every variant that is compiled ahead of time; the [`traced`](Self::traced) forms are
    /// compiled where they are used.
    pub fn all() -> Vec<Self> {
        let ops = [OpKind::AllGatherGemm, OpKind::GemmReduceScatter]; // see `kernel_of`
        let pairs = ops.into_iter().flat_map(|op| [DType::Bf16, DType::F16].map(|dtype| (op, dtype)));
        let plain = pairs.flat_map(|(op, dtype)| TileShape::all().flat_map(move |tile| Self::with_tile(op, dtype, tile)));
        plain.flat_map(|variant| Activation::of(variant.op).iter().map(move |&a| variant.with_activation(a))).collect()
    }

    fn with_tile(op: OpKind, dtype: DType, tile: TileShape) -> impl Iterator<Item = Self> {
        let stagings = tile.stagings().filter(move |&staging| match op {
            // Nothing is scattered, so one buffer does.
            OpKind::AllGatherGemm => staging == Staging::Shared || tile.stagings().count() == 1,
            OpKind::GemmReduceScatter | OpKind::GemmAllReduce => staging == Staging::PerConsumer || tile.sends_partials_from(staging),
        });
        stagings.filter_map(move |staging| {
            let stages = tile.stages(staging, HOPPER_SHARED_BYTES)?;
            Some(Self { op, dtype, tile, staging, stages, activation: Activation::None, traced: false })
        })
    }

    /// The variant for a program, without activation: of two the one with more stages.
    ///
    /// # Errors
    /// As of [`Self::fitting`].
    pub fn of(program: &TileProgram) -> Result<Self, NoSuchTile> {
        let fitting = Self::fitting(program)?;
        fitting.into_iter().max_by_key(|variant| variant.stages).ok_or(NoSuchTile { tile: program.tile })
    }

    /// All variants that can execute a program, at least one; their results are equal to the bit.
    ///
    /// # Errors
    /// [`NoSuchTile`] when no kernel has this tile, or none that does what the program asks of it.
    pub fn fitting(program: &TileProgram) -> Result<Vec<Self>, NoSuchTile> {
        let (op, dtype, tile) = (kernel_of(program.problem.op()), program.problem.dtype(), program.tile);
        let fitting: Vec<_> = Self::with_tile(op, dtype, tile).filter(|variant| variant.fits(program)).collect();
        if fitting.is_empty() { Err(NoSuchTile { tile }) } else { Ok(fitting) }
    }

    /// Whether it can execute a program.
    pub fn fits(&self, program: &TileProgram) -> bool {
        let of_program = (kernel_of(program.problem.op()), program.problem.dtype(), program.tile);
        let reduce_scatter = self.op == OpKind::GemmReduceScatter;
        // Rows that go to several owners leave from a buffer of the whole tile.
        let scatters = reduce_scatter && program.flattened;
        let sends_partials = reduce_scatter && !program.flattened && program.problem.world().peers() > 0;
        (self.op, self.dtype, self.tile) == of_program
            && (self.staging == Staging::PerConsumer || !scatters)
            && (self.tile.sends_partials_from(self.staging) || !sends_partials)
    }

    /// The same kernel with time stamps: each launch takes a
    /// [`TraceBuffer`](crate::cuda::TraceBuffer).
    #[must_use]
    pub const fn traced(self) -> Self {
        Self { traced: true, ..self }
    }

    /// The same kernel with this activation of the result; one of [`Activation::of`] the op, as
    /// another does not compile.
    #[must_use]
    pub const fn with_activation(self, activation: Activation) -> Self {
        Self { activation, ..self }
    }

    /// Whether it records.
    pub(crate) const fn is_traced(&self) -> bool {
        self.traced
    }

    /// The operation; GEMM-ReduceScatter also stands for GEMM-AllReduce.
    pub const fn op(&self) -> OpKind {
        self.op
    }

    /// Element type of the operands.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// What is applied to the result.
    pub const fn activation(&self) -> Activation {
        self.activation
    }

    /// Extents of a tile.
    pub const fn tile(&self) -> TileShape {
        self.tile
    }

    /// Whether two steps along k are loaded at once: `kPairs` of config.cuh. Adjacent lines of a
    /// row of `w` are then loaded together, so a miss need bring no more than its line.
    pub(crate) const fn loads_pairs(&self) -> bool {
        self.stages >= 6 && self.stages.is_multiple_of(2)
    }

    /// Whether consumers split a tile by columns instead of rows: `kSplitColumns` of config.cuh.
    const fn splits_columns(&self) -> bool {
        self.tile.m == 64 || self.tile.swaps_ab() && self.tile.n.is_multiple_of(64 * Self::CONSUMERS)
    }

    /// Columns of the boxes in which a tile is stored to `y`: `kBoxCols` of config.cuh. One
    /// consumer's columns are whole boxes.
    pub(crate) const fn box_cols(&self) -> u32 {
        let cols = if self.splits_columns() { self.tile.n / Self::CONSUMERS } else { self.tile.n };
        if cols.is_multiple_of(64) {
            64
        } else if cols.is_multiple_of(32) {
            32
        } else {
            16
        }
    }

    /// Rows of these boxes: `kBoxRows` of config.cuh, whose `kSwapAB` is [`TileShape::swaps_ab`].
    pub(crate) const fn box_rows(&self) -> u32 {
        match self.tile.swaps_ab() {
            false => 64,
            true if self.splits_columns() => self.tile.m,
            true => self.tile.m / Self::CONSUMERS,
        }
    }

    /// Global staging memory of each CTA of a launch, in bytes: the first consumer's part of a
    /// partial tile waits there until the second's is sent.
    pub(crate) const fn epilogue_staging_bytes(&self) -> u64 {
        match (self.op, self.staging) {
            (OpKind::GemmReduceScatter, Staging::Shared) => (self.tile.m * self.tile.n) as u64,
            _ => 0,
        }
    }

    /// Dynamic shared memory of a CTA, in bytes.
    pub const fn shared_bytes(&self) -> u32 {
        self.tile.shared_bytes(self.staging, self.stages, matches!(self.op, OpKind::GemmReduceScatter))
    }

    /// Name of the kernel's entry point.
    pub fn entry(&self) -> String {
        self.to_string()
    }

    /// The translation unit that instantiates the kernel.
    pub fn source(&self) -> Source {
        let name = self.entry();
        let (bf16, rs) = (self.dtype == DType::Bf16, self.op == OpKind::GemmReduceScatter);
        let (buffers, stages, traced, activation) = (self.staging.buffers(), self.stages, self.traced, self.activation.cuda_name());
        let TileShape { m, n, k, .. } = self.tile;
        let text = format!(
            "#include \"sm90/fused_gemm.cuh\"\n\
             using C = flux::Config<{m}, {n}, {buffers}, {stages}, {bf16}, {rs}, flux::Activation::{activation}, {traced}>;\n\
             static_assert(C::kSharedBytes == {shared} && C::kThreads == {threads} && C::kPairs == {pairs} && C::kTileK == {k}, \"variant.rs\");\n\
             static_assert(C::kBoxCols == {box_cols} && C::kBoxRows == {box_rows}, \"variant.rs\");\n\
             static_assert(C::kCanSendPartials == {sends} && C::kSwapAB == {swaps}, \"table.rs\");\n\
             extern \"C\" __global__ void __launch_bounds__({threads}, 1) {name}(const __grid_constant__ flux::Params p) {{\n    \
             flux::fused_gemm<C>(p);\n}}\n",
            pairs = self.loads_pairs(),
            shared = self.shared_bytes(),
            threads = Self::THREADS,
            box_cols = self.box_cols(),
            box_rows = self.box_rows(),
            sends = self.tile.sends_partials_from(self.staging),
            swaps = self.tile.swaps_ab(),
        );
        Source { name, text }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "flux_{}_{}_{}_s{}", self.op, self.dtype, self.tile, self.stages)?;
        if self.activation != Activation::None {
            write!(f, "_{}", self.activation)?;
        }
        if self.traced { f.write_str("_traced") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::program::Schedule;
    use flux_core::{Problem, Rank, WorldSize};

    fn program(op: OpKind, m: usize, flattened: bool) -> TileProgram {
        let problem = Problem::new(op, m, 2048, 4096, DType::Bf16, WorldSize::new(2).unwrap()).unwrap();
        TileProgram::build(&problem, Rank::new(0), &Schedule { flattened, ..Schedule::of(TileShape::new(128, 256, 64)) }).unwrap()
    }

    #[test]
    fn scattered_rows_need_a_buffer_for_each_consumer() {
        let stagings =
            |op, flattened| Variant::fitting(&program(op, 512, flattened)).unwrap().iter().map(|v| v.staging).collect::<Vec<_>>();
        assert_eq!(stagings(OpKind::GemmReduceScatter, true), [Staging::PerConsumer]);
        assert_eq!(stagings(OpKind::GemmReduceScatter, false), [Staging::PerConsumer, Staging::Shared]);
        assert_eq!(stagings(OpKind::AllGatherGemm, true), [Staging::Shared]);
        let [_, shared] = Variant::fitting(&program(OpKind::GemmReduceScatter, 512, false)).unwrap()[..] else { unreachable!() };
        assert!(!shared.fits(&program(OpKind::GemmReduceScatter, 512, true)), "a launch refuses it");
        assert!(!shared.fits(&program(OpKind::AllGatherGemm, 512, false)), "of another op");
    }

    /// As a launch finds them: a program of each tile, with flattened rows and with rows per shard.
    #[test]
    fn the_tile_table_says_what_there_are_kernels_for() {
        for tile in TileShape::all() {
            let problem = Problem::new(OpKind::GemmReduceScatter, 1024, 2048, 4096, DType::Bf16, WorldSize::new(2).unwrap()).unwrap();
            let has_kernel = |flattened| {
                let program = TileProgram::build(&problem, Rank::new(0), &Schedule { flattened, ..Schedule::of(tile) }).unwrap();
                Variant::of(&program).is_ok()
            };
            assert_eq!([tile.scatters(), tile.sends_partials()], [true, false].map(has_kernel), "{tile}");
        }
    }

    #[test]
    fn a_tile_without_a_kernel_is_answered_with_those_that_have_one() {
        let text = NoSuchTile { tile: TileShape::new(128, 160, 64) }.to_string();
        assert!(text.starts_with("there is no kernel for tiles of 128x160x64 here: use 128x256x64, "), "{text}");
        assert!(TileShape::all().all(|tile| text.contains(&tile.to_string())), "{text}");
    }

    #[test]
    fn the_variant_with_more_stages_is_taken() {
        let chosen = |op, flattened| Variant::of(&program(op, 512, flattened)).unwrap();
        let (ag, rs, scatters) =
            (chosen(OpKind::AllGatherGemm, false), chosen(OpKind::GemmReduceScatter, false), chosen(OpKind::GemmReduceScatter, true));
        assert_eq!([ag.stages, rs.stages, scatters.stages], [4, 4, 3]);
        assert!(rs.epilogue_staging_bytes() > 0 && ag.epilogue_staging_bytes() == 0 && scatters.epilogue_staging_bytes() == 0);
    }
}
