//! The variants that most ops take, which are compiled ahead of time also for hosts with a
//! compiler.
//!
//! Invariant: each of 16-bit operands has both element types and both layouts of weights, each of
//! 8-bit operands outputs of bf16. They are the kernels that most rows of the shipped plan table
//! and most of the cost model's first plans for common layers take.

use crate::device::KernelTarget;
use crate::variant::{Variant, forms};
use crate::weights::WeightLayout;
use flux_core::machine::Machine;
use flux_core::plan::{CommMode, Links, Plan, PlanTable, Target};
use flux_core::program::Channels;
use flux_core::tile::Generation;
use flux_core::{DType, Numerics, OpKind, Problem, WorldSize};
use std::cmp::Reverse;

/// Common layers, by hidden extent, inner extent of the MLP and columns of the projection of
/// queries, keys and values: GPT-3 175B, Llama-3 70B and 8B, Qwen3-32B. Sources are in
/// `flux-bench/src/shapes/models.rs`.
const MODELS: [[usize; 3]; 4] =
    [[12288, 49152, 36864], [8192, 28672, 10240], [4096, 14336, 6144], [5120, 25600, 10240]];
/// Rows of a call: decoding, and prefills.
const ROWS: [usize; 7] = [16, 64, 256, 1024, 2048, 4096, 8192];
const WORLDS: [u32; 3] = [2, 4, 8];
/// As NCCL takes them on a host with fast links.
const CHANNELS: Channels = Channels { all: 16, each: 4, part_bytes: 4 << 20, ..Channels::FREE };
const OPS: [OpKind; 3] = [OpKind::AllGatherGemm, OpKind::GemmReduceScatter, OpKind::GemmAllReduce];

/// Most kernels of one 16-bit element type and layout: four times as many variants, and beside them
/// the other sources, are 200 images at most.
const MOST: usize = 49;
/// Most kernels of 8-bit operands.
const MOST_SCALED: usize = 60;
/// The same of the portable kernel. PTX has those of two sizes of shared memory.
const MOST_PORTABLE_SCALED: usize = 9;

/// The variants for a target, each once.
pub(crate) fn variants(target: KernelTarget) -> Vec<Variant> {
    let scaled = forms().filter(|of| of.operand.is_quantized() && !of.fast_accumulation);
    let scaled: Vec<_> = scaled.flat_map(|numerics| counted(target, numerics)).collect();
    let most_scaled = match target.generation {
        Generation::Hopper => MOST_SCALED,
        Generation::Portable | Generation::Ada => MOST_PORTABLE_SCALED,
    };
    most_counted(counted(target, DType::Bf16.into()), MOST)
        .into_iter()
        .flat_map(|kernel| DType::OUTPUTS.map(|dtype| kernel.with_dtype(dtype)))
        .flat_map(|kernel| WeightLayout::ALL.map(|weights| kernel.with_weights(weights)))
        .chain(most_counted(scaled, most_scaled))
        .collect()
}

fn most_counted(mut kernels: Vec<(Variant, usize)>, most: usize) -> Vec<Variant> {
    kernels.sort_by_key(|&(_, count)| Reverse(count));
    kernels.into_iter().take(most).map(|(kernel, _)| kernel).collect()
}

/// The kernels of all plans of such numbers, with the number of plans that take each.
fn counted(target: KernelTarget, numerics: Numerics) -> Vec<(Variant, usize)> {
    let mut counts: Vec<(Variant, usize)> = Vec::new();
    if !target.generation.multiplies(numerics) {
        return counts;
    }
    let measured = measured(target.generation, numerics).into_iter();
    let plans = measured.chain(modelled(target.generation, numerics));
    for kernel in plans.filter_map(|(problem, plan)| kernel(&problem, &plan, target)) {
        match counts.iter_mut().find(|(known, _)| *known == kernel) {
            Some((_, count)) => *count += 1,
            None => counts.push((kernel, 1)),
        }
    }
    counts
}

/// The kernel of a plan, where there is one.
fn kernel(problem: &Problem, plan: &Plan, target: KernelTarget) -> Option<Variant> {
    if plan.comm == CommMode::Sequential {
        // Its GEMM is that of one rank, with rows per shard.
        let (op, numerics) = (problem.op(), problem.numerics());
        let least = numerics.row_multiple() as usize;
        let gemm = Problem::new(op, 1, least, least, numerics, WorldSize::ONE).ok()?;
        return Variant::for_tile(&gemm, plan.tile, false, target).ok();
    }
    Variant::for_tile(problem, plan.tile, plan.is_flattened(), target).ok()
}

/// The shipped rows of a generation with operands of such a form.
fn measured(generation: Generation, numerics: Numerics) -> Vec<(Problem, Plan)> {
    let table = PlanTable::shipped();
    let rows = table.rows().iter().filter(|row| {
        row.key.generation == generation && row.key.numerics.scales == numerics.scales
    });
    rows.filter_map(|row| {
        let (n, k) = (row.key.n as usize, row.key.k as usize);
        let (m, numerics) = (row.m as usize, row.key.numerics);
        Some((Problem::new(row.key.op, m, n, k, numerics, row.key.world).ok()?, row.plan))
    })
    .collect()
}

/// The model's first plans for common layers on a generation's machine, over each kind of link.
fn modelled(generation: Generation, numerics: Numerics) -> Vec<(Problem, Plan)> {
    let machine = match generation {
        Generation::Hopper => Machine::H200,
        Generation::Portable => Machine::A100_SXM,
        Generation::Ada => Machine::L40S,
    };
    let mut plans = Vec::new();
    for world in WORLDS.into_iter().filter_map(WorldSize::new) {
        let links = [
            (machine, Links::PeerMemory),
            (machine.staged(world.get()), Links::HostStaged),
            (machine, Links::Messages(CHANNELS)),
        ];
        for (op, &[hidden, ffn, qkv]) in
            OPS.iter().flat_map(|op| MODELS.iter().map(move |m| (op, m)))
        {
            let layers = if op.gathers() {
                [(ffn, hidden), (qkv, hidden)]
            } else {
                [(hidden, ffn), (hidden, hidden)]
            };
            for ((n, k), m) in layers.into_iter().flat_map(|layer| ROWS.map(move |m| (layer, m))) {
                let Ok(problem) = Problem::new(*op, m, n, k, numerics, world) else { continue };
                plans.extend(links.into_iter().filter_map(|(machine, links)| {
                    let target =
                        Target { machine, links, ..Target::peer_memory(machine, &problem) };
                    Some((problem, *Plan::ranked(&problem, &target).first()?))
                }));
            }
        }
    }
    plans
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aot::Selection;
    use crate::nvrtc::Arch;
    use flux_core::Scales;

    #[test]
    fn ptx_of_8_bit_operands_takes_twenty_images_with_the_quantizer() {
        let shipped = Selection::Shipped.variants(Arch::Compute89);
        assert!((2..20).contains(&shipped.len()), "{}", shipped.len());
        for scales in [Scales::Row, Scales::Block] {
            assert!(shipped.iter().any(|variant| variant.numerics().scales == scales));
        }
        let every = Selection::Every.variants(Arch::Compute89);
        assert!(shipped.iter().all(|variant| every.contains(variant)));
        let of_16_bits = Selection::Shipped.variants(Arch::Compute80);
        let is_scaled = |variant: &Variant| variant.numerics().operand.is_quantized();
        assert!(every.iter().all(is_scaled) && !of_16_bits.iter().any(is_scaled));
    }

    #[test]
    fn two_hundred_images_serve_nearly_all_plans() {
        let target = KernelTarget::of_arch(Arch::Sm90a);
        let (shipped, every) = (variants(target), Variant::all(target));
        let is_scaled = |variant: &&Variant| variant.numerics().operand.is_quantized();
        let scaled = shipped.iter().filter(is_scaled).count();
        assert!(shipped.len() - scaled <= 196 && (1..=60).contains(&scaled), "{scaled} scaled");
        assert!(shipped.iter().all(|variant| every.contains(variant)));
        for numerics in [DType::Bf16.into(), Numerics::e4m3(Scales::Row, DType::Bf16)] {
            let counts = counted(target, numerics);
            let all: usize = counts.iter().map(|(_, count)| count).sum();
            let served: usize = counts
                .iter()
                .filter(|(kernel, _)| shipped.contains(kernel))
                .map(|(_, count)| count)
                .sum();
            assert!(all > 700 && served * 100 > all * 96, "{numerics}: {served} of {all}");
        }
    }
}
