//! The instantiations of the fused kernel.
//!
//! Invariant: a variant's numbers are those of `struct Config` in `config.cuh` of its generation,
//! `flux-kernels/cuda/sm90/` or `sm80/`.

use crate::device::KernelTarget;
use crate::epilogue::Activation;
use crate::sources::Source;
use crate::weights::WeightLayout;
use flux_core::program::TileProgram;
use flux_core::tile::{Generation, Staging};
use flux_core::{DType, OpKind, Partials, TileShape};
use std::fmt;

/// One instantiation, by what it is compiled for. It has an operation, an element type, a tile, a
/// staging of finished tiles, a number of operand stages, and a type in which partial sums leave.
/// What is applied to the result, gates, the weights' layout and the time line follow. Both sums
/// over the ranks have one kernel.
///
/// The activation is part of it, because its formula is unrolled over a thread's accumulators: a
/// kernel that chose at run time would hold a copy for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    op: OpKind,
    dtype: DType,
    tile: TileShape,
    form: Form,
    stages: u32,
    partials: Partials,
    activation: Activation,
    gated: bool,
    weights: WeightLayout,
    /// Whether columns of several weights lie side by side.
    several_weights: bool,
    traced: bool,
}

/// The generation, with what only it distinguishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Form {
    /// How a finished tile is staged.
    Hopper(Staging),
    /// Results leave from registers.
    Portable,
}

/// There is no kernel for a tile, or none that does what the program asks of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no kernel for tiles of {tile} here: {}", advice(*generation))]
pub struct NoSuchTile {
    /// The requested tile.
    pub tile: TileShape,
    /// The device's kernel.
    pub generation: Generation,
}

/// The tiles that there are kernels for, in words.
fn advice(generation: Generation) -> String {
    let list = |kept: &dyn Fn(TileShape) -> bool| {
        generation.tiles().filter(|&tile| kept(tile)).map(|tile| tile.to_string()).collect::<Vec<_>>().join(", ")
    };
    let [scatters, sends] = [list(&|tile| !generation.sends_partials(tile)), list(&|tile| !generation.scatters(tile))];
    let mut text = format!("use {}", list(&|tile| generation.scatters(tile) && generation.sends_partials(tile)));
    if !scatters.is_empty() {
        text.push_str("; for gemm_rs and gemm_ar of several ranks with flattened rows also ");
        text.push_str(&scatters);
        text.push_str(", and with rows per shard also ");
        text.push_str(&sends);
    }
    text
}

/// The ops that have kernels of their own; see [`kernel_of`].
const OPS: [OpKind; 2] = [OpKind::AllGatherGemm, OpKind::GemmReduceScatter];

/// The type in which a program's partial sums leave for other ranks, if any do.
fn sent_partials(program: &TileProgram) -> Partials {
    let problem = &program.problem;
    if problem.op().reduces() && (program.rows.is_flattened() || problem.world().peers() > 0) {
        problem.partials()
    } else {
        Partials::OpDType
    }
}

/// The op whose kernel executes `op`: the program alone tells sums for one owner from sums for all.
const fn kernel_of(op: OpKind) -> OpKind {
    if op.reduces() { OpKind::GemmReduceScatter } else { op }
}

impl Variant {
    /// Threads of a CTA: eight consumer warps, and four of producer, mover and those that carry
    /// results and signals.
    pub const THREADS: u32 = 384;
    const CONSUMERS: u32 = 2;

    /// Every variant that is compiled ahead of time for a target. The [`traced`](Self::traced)
    /// forms, those for several weights, and some with [other weights](WeightLayout::Kn) or with
    /// [gates](Self::with_gates), are compiled where they are used.
    pub fn all(target: KernelTarget) -> Vec<Self> {
        let plain = OPS.into_iter().flat_map(|op| Self::plain(op, target));
        let finished = plain.flat_map(|variant| Self::finishes(variant.op).map(move |finish| variant.finished(finish)));
        finished.flat_map(|variant| [Some(variant), variant.transposed(), variant.in_f32()].into_iter().flatten()).collect()
    }

    /// The same kernel with partial sums in fp32, where there are any.
    fn in_f32(self) -> Option<Self> {
        (self.op == OpKind::GemmReduceScatter).then(|| self.with_partials(Partials::F32))
    }

    /// The same kernel for weights of `[k, n]`, unless it has an activation or gates.
    fn transposed(self) -> Option<Self> {
        (self.activation == Activation::None && !self.gated).then(|| self.with_weights(WeightLayout::Kn))
    }

    /// The fewest variants in which each op has every tile of a target in each of its forms, and
    /// every element type and activation, with and without gates; an AllGather-GEMM without them has
    /// several weights. Weights are `[k, n]` where partial
    /// sums are of the op's type, which takes registers. Large tiles, which have few, also send
    /// [`Partials::F32`]; the others record time stamps.
    pub fn cover(target: KernelTarget) -> Vec<Self> {
        let marked = |variant: Self| {
            let several_weights = variant.op == OpKind::AllGatherGemm && !variant.gated;
            Self { several_weights, traced: !variant.is_large(), ..variant }
        };
        let of_op =
            |op| Self::plain(op, target).zip(Self::finishes(op).cycle()).map(move |(variant, finish)| marked(variant.finished(finish)));
        let large = of_op(OpKind::GemmReduceScatter).filter(Self::is_large).map(|variant| variant.with_partials(Partials::F32));
        let sums = of_op(OpKind::GemmReduceScatter).map(|variant| variant.with_weights(WeightLayout::Kn));
        of_op(OpKind::AllGatherGemm).chain(sums).chain(large).collect()
    }

    /// Whether its accumulators leave few registers.
    const fn is_large(&self) -> bool {
        self.tile.m * self.tile.n >= 128 * 192
    }

    /// The kernels of an op, with one element type and no activation.
    fn plain(op: OpKind, target: KernelTarget) -> impl Iterator<Item = Self> {
        target.generation.tiles().flat_map(move |tile| Self::with_tile(op, DType::Bf16, tile, target))
    }

    /// Element types and activations of an op's kernels, without gates and, for the activations that
    /// models use there, with them.
    fn finishes(op: OpKind) -> impl Iterator<Item = (DType, Activation, bool)> + Clone {
        let of_op = Activation::of(op).iter().map(|&activation| (activation, false));
        let gated = [Activation::Silu, Activation::Gelu].into_iter().filter(move |_| op == OpKind::AllGatherGemm);
        let all = of_op.chain(gated.map(|activation| (activation, true)));
        [DType::Bf16, DType::F16].into_iter().flat_map(move |dtype| all.clone().map(move |(activation, gated)| (dtype, activation, gated)))
    }

    const fn finished(self, (dtype, activation, gated): (DType, Activation, bool)) -> Self {
        Self { dtype, activation, gated, ..self }
    }

    fn with_tile(op: OpKind, dtype: DType, tile: TileShape, target: KernelTarget) -> impl Iterator<Item = Self> {
        let forms: Vec<_> = match target.generation {
            Generation::Hopper => tile.stagings().filter(|&staging| Self::is_staged(op, tile, staging)).map(Form::Hopper).collect(),
            Generation::Portable => target.generation.tiles().filter(|&t| t == tile).map(|_| Form::Portable).collect(),
        };
        forms.into_iter().filter_map(move |form| {
            let stages = match form {
                Form::Hopper(staging) => tile.stages(staging, target.shared_bytes)?,
                Form::Portable => tile.portable_stages(target.shared_bytes)?,
            };
            Some(Self {
                op,
                dtype,
                tile,
                form,
                stages,
                partials: Partials::OpDType,
                activation: Activation::None,
                gated: false,
                weights: WeightLayout::Nk,
                several_weights: false,
                traced: false,
            })
        })
    }

    /// Whether there is a Hopper kernel of this form.
    fn is_staged(op: OpKind, tile: TileShape, staging: Staging) -> bool {
        match op {
            // Nothing is scattered, so one buffer does.
            OpKind::AllGatherGemm => staging == Staging::Shared || tile.stagings().count() == 1,
            OpKind::GemmReduceScatter | OpKind::GemmAllReduce => staging == Staging::PerConsumer || tile.sends_partials_from(staging),
        }
    }

    /// The variant for a program, without activation: of two the one with more stages.
    ///
    /// # Errors
    /// As of [`Self::fitting`].
    pub fn of(program: &TileProgram, target: KernelTarget) -> Result<Self, NoSuchTile> {
        let fitting = Self::fitting(program, target)?;
        let none = NoSuchTile { tile: program.tile, generation: target.generation };
        fitting.into_iter().max_by_key(|variant| variant.stages).ok_or(none)
    }

    /// All variants that can execute a program, at least one; their results are equal to the bit.
    ///
    /// # Errors
    /// [`NoSuchTile`] when no kernel has this tile, or none that does what the program asks of it.
    pub fn fitting(program: &TileProgram, target: KernelTarget) -> Result<Vec<Self>, NoSuchTile> {
        let (op, dtype, tile) = (kernel_of(program.problem.op()), program.problem.dtype(), program.tile);
        let several_weights = program.problem.weight_count() > 1;
        let of_tile = Self::with_tile(op, dtype, tile, target);
        let of_tile = of_tile.map(|variant| Self { several_weights, ..variant.with_partials(sent_partials(program)) });
        let fitting: Vec<_> = of_tile.filter(|variant| variant.fits(program)).collect();
        if fitting.is_empty() { Err(NoSuchTile { tile, generation: target.generation }) } else { Ok(fitting) }
    }

    /// Whether it can execute a program.
    pub fn fits(&self, program: &TileProgram) -> bool {
        let of_program = (kernel_of(program.problem.op()), program.problem.dtype(), program.tile, sent_partials(program));
        let reduce_scatter = self.op == OpKind::GemmReduceScatter;
        // Rows that go to several owners leave from a buffer of the whole tile.
        let scatters = reduce_scatter && program.rows.is_flattened();
        let sends_partials = reduce_scatter && !program.rows.is_flattened() && program.problem.world().peers() > 0;
        let does = match self.form {
            Form::Hopper(staging) => {
                (staging == Staging::PerConsumer || !scatters) && (self.tile.sends_partials_from(staging) || !sends_partials)
            }
            Form::Portable => true,
        };
        (self.op, self.dtype, self.tile, self.partials) == of_program
            && self.several_weights == (program.problem.weight_count() > 1)
            && does
    }

    /// The same kernel with time stamps: each launch takes a
    /// [`TraceBuffer`](crate::cuda::TraceBuffer).
    #[must_use]
    pub const fn traced(self) -> Self {
        Self { traced: true, ..self }
    }

    /// Which kernel.
    pub const fn generation(&self) -> Generation {
        match self.form {
            Form::Hopper(_) => Generation::Hopper,
            Form::Portable => Generation::Portable,
        }
    }

    /// The same kernel with this activation of the result; one of [`Activation::of`] the op, as
    /// another does not compile.
    #[must_use]
    pub const fn with_activation(self, activation: Activation) -> Self {
        Self { activation, ..self }
    }

    /// The same kernel with gates: see [`GateLayout`](crate::GateLayout), which a launch tells it.
    /// Of AllGather-GEMM and [`WeightLayout::Nk`]; another does not compile.
    #[must_use]
    pub const fn with_gates(self, gated: bool) -> Self {
        Self { gated, ..self }
    }

    /// Whether its weights are gates and ups.
    pub const fn is_gated(&self) -> bool {
        self.gated
    }

    /// The same kernel with partial sums that leave in this type; [`Partials::F32`] for a
    /// GEMM-ReduceScatter only, as another does not compile.
    #[must_use]
    pub const fn with_partials(self, partials: Partials) -> Self {
        Self { partials, ..self }
    }

    /// The same kernel for weights that lie like this.
    #[must_use]
    pub const fn with_weights(self, weights: WeightLayout) -> Self {
        Self { weights, ..self }
    }

    /// How the weights lie.
    pub const fn weights(&self) -> WeightLayout {
        self.weights
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

    /// In which type partial sums leave for other ranks.
    pub const fn partials(&self) -> Partials {
        self.partials
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
        let columns_per_result = 1 + self.gated as u32;
        let cols = match self.splits_columns() {
            // A block's.
            _ if self.tile.swaps_ab() => 64,
            true => self.tile.n / Self::CONSUMERS,
            false => self.tile.n,
        };
        match cols / columns_per_result {
            cols if cols.is_multiple_of(64) => 64,
            cols if cols.is_multiple_of(32) => 32,
            cols if cols.is_multiple_of(16) => 16,
            _ => 8,
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

    /// Global staging memory of each CTA of a launch, in bytes: `kGlobalStagingBytes` of config.cuh.
    /// An fp32 partial tile waits there until it is sent, and the first consumer's part of another
    /// until the second's is.
    pub(crate) const fn epilogue_staging_bytes(&self) -> u64 {
        match (self.op, self.form, self.partials) {
            (OpKind::GemmReduceScatter, Form::Hopper(_), Partials::F32) => (self.tile.m * self.tile.n * 4) as u64,
            (OpKind::GemmReduceScatter, Form::Hopper(Staging::Shared), Partials::OpDType) => (self.tile.m * self.tile.n) as u64,
            _ => 0,
        }
    }

    /// Dynamic shared memory of a CTA, in bytes.
    pub const fn shared_bytes(&self) -> u32 {
        match self.form {
            Form::Hopper(staging) => self.tile.shared_bytes(staging, self.stages, matches!(self.op, OpKind::GemmReduceScatter)),
            Form::Portable => self.tile.portable_shared_bytes(self.stages),
        }
    }

    /// Name of the kernel's entry point.
    pub fn entry(&self) -> String {
        self.to_string()
    }

    /// The translation unit that instantiates the kernel.
    pub fn source(&self) -> Source {
        let name = self.entry();
        let (bf16, rs) = (self.dtype == DType::Bf16, self.op == OpKind::GemmReduceScatter);
        let (stages, traced, shared, threads) = (self.stages, self.traced, self.shared_bytes(), Self::THREADS);
        let (f32, gated, kn, several) =
            (self.partials == Partials::F32, self.gated, self.weights == WeightLayout::Kn, self.several_weights);
        let activation = self.activation.cuda_name();
        let TileShape { m, n, k, .. } = self.tile;
        let (folder, numbers, check) = match self.form {
            Form::Hopper(staging) => ("sm90", format!("{m}, {n}, {}, {stages}", staging.buffers()), self.hopper_check(staging)),
            Form::Portable => ("sm80", format!("{m}, {n}, {stages}"), self.portable_check()),
        };
        let text = format!(
            "#include \"{folder}/fused_gemm.cuh\"\n\
             using C = flux::Config<{numbers}, {bf16}, {rs}, {f32}, flux::Activation::{activation}, {gated}, {kn}, {several}, {traced}>;\n\
             static_assert(C::kSharedBytes == {shared} && C::kThreads == {threads} && C::kTileK == {k}, \"variant.rs\");\n\
             {check}\
             extern \"C\" __global__ void __launch_bounds__({threads}, 1) {name}(const __grid_constant__ flux::Params p) {{\n    \
             flux::fused_gemm<C>(p);\n}}\n"
        );
        Source { name, text }
    }

    /// That a portable kernel has the warps that are assumed in plans.
    fn portable_check(&self) -> String {
        let (along_m, along_n) = self.tile.portable_warps();
        format!("static_assert(C::kWarpsM == {along_m} && C::kWarpsN == {along_n}, \"table.rs\");\n")
    }

    /// That a Hopper kernel has the boxes and the form that are assumed here.
    fn hopper_check(&self, staging: Staging) -> String {
        format!(
            "static_assert(C::kPairs == {pairs} && C::kBoxCols == {box_cols} && C::kBoxRows == {box_rows}, \"variant.rs\");\n\
             static_assert(C::kGlobalStagingBytes == {staged}, \"variant.rs\");\n\
             static_assert(C::kCanSendPartials == {sends} && C::kSwapAB == {swaps}, \"table.rs\");\n",
            staged = self.epilogue_staging_bytes(),
            pairs = self.loads_pairs(),
            box_cols = self.box_cols(),
            box_rows = self.box_rows(),
            sends = self.tile.sends_partials_from(staging),
            swaps = self.tile.swaps_ab(),
        )
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "flux_{}_{}_{}_s{}", self.op, self.dtype, self.tile, self.stages)?;
        if self.activation != Activation::None {
            write!(f, "_{}", self.activation)?;
        }
        if self.gated {
            f.write_str("_gated")?;
        }
        if self.partials == Partials::F32 {
            f.write_str("_f32_partials")?;
        }
        if self.weights == WeightLayout::Kn {
            f.write_str("_kn")?;
        }
        if self.several_weights {
            f.write_str("_several")?;
        }
        if self.form == Form::Portable {
            write!(f, "_{}", Generation::Portable)?;
        }
        if self.traced { f.write_str("_traced") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvrtc::Arch;
    use flux_core::layout::RowLayout;
    use flux_core::program::Schedule;
    use flux_core::{Problem, Rank, WorldSize};

    const HOPPER: KernelTarget = KernelTarget::of_arch(Arch::Sm90a);

    fn program(op: OpKind, m: usize, rows: RowLayout) -> TileProgram {
        let problem = Problem::new(op, m, 2048, 4096, DType::Bf16, WorldSize::new(2).unwrap()).unwrap();
        TileProgram::build(&problem, Rank::new(0), &Schedule { rows, ..Schedule::of(TileShape::new(128, 256, 64)) }).unwrap()
    }

    #[test]
    fn scattered_rows_need_a_buffer_for_each_consumer() {
        let stagings = |op, rows| Variant::fitting(&program(op, 512, rows), HOPPER).unwrap().iter().map(|v| v.form).collect::<Vec<_>>();
        assert_eq!(stagings(OpKind::GemmReduceScatter, RowLayout::Flattened), [Form::Hopper(Staging::PerConsumer)]);
        assert_eq!(stagings(OpKind::GemmReduceScatter, RowLayout::PerShard), [Staging::PerConsumer, Staging::Shared].map(Form::Hopper));
        assert_eq!(stagings(OpKind::AllGatherGemm, RowLayout::Flattened), [Form::Hopper(Staging::Shared)]);
        let [_, shared] = Variant::fitting(&program(OpKind::GemmReduceScatter, 512, RowLayout::PerShard), HOPPER).unwrap()[..] else {
            unreachable!()
        };
        assert!(!shared.fits(&program(OpKind::GemmReduceScatter, 512, RowLayout::Flattened)), "a launch refuses it");
        assert!(!shared.fits(&program(OpKind::AllGatherGemm, 512, RowLayout::PerShard)), "of another op");
    }

    #[test]
    fn a_cover_has_every_tile_type_and_activation_of_each_op_and_no_form_twice() {
        for arch in Arch::ALL {
            let target = KernelTarget::of_arch(arch);
            let (all, cover) = (Variant::all(target), Variant::cover(target));
            for wanted in &all {
                let of_op = || cover.iter().filter(|variant| (variant.op, variant.partials) == (wanted.op, wanted.partials));
                let forms = of_op().filter(|variant| (variant.tile, variant.form) == (wanted.tile, wanted.form)).count();
                let has = wanted.partials == Partials::OpDType || wanted.is_large();
                assert_eq!(forms, usize::from(has), "{wanted} {}", arch.name());
                assert!(of_op().any(|variant| variant.dtype == wanted.dtype), "{wanted} {}", arch.name());
                let alike = |variant: Variant| (variant.activation, variant.gated) == (wanted.activation, wanted.gated);
                assert!(of_op().any(|&variant| alike(variant)), "{wanted} {}", arch.name());
            }
            let plain = |variant: &Variant| Variant { traced: false, several_weights: false, weights: WeightLayout::Nk, ..*variant };
            assert!(cover.iter().all(|variant| all.contains(&plain(variant)) && variant.traced != variant.is_large()), "{}", arch.name());
            let f32 = |op| cover.iter().any(|variant| (variant.op, variant.partials) == (op, Partials::F32));
            assert_eq!(OPS.map(f32), [false, true], "{}", arch.name());
        }
    }

    /// As a launch finds them: a program of each tile, with flattened rows and with rows per shard.
    #[test]
    fn the_tile_table_says_what_there_are_kernels_for() {
        let targets = Arch::ALL.map(KernelTarget::of_arch);
        for (target, tile) in targets.into_iter().flat_map(|target| target.generation.tiles().map(move |tile| (target, tile))) {
            let problem = Problem::new(OpKind::GemmReduceScatter, 1024, 2048, 4096, DType::Bf16, WorldSize::new(2).unwrap()).unwrap();
            let has_kernel = |rows| {
                let program = TileProgram::build(&problem, Rank::new(0), &Schedule { rows, ..Schedule::of(tile) }).unwrap();
                Variant::of(&program, target).is_ok()
            };
            let generation = target.generation;
            let says = [generation.scatters(tile), generation.sends_partials(tile)];
            assert_eq!(says, [RowLayout::Flattened, RowLayout::PerShard].map(has_kernel), "{tile} {}", target.arch.name());
        }
    }

    #[test]
    fn programs_that_send_f32_partials_have_kernels_of_their_own() {
        let of = |op, rows, partials| {
            let TileProgram { problem, .. } = program(op, 512, rows);
            let schedule = Schedule { rows, ..Schedule::of(TileShape::new(128, 256, 64)) };
            TileProgram::build(&problem.with_partials(partials), Rank::new(0), &schedule).unwrap()
        };
        for rows in [RowLayout::PerShard, RowLayout::Flattened] {
            let [rounded, f32] = [Partials::OpDType, Partials::F32].map(|partials| of(OpKind::GemmReduceScatter, rows, partials));
            let variants = Variant::fitting(&f32, HOPPER).unwrap();
            assert!(variants.iter().all(|variant| variant.partials == Partials::F32 && variant.fits(&f32) && !variant.fits(&rounded)));
            assert_eq!(variants.len(), Variant::fitting(&rounded, HOPPER).unwrap().len(), "the same tiles and forms");
            assert!(variants.iter().all(|variant| variant.epilogue_staging_bytes() == 128 * 256 * 4));
            let gathers = of(OpKind::AllGatherGemm, rows, Partials::F32);
            assert_eq!(Variant::of(&gathers, HOPPER).unwrap().partials, Partials::OpDType, "it has no partial sums");
        }
    }

    #[test]
    fn a_tile_without_a_kernel_is_answered_with_those_that_have_one() {
        let text = NoSuchTile { tile: TileShape::new(128, 160, 64), generation: Generation::Hopper }.to_string();
        assert!(text.starts_with("there is no kernel for tiles of 128x160x64 here: use 128x256x64, "), "{text}");
        assert!(Generation::Hopper.tiles().all(|tile| text.contains(&tile.to_string())), "{text}");
    }

    #[test]
    fn the_variant_with_more_stages_is_taken() {
        let chosen = |op, rows| Variant::of(&program(op, 512, rows), HOPPER).unwrap();
        let (ag, rs, scatters) = (
            chosen(OpKind::AllGatherGemm, RowLayout::PerShard),
            chosen(OpKind::GemmReduceScatter, RowLayout::PerShard),
            chosen(OpKind::GemmReduceScatter, RowLayout::Flattened),
        );
        assert_eq!([ag.stages, rs.stages, scatters.stages], [4, 4, 3]);
        assert!(rs.epilogue_staging_bytes() > 0 && ag.epilogue_staging_bytes() == 0 && scatters.epilogue_staging_bytes() == 0);
    }
}
