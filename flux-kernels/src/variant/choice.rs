//! Which variants there are, and which of them execute a program.

mod cover;

use super::{Form, Variant};
use crate::device::KernelTarget;
use crate::weights::WeightLayout;
use flux_core::program::TileProgram;
use flux_core::tile::{Generation, Staging};
use flux_core::{DType, Numerics, OpKind, Partials, Problem, Scales, SumsTo, TileShape};

/// There is no kernel for a tile, or none that does what the program asks of it.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no kernel for tiles of {tile} here: {}", advice(*generation, *numerics))]
pub struct NoSuchTile {
    /// The requested tile.
    pub tile: TileShape,
    /// The device's kernel.
    pub generation: Generation,
    /// The requested element types.
    pub numerics: Numerics,
}

flux_core::debug_is_text!(NoSuchTile);

/// The tiles that there are kernels for, in words.
fn advice(generation: Generation, numerics: Numerics) -> String {
    if !generation.multiplies(numerics) {
        return format!(
            "the kernel {generation} multiplies no {numerics} operands, which need compute \
             capability 8.9 or later; use bf16 or fp16 operands"
        );
    }
    let list = |kept: &dyn Fn(TileShape) -> bool| {
        generation
            .tiles(numerics)
            .filter(|&tile| kept(tile))
            .map(|tile| tile.to_string())
            .collect::<Vec<_>>()
            .join(", ")
    };
    let scatters = |tile| generation.scatters(tile, numerics);
    let sends = |tile| generation.sends_partials(tile, numerics);
    let mut text = format!("use {}", list(&|tile| scatters(tile) && sends(tile)));
    let [scatters, sends] = [list(&|tile| !sends(tile)), list(&|tile| !scatters(tile))];
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

/// The element types of kernels with outputs of bf16, which have a mainloop for each. There is none
/// of [`Scales::Tensor`]: see [`numerics_of`].
pub(crate) fn forms() -> impl Iterator<Item = Numerics> + Clone {
    let scaled = DType::QUANTIZED.into_iter().flat_map(|operand| {
        let scales = Scales::OF_QUANTIZED.into_iter().filter(|&of| of != Scales::Tensor);
        scales.map(move |of| Numerics::scaled(operand, of, DType::Bf16))
    });
    let all = std::iter::once(Numerics::from(DType::Bf16)).chain(scaled);
    all.flat_map(|of| [of, Numerics { fast_accumulation: true, ..of }])
        .filter(|form| form.is_supported())
}

/// A form with outputs of this type, which operands of 16 bits have, too.
const fn with_output(form: Numerics, output: DType) -> Numerics {
    let operand = if form.operand.is_quantized() { form.operand } else { output };
    Numerics { operand, output, ..form }
}

/// The element types of a problem's kernel: where no partial sums leave for other ranks, they have
/// the output's type. One scale of all rows is a parameter of the kernel of [`Scales::Row`].
fn numerics_of(problem: &Problem, flattened: bool) -> Numerics {
    let numerics = problem.numerics();
    let leave = flattened || problem.world().peers() > 0;
    let partials = if leave { numerics.partials } else { Partials::Output };
    let scales = match numerics.scales {
        Scales::Tensor => Scales::Row,
        scales => scales,
    };
    Numerics { partials, scales, ..numerics }
}

/// The op whose kernel executes `op`: the program alone tells sums for one owner from sums for all.
const fn kernel_of(op: OpKind) -> OpKind {
    if op.reduces() { OpKind::GemmReduceScatter } else { op }
}

impl Variant {
    /// Every variant for a target: what [`of`](Self::of) returns for any program, with any layout
    /// of weights, with gates and without.
    pub fn all(target: KernelTarget) -> Vec<Self> {
        OPS.into_iter()
            .flat_map(|op| {
                forms().flat_map(move |form| {
                    Self::finishes(op, form).flat_map(move |(numerics, gated)| {
                        Self::plain(op, numerics, target)
                            .map(move |variant| variant.with_gates(gated))
                    })
                })
            })
            .flat_map(|variant| [Some(variant), variant.transposed()])
            .flatten()
            .flat_map(|variant| [Some(variant), variant.in_f32()])
            .flatten()
            .collect()
    }

    /// The variant for a program, of weights `[n, k]` without gates: of two the one with more
    /// stages.
    ///
    /// # Errors
    /// As of [`Self::fitting`].
    pub fn of(program: &TileProgram, target: KernelTarget) -> Result<Self, NoSuchTile> {
        Self::for_tile(&program.problem, program.tile, program.rows.is_flattened(), target)
    }

    /// The same for any program of a problem, by its tile and whether its rows are flattened.
    pub(crate) fn for_tile(
        problem: &Problem,
        tile: TileShape,
        flattened: bool,
        target: KernelTarget,
    ) -> Result<Self, NoSuchTile> {
        let fitting = Self::fitting_tile(problem, tile, flattened, target)?;
        let (generation, numerics) = (target.generation, problem.numerics());
        let none = NoSuchTile { tile, generation, numerics };
        fitting.into_iter().max_by_key(|variant| variant.stages).ok_or(none)
    }

    /// All variants that can execute a program, at least one; their results are equal to the bit.
    ///
    /// # Errors
    /// [`NoSuchTile`] when no kernel has this tile, or none that does what the program asks of it.
    pub fn fitting(program: &TileProgram, target: KernelTarget) -> Result<Vec<Self>, NoSuchTile> {
        Self::fitting_tile(&program.problem, program.tile, program.rows.is_flattened(), target)
    }

    /// The same for any program of a problem, by its tile and whether its rows are flattened.
    fn fitting_tile(
        problem: &Problem,
        tile: TileShape,
        flattened: bool,
        target: KernelTarget,
    ) -> Result<Vec<Self>, NoSuchTile> {
        let numerics = numerics_of(problem, flattened);
        let fitting: Vec<_> = Self::with_tile(kernel_of(problem.op()), numerics, tile, target)
            .filter(|variant| variant.fits_tile(problem, tile, flattened))
            .collect();
        if fitting.is_empty() {
            Err(NoSuchTile { tile, generation: target.generation, numerics })
        } else {
            Ok(fitting)
        }
    }

    /// Whether it can execute a program.
    pub fn fits(&self, program: &TileProgram) -> bool {
        self.fits_tile(&program.problem, program.tile, program.rows.is_flattened())
    }

    fn fits_tile(&self, problem: &Problem, tile: TileShape, flattened: bool) -> bool {
        let wanted = (kernel_of(problem.op()), numerics_of(problem, flattened), tile);
        let reduce_scatter = self.op.sums_to() == SumsTo::Rows;
        // Rows that go to several owners leave from a buffer of the whole tile.
        let scatters = reduce_scatter && flattened;
        let sends_partials = reduce_scatter && !flattened && problem.world().peers() > 0;
        let does = match self.form {
            Form::Hopper(staging) => {
                (staging == Staging::PerConsumer || !scatters)
                    && (self.tile.sends_partials_from(staging, self.numerics.output)
                        || !sends_partials)
            }
            Form::Portable => true,
        };
        let takes_several = self.weights == WeightLayout::Nk && !self.gated;
        (self.op, self.numerics, self.tile) == wanted
            && (problem.weight_count() == 1 || takes_several)
            && does
    }

    /// The same kernel with partial sums in fp32, where there are any.
    fn in_f32(self) -> Option<Self> {
        (self.op.sums_to() == SumsTo::Rows).then(|| self.with_partials(Partials::F32))
    }

    /// The same kernel for weights of `[k, n]`, unless it has gates or operands of 8 bits.
    fn transposed(self) -> Option<Self> {
        (!self.gated && !self.numerics.operand.is_quantized())
            .then(|| self.with_weights(WeightLayout::Kn))
    }

    /// The kernels of an op, with one element type and no gates.
    fn plain(op: OpKind, numerics: Numerics, target: KernelTarget) -> impl Iterator<Item = Self> {
        let tiles = target.generation.tiles(numerics);
        tiles.flat_map(move |tile| Self::with_tile(op, numerics, tile, target))
    }

    /// Element types of an op's kernels, without gates and, of an AllGather-GEMM, with them.
    fn finishes(op: OpKind, form: Numerics) -> impl Iterator<Item = (Numerics, bool)> + Clone {
        let gates = if op.gathers() { &[false, true][..] } else { &[false] };
        DType::OUTPUTS.into_iter().flat_map(move |output| {
            gates.iter().map(move |&gated| (with_output(form, output), gated))
        })
    }

    fn with_tile(
        op: OpKind,
        numerics: Numerics,
        tile: TileShape,
        target: KernelTarget,
    ) -> impl Iterator<Item = Self> {
        let forms: Vec<_> = match target.generation {
            Generation::Hopper => tile
                .stagings(numerics)
                .filter(|&staging| Self::is_staged(op, numerics, tile, staging))
                .map(Form::Hopper)
                .collect(),
            generation => {
                generation.tiles(numerics).filter(|&t| t == tile).map(|_| Form::Portable).collect()
            }
        };
        forms.into_iter().filter_map(move |form| {
            let stages = match form {
                Form::Hopper(staging) => tile.stages(staging, numerics, target.shared_bytes)?,
                Form::Portable => tile.portable_stages(numerics, target.shared_bytes)?,
            };
            Some(Self { op, numerics, tile, form, stages, gated: false, weights: WeightLayout::Nk })
        })
    }

    /// Whether there is a Hopper kernel of this form.
    fn is_staged(op: OpKind, numerics: Numerics, tile: TileShape, staging: Staging) -> bool {
        match op.sums_to() {
            // Nothing is scattered, so one buffer does.
            SumsTo::Nothing => staging == Staging::Shared || tile.stagings(numerics).count() == 1,
            SumsTo::Rows | SumsTo::All => {
                staging == Staging::PerConsumer
                    || tile.sends_partials_from(staging, numerics.output)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvrtc::Arch;
    use flux_core::layout::RowLayout;
    use flux_core::program::Schedule;
    use flux_core::{Problem, Rank, WorldSize};

    const BF16: DType = DType::Bf16;
    const HOPPER: KernelTarget = KernelTarget::of_arch(Arch::Sm90a);

    fn program(op: OpKind, m: usize, rows: RowLayout) -> TileProgram {
        let problem = Problem::new(op, m, 2048, 4096, BF16, WorldSize::new(2).unwrap()).unwrap();
        TileProgram::build(
            &problem,
            Rank::new(0),
            &Schedule { rows, ..Schedule::of(TileShape::new(128, 256, 64)) },
        )
        .unwrap()
    }

    #[test]
    fn scattered_rows_need_a_buffer_for_each_consumer() {
        let stagings = |op, rows| {
            Variant::fitting(&program(op, 512, rows), HOPPER)
                .unwrap()
                .iter()
                .map(|v| v.form)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            stagings(OpKind::GemmReduceScatter, RowLayout::Flattened),
            [Form::Hopper(Staging::PerConsumer)]
        );
        assert_eq!(
            stagings(OpKind::GemmReduceScatter, RowLayout::PerShard),
            [Staging::PerConsumer, Staging::Shared].map(Form::Hopper)
        );
        assert_eq!(
            stagings(OpKind::AllGatherGemm, RowLayout::Flattened),
            [Form::Hopper(Staging::Shared)]
        );
        let [_, shared] =
            Variant::fitting(&program(OpKind::GemmReduceScatter, 512, RowLayout::PerShard), HOPPER)
                .unwrap()[..]
        else {
            unreachable!()
        };
        assert!(
            !shared.fits(&program(OpKind::GemmReduceScatter, 512, RowLayout::Flattened)),
            "a launch refuses it"
        );
        assert!(
            !shared.fits(&program(OpKind::AllGatherGemm, 512, RowLayout::PerShard)),
            "of another op"
        );
    }

    #[test]
    fn several_weights_are_neither_gated_nor_transposed() {
        let problem = Problem::new(
            OpKind::AllGatherGemm,
            512,
            2048,
            4096,
            DType::Bf16,
            WorldSize::new(2).unwrap(),
        )
        .unwrap()
        .with_weights(&[1024, 1024])
        .unwrap();
        let schedule = Schedule::of(TileShape::new(128, 256, 64));
        let program = TileProgram::build(&problem, Rank::new(0), &schedule).unwrap();
        let variant = Variant::of(&program, HOPPER).unwrap();
        assert!(!variant.with_gates(true).fits(&program));
        assert!(!variant.with_weights(WeightLayout::Kn).fits(&program));
    }

    /// So a host without a compiler runs every op.
    #[test]
    fn all_has_the_kernel_of_every_op() {
        let world = WorldSize::new(2).unwrap();
        let scaled = Scales::OF_QUANTIZED.map(|scales| Numerics::e4m3(scales, DType::F16));
        let numerics = [DType::Bf16, DType::F16].map(Numerics::from).into_iter().chain(scaled);
        let archs = [Arch::Sm90a, Arch::Sm80, Arch::Compute80, Arch::Sm89];
        for target in archs.map(KernelTarget::of_arch) {
            let all = Variant::all(target);
            let ops = [OpKind::AllGatherGemm, OpKind::GemmReduceScatter, OpKind::GemmAllReduce];
            for (op, numerics) in
                ops.into_iter().flat_map(|op| numerics.clone().map(move |of| (op, of)))
            {
                let problem = Problem::new(op, 512, 2048, 4096, numerics, world).unwrap();
                for (tile, flattened) in
                    target.generation.tiles(numerics).flat_map(|tile| [(tile, false), (tile, true)])
                {
                    for partials in [Partials::Output, Partials::F32] {
                        let problem = problem.with_partials(partials);
                        let fitting = Variant::for_tile(&problem, tile, flattened, target);
                        let Ok(kernel) = fitting else { continue };
                        let is_scaled = numerics.operand.is_quantized();
                        let layouts =
                            if is_scaled { &[WeightLayout::Nk][..] } else { &WeightLayout::ALL };
                        for &weights in layouts {
                            let kernel = kernel.with_weights(weights);
                            assert!(all.contains(&kernel), "{kernel} {}", target.arch.name());
                        }
                        let gated = kernel.with_gates(true);
                        assert!(!op.gathers() || all.contains(&gated), "{gated}");
                    }
                }
            }
        }
    }

    /// As a launch finds them: a program of each tile, with flattened rows and with rows per shard.
    #[test]
    fn the_tile_table_says_what_there_are_kernels_for() {
        let targets = Arch::ALL.map(KernelTarget::of_arch);
        for (target, tile) in targets
            .into_iter()
            .flat_map(|target| target.generation.tiles(BF16.into()).map(move |tile| (target, tile)))
        {
            let problem = Problem::new(
                OpKind::GemmReduceScatter,
                1024,
                2048,
                4096,
                BF16,
                WorldSize::new(2).unwrap(),
            )
            .unwrap();
            let has_kernel = |rows| {
                let program = TileProgram::build(
                    &problem,
                    Rank::new(0),
                    &Schedule { rows, ..Schedule::of(tile) },
                )
                .unwrap();
                Variant::of(&program, target).is_ok()
            };
            let generation = target.generation;
            let says = [
                generation.scatters(tile, BF16.into()),
                generation.sends_partials(tile, BF16.into()),
            ];
            assert_eq!(
                says,
                [RowLayout::Flattened, RowLayout::PerShard].map(has_kernel),
                "{tile} {}",
                target.arch.name()
            );
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
            let [rounded, f32] = [Partials::Output, Partials::F32]
                .map(|partials| of(OpKind::GemmReduceScatter, rows, partials));
            let variants = Variant::fitting(&f32, HOPPER).unwrap();
            assert!(variants.iter().all(|variant| variant.numerics.partials == Partials::F32
                && variant.fits(&f32)
                && !variant.fits(&rounded)));
            assert_eq!(
                variants.len(),
                Variant::fitting(&rounded, HOPPER).unwrap().len(),
                "the same tiles and forms"
            );
            assert!(
                variants.iter().all(|variant| variant.epilogue_staging_bytes() == 128 * 256 * 4)
            );
            let gathers = of(OpKind::AllGatherGemm, rows, Partials::F32);
            assert_eq!(
                Variant::of(&gathers, HOPPER).unwrap().numerics.partials,
                Partials::Output,
                "it has no partial sums"
            );
        }
    }

    #[test]
    fn a_tile_without_a_kernel_is_answered_with_those_that_have_one() {
        let text = NoSuchTile {
            tile: TileShape::new(128, 160, 64),
            generation: Generation::Hopper,
            numerics: BF16.into(),
        }
        .to_string();
        assert!(
            text.starts_with("there is no kernel for tiles of 128x160x64 here: use 128x256x64, "),
            "{text}"
        );
        assert!(
            Generation::Hopper.tiles(BF16.into()).all(|tile| text.contains(&tile.to_string())),
            "{text}"
        );
    }

    #[test]
    fn operands_that_the_kernel_does_not_multiply_are_answered_with_those_that_it_does() {
        let numerics = Numerics::e4m3(Scales::Row, BF16);
        let problem =
            Problem::new(OpKind::AllGatherGemm, 512, 2048, 4096, numerics, WorldSize::ONE).unwrap();
        let tile = TileShape::new(128, 128, 128);
        let of = |arch| Variant::for_tile(&problem, tile, false, KernelTarget::of_arch(arch));
        assert!(of(Arch::Sm89).is_ok());
        let text = of(Arch::Sm86).unwrap_err().to_string();
        assert!(text.ends_with("capability 8.9 or later; use bf16 or fp16 operands"), "{text}");
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
        assert!(
            rs.epilogue_staging_bytes() > 0
                && ag.epilogue_staging_bytes() == 0
                && scatters.epilogue_staging_bytes() == 0
        );
    }
}
