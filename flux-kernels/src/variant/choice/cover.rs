//! Few variants that show whether the sources compile and have registers.
//!
//! Invariant: every tile is there with operands of 16 bits and of each form of 8 bits. Each op has
//! every element type, with and without gates, and all large tiles.

use super::super::{Form, Variant};
use super::forms;
use crate::device::KernelTarget;
use crate::nvrtc::Arch;
use flux_core::tile::Generation;
use flux_core::{Numerics, OpKind, Partials};

impl Variant {
    /// Few variants for a target that show whether the sources compile and have registers.
    ///
    /// Large tiles have few registers: every op has them. Other tiles are in turns of an op that
    /// gathers or of one that sums. Sums take registers for loading ahead, or else for weights of
    /// `[k, n]`, and some large tiles send [`Partials::F32`]. Fast accumulation has the main loop
    /// of 16-bit operands and the epilogue of scales of rows, so only large tiles have it, in
    /// turns.
    ///
    /// The portable kernel has small tiles for compute capability 8.0, those of 8-bit operands for
    /// 12.0: elsewhere registers are what may differ, and small tiles have enough. PTX has no
    /// registers: one tile of each op shows that it is written.
    pub fn cover(target: KernelTarget) -> Vec<Self> {
        let of_op = |op| forms().flat_map(move |form| Self::in_turns(op, form, target));
        let sums = of_op(OpKind::GemmReduceScatter);
        let in_f32 = sums.clone().filter(Self::is_large).enumerate().filter(|(place, variant)| {
            // Hopper has many large tiles: every fourth pair, as neighbours differ in their types.
            let has_many = target.generation == Generation::Hopper;
            !has_many || variant.numerics.fast_accumulation || place % 8 < 2
        });
        let in_f32 = in_f32.map(|(_, variant)| variant.with_partials(Partials::F32));
        let sums = sums.filter(|variant| !variant.numerics.fast_accumulation);
        let covered = of_op(OpKind::AllGatherGemm)
            .chain(sums.map(Self::with_most_registers))
            .chain(in_f32)
            .filter(|variant| variant.is_large() || !variant.numerics.fast_accumulation);
        match target.arch {
            Arch::Sm90a | Arch::Sm80 => covered.collect(),
            Arch::Sm120 => {
                let is_scaled = |variant: &Self| variant.numerics.operand.is_quantized();
                covered.filter(|variant| variant.is_large() || is_scaled(variant)).collect()
            }
            Arch::Compute80 | Arch::Compute89 => {
                let mut covered: Vec<_> =
                    covered.filter(|variant| variant.ptx() == target.arch).collect();
                covered.dedup_by_key(|variant| (variant.op, variant.numerics.partials));
                covered
            }
            Arch::Sm86 | Arch::Sm89 | Arch::Sm100 => covered.filter(Self::is_large).collect(),
        }
    }

    /// An op's large tiles, and every second of the others unless they are few. Element types and
    /// gates change from one to the next.
    fn in_turns(
        op: OpKind,
        form: Numerics,
        target: KernelTarget,
    ) -> impl Iterator<Item = Self> + Clone {
        let are_few = target.generation == Generation::Ada && form.operand.is_quantized();
        let tiles = target.generation.tiles(form).enumerate();
        let variants: Vec<_> = tiles
            .flat_map(|(place, tile)| {
                let has_turn = are_few || place % 2 == usize::from(op.reduces());
                Self::with_tile(op, form, tile, target).filter(move |variant| {
                    has_turn || variant.is_large() && !form.fast_accumulation
                })
            })
            .collect();
        variants
            .into_iter()
            .zip(Self::finishes(op, form).cycle())
            .map(|(variant, (numerics, gated))| Self { numerics, gated, ..variant })
    }

    /// The same kernel, where it does not load ahead for weights of `[k, n]`.
    fn with_most_registers(self) -> Self {
        let loads_ahead = matches!(self.form, Form::Hopper(_)) && self.loads_ahead();
        if loads_ahead { self } else { self.transposed().unwrap_or(self) }
    }

    /// Whether its accumulators leave few registers. Of 8-bit operands the portable kernel has two
    /// sets of them, where sums leave the tensor cores.
    const fn is_large(&self) -> bool {
        let sets = match self.form {
            Form::Portable if self.numerics.operand.is_quantized() => 2,
            _ => 1,
        };
        sets * self.tile.m * self.tile.n >= 128 * 192
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::{Scales, SumsTo};

    #[test]
    fn a_cover_has_every_tile_and_the_types_of_each_op_and_no_form_twice() {
        for arch in [Arch::Sm90a, Arch::Sm80, Arch::Sm120] {
            let target = KernelTarget::of_arch(arch);
            let (mut all, mut cover) = (Variant::all(target), Variant::cover(target));
            if arch == Arch::Sm120 {
                // Of 16-bit operands sm_80 has every tile.
                let is_scaled = |variant: &Variant| variant.numerics.operand.is_quantized();
                all.retain(is_scaled);
                cover.retain(is_scaled);
            }
            for wanted in &all {
                let kind = |v: &Variant| {
                    let Numerics { scales, fast_accumulation, partials, .. } = v.numerics;
                    (v.op, scales, fast_accumulation, partials)
                };
                let of_op = || cover.iter().filter(|variant| kind(variant) == kind(wanted));
                let forms = of_op()
                    .filter(|variant| (variant.tile, variant.form) == (wanted.tile, wanted.form))
                    .count();
                let Numerics { scales, fast_accumulation, partials, .. } = wanted.numerics;
                let sends = wanted.op.sums_to() == SumsTo::Rows;
                assert!(forms <= 1, "{wanted} {}", arch.name());
                let of_tile = cover.iter().any(|v| {
                    let Numerics { scales: of, fast_accumulation: fast, .. } = v.numerics;
                    (v.tile, of, fast) == (wanted.tile, scales, fast_accumulation)
                        && (fast || v.form == wanted.form)
                });
                assert!(of_tile || fast_accumulation && !wanted.is_large(), "{wanted}");
                // The ops have turns with the others.
                let is_f32 = partials == Partials::F32;
                let is_of_all = wanted.is_large() && !fast_accumulation && !is_f32;
                assert!(forms == 1 || !is_of_all, "{wanted} {}", arch.name());
                assert!(forms == 0 || wanted.is_large() || !is_f32, "{wanted} {}", arch.name());
                let alike = |v: &Variant| {
                    (v.numerics.output, v.gated) == (wanted.numerics.output, wanted.gated)
                };
                // Few tiles with scales are large.
                let may_lack = scales != Scales::None && partials == Partials::F32
                    || fast_accumulation && (sends || arch == Arch::Sm120);
                assert!(may_lack || of_op().any(alike), "{wanted} {}", arch.name());
            }
            assert!(cover.iter().all(|variant| all.contains(variant)), "{}", arch.name());
        }
    }

    #[test]
    fn a_cover_has_large_tiles_of_other_architectures_and_one_of_each_op_of_ptx() {
        for (arch, tiles) in [
            (Arch::Sm86, 2),
            (Arch::Sm89, 2),
            (Arch::Sm100, 2),
            (Arch::Sm120, 2),
            (Arch::Compute80, 1),
            (Arch::Compute89, 1),
        ] {
            let cover = Variant::cover(KernelTarget::of_arch(arch));
            let kinds = [
                (OpKind::AllGatherGemm, Partials::Output),
                (OpKind::GemmReduceScatter, Partials::Output),
                (OpKind::GemmReduceScatter, Partials::F32),
            ];
            for (op, partials) in kinds {
                let of_kind = cover.iter().filter(|v| {
                    let is_scaled = v.numerics.operand.is_quantized();
                    (v.op, v.numerics.partials) == (op, partials)
                        && (arch == Arch::Compute89 || !is_scaled)
                });
                assert_eq!(of_kind.count(), tiles, "{op:?} {partials:?} {}", arch.name());
            }
            let of_all = |v: &&Variant| arch == Arch::Sm120 && v.numerics.operand.is_quantized();
            let others = cover.iter().filter(|v| !of_all(v));
            assert!(others.into_iter().all(Variant::is_large), "{}", arch.name());
        }
    }
}
