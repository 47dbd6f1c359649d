//! The shapes that are hard.

use crate::harness::EpilogueSpec;
use crate::harness::epilogue::{suffix, with_bias};
use crate::shapes::{Layer, layers};
use flux_core::{DType, Numerics, OpKind, Partials, Problem, Scales, WorldSize};
use flux_ops::{Activation, Operand, OperandSet};

/// One problem of the matrix.
#[derive(Clone, Debug)]
pub(crate) struct SoakCase {
    pub name: String,
    pub problem: Problem,
    /// What the op does to its sums.
    pub epilogue: EpilogueSpec,
    /// Whether it is a whole model's layer, of which a few calls must do.
    pub heavy: bool,
}

/// Per-rank extents of the small shapes: name, rows, split extent, other extent.
const SMALL: [(&str, usize, usize, usize); 5] = [
    // The least that there is: a row a rank, one tile.
    ("least", 1, 8, 8),
    // 129 = 128 + 1; 296 = 2 * 128 + 40; 200 = 3 * 64 + 8: partial tiles in every extent.
    ("unaligned", 129, 296, 200),
    ("unaligned-deep", 129, 200, 1032),
    // One tile less and one more than whole.
    ("short", 127, 248, 504),
    ("whole", 128, 256, 256),
];

/// The matrix of `ops` for `world`; with `models` also whole layers of models.
pub(crate) fn matrix(
    ops: &[OpKind],
    world: WorldSize,
    models: bool,
) -> anyhow::Result<Vec<SoakCase>> {
    let ranks = world.index();
    let mut cases = Vec::new();
    let mut add = |name: &str, problem: Problem, epilogue| {
        let name = format!("{name}{} {problem}", suffix(epilogue));
        cases.push(SoakCase { name, problem, epilogue, heavy: false });
    };
    let problem = |op, m, (n, k), numerics: Numerics| Problem::new(op, m, n, k, numerics, world);
    let plain = EpilogueSpec::default();
    let operands = OperandSet::EMPTY.with(Operand::Bias, true);
    for &op in ops {
        // Which of n and k is split over the ranks.
        let extents = |split: usize, whole: usize| {
            if op.gathers() { (split * ranks, whole) } else { (whole, split * ranks) }
        };
        for (name, rows, split, whole) in SMALL {
            let of = |numerics| problem(op, rows * ranks, extents(split, whole), numerics);
            for dtype in [DType::Bf16, DType::F16] {
                add(name, of(dtype.into())?, plain);
            }
            if op.reduces() {
                add(name, of(DType::F16.into())?.with_partials(Partials::F32), plain);
            }
        }
        // A bias, alone and with each activation, with partial tiles and in the least shape.
        for (name, rows, split, whole) in
            SMALL.into_iter().filter(|(name, ..)| ["least", "unaligned"].contains(name))
        {
            for (dtype, epilogue) in [DType::Bf16, DType::F16]
                .into_iter()
                .flat_map(|d| with_bias(op).map(move |f| (d, f)))
            {
                // Gates and ups are of as many columns each.
                let split = if epilogue.gates.is_some() { 2 * split } else { split };
                let of = problem(op, rows * ranks, extents(split, whole), dtype.into())?;
                add(name, of, epilogue);
            }
        }
        // The first rank has 8 columns or elements of k more, and with them a tile or a step.
        if ranks > 1 {
            let (n, k) = extents(256, 256);
            let (n, k) = if op.reduces() { (n, k + 8) } else { (n + 8, k) };
            add("uneven", problem(op, 128 * ranks, (n, k), DType::Bf16.into())?, plain);
        }
        // m = 8 x 129 whatever the number of ranks, where it divides.
        if 8 * 129 % ranks == 0 && ranks != 8 {
            let of = problem(op, 8 * 129, extents(296, 200), DType::Bf16.into())?;
            add("unaligned-1032", of, plain);
        }
        // Of 8 bits, with partial tiles.
        for scales in Scales::OF_QUANTIZED {
            let numerics = Numerics::e4m3(scales, DType::Bf16);
            let group = numerics.row_multiple() as usize;
            let [split, whole] = [296, 200_usize].map(|extent| extent.next_multiple_of(group));
            add("scaled", problem(op, 129 * ranks, extents(split, whole), numerics)?, plain);
        }
    }
    if ops.iter().any(|op| op.gathers()) {
        // Weights that share the gathered rows: partial tiles, and one of less than a tile.
        let columns = [296, 8, 200].map(|columns| columns * world.get());
        let problem =
            Problem::new(OpKind::AllGatherGemm, 129 * ranks, 504 * ranks, 200, DType::Bf16, world)?
                .with_weights(&columns)?;
        add("several", problem, plain);
        add("several", problem, EpilogueSpec { operands, activation: Activation::Silu, ..plain });
    }
    if models {
        let (shapes, ms) = ("gpt3,llama70b".parse()?, [512, 1024, 2048, 4096, 8192]);
        for Layer { name, problem } in layers(&shapes, ops, &ms, DType::Bf16, world)? {
            let name = format!("{name} {problem}");
            cases.push(SoakCase { name, problem, epilogue: plain, heavy: true });
        }
    }
    Ok(cases)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::Rank;

    #[test]
    fn every_world_has_its_matrix() {
        for ranks in 1..=16 {
            let world = WorldSize::new(ranks).unwrap();
            let cases = matrix(&OpKind::ALL, world, false).unwrap();
            assert!(cases.len() >= 20, "{ranks} ranks: {}", cases.len());
            assert!(cases.iter().all(|c| c.problem.world() == world && !c.heavy));
            let [first, last] = [0, ranks - 1].map(Rank::new);
            let uneven = cases
                .iter()
                .filter(|c| c.problem.w_shape(first) != c.problem.w_shape(last))
                .count();
            assert_eq!(uneven, if ranks > 1 { 3 } else { 0 }, "{ranks} ranks");
            for name in ["least", "unaligned"] {
                for op in OpKind::ALL {
                    for epilogue in with_bias(op) {
                        let name = format!("{name}{} {op}", suffix(epilogue));
                        assert_eq!(
                            cases.iter().filter(|c| c.name.starts_with(&name)).count(),
                            2,
                            "{name}"
                        );
                    }
                }
            }
        }
        let whole = matrix(&OpKind::ALL, WorldSize::new(8).unwrap(), true).unwrap();
        assert_eq!(whole.iter().filter(|c| c.heavy).count(), 30);
        assert!(whole.iter().any(|c| c.problem.m() == 8 * 129
            && c.problem.n_shard() % 128 != 0
            && c.problem.k_shard() % 64 != 0));
    }
}
