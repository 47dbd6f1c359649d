//! Worlds that do not divide the columns of an AllGather-GEMM or the inner extent of a sum: the
//! first ranks have 8 more.

use super::{
    Case, Check, Machine, build, build_case, call, call_gathered, call_with_norm, defaults,
};
use crate::common::{OPS, OpOptions, Values};
use flux_core::plan::{Chunk, CommMode, KSplit, Mover, Plan, RowMapping};
use flux_core::{OpKind, ProblemError, Rank};
use flux_ops::{Activation, AllGatherGemm, BuildError, CallError, GemmReduceScatter, Layout};
use half::bf16;

const WORLDS: [u32; 5] = [2, 3, 5, 6, 7];

/// Extents with `more` groups of 8 than divide: of a rank as many as before, or 8 more, in tiles of
/// which the first ranks have one more.
fn shape(machine: Machine, op: OpKind, world: u32, m: usize, more: usize) -> [usize; 3] {
    let (w, tile) = (world as usize, machine.tiles()[0]);
    // On the last rank whole tiles of columns, or whole steps.
    let (n, k) = (2 * tile.n as usize, 5 * tile.k as usize);
    match op {
        OpKind::AllGatherGemm => [m, n * w + 8 * more, k],
        OpKind::GemmReduceScatter | OpKind::GemmAllReduce => [m, n + 8, k * w + 8 * more],
    }
}

/// The op's own choice, and every way in which tiles, rows and `k` are cut.
fn plans(machine: Machine) -> Vec<Option<Plan>> {
    let plain = Plan { chunk: Chunk::Tiles(1), ..Plan::of(machine.tiles()[0]) };
    let grouped = Plan { rows: RowMapping::PerShard { group: 2 }, k_slices: 2, ..plain };
    let pushed = Plan { comm: CommMode::Fused { mover: Mover::CopyEngine }, ..plain };
    let mut plans = vec![
        plain,
        pushed,
        grouped,
        Plan { k: KSplit::StreamK, ..plain },
        Plan { k: KSplit::SplitK(6), ..grouped },
    ];
    if !matches!(machine, Machine::TwoNodes { .. }) {
        let at_once = Plan { rows: RowMapping::Flattened, chunk: Chunk::Shard, ..plain };
        let flattened = match machine {
            // A message has rows of one owner, and a tile of these may have several.
            Machine::Messages(_) => at_once,
            _ => Plan { chunk: Chunk::Tiles(1), ..at_once },
        };
        let shared = Plan { rows: RowMapping::FlattenedTwoExchanges, ..flattened };
        plans.extend([at_once, flattened, shared]);
        plans.dedup();
        plans.extend([KSplit::SplitK(3), KSplit::StreamK].map(|k| Plan { k, ..flattened }));
        plans.extend([KSplit::SplitK(6), KSplit::StreamK].map(|k| Plan { k, ..shared }));
    }
    [None].into_iter().chain(plans.into_iter().map(Some)).collect()
}

/// Integers with a bias and a residual, of shards that differ by a row, or have none.
pub fn unequal_parts_of_n_and_k_give_the_exact_result(machine: Machine) {
    for (world, &op) in machine
        .worlds(&WORLDS)
        .into_iter()
        .flat_map(|world| machine.ops().iter().map(move |op| (world, op)))
    {
        let w = world as usize;
        let rows = [(1, 1), (40 * w - 1, w - 1)];
        let case = |shape| {
            let case = Case::<bf16>::new(op, shape, world, Values::Integers, 131);
            case.finished(true, Values::Integers, Activation::None).with_residual(Values::Integers)
        };
        let cases: Vec<_> =
            rows.into_iter().map(|(m, more)| case(shape(machine, op, world, m, more))).collect();
        let cases: Vec<_> =
            cases.into_iter().map(|case| (case.expected_on(machine), case)).collect();
        // On one communicator: ranks take longer to connect than to call.
        machine.run(world, defaults, |node| {
            for ((expected, case), plan) in cases
                .iter()
                .flat_map(|case| plans(machine).into_iter().map(move |plan| (case, plan)))
            {
                let op = build_case(case, OpOptions::of(plan), node);
                for _ in 0..2 {
                    case.assert_equal(
                        expected,
                        &op,
                        node.rank,
                        &call(&op, case, node).unwrap(),
                        "a call",
                    );
                }
            }
        });
    }
}

/// Real numbers within the bound; gathered rows and norms with them.
pub fn unequal_parts_of_n_and_k_stay_within_the_bound(machine: Machine) {
    for (world, &op) in machine
        .worlds(&[2, 3, 4])
        .into_iter()
        .flat_map(|world| machine.ops().iter().map(move |op| (world, op)))
    {
        let case = Case::<bf16>::new(
            op,
            shape(machine, op, world, 37 * world as usize + 1, 1),
            world,
            Values::Reals,
            137,
        );
        let case = case.with_residual(Values::Reals);
        let expected = case.expected_on(machine);
        machine.run(world, defaults, |node| {
            for plan in plans(machine) {
                let rms_norm = case.problem.op().reduces().then(|| 1e-5.into());
                let op = build_case(&case, OpOptions { rms_norm, ..OpOptions::of(plan) }, node);
                let y = if rms_norm.is_some() {
                    let (y, y_norm) = call_with_norm(&op, &case, node);
                    super::assert_normalised(&y, &y_norm, case.problem.n() as usize, &op);
                    y
                } else {
                    let (y, x_full) = call_gathered(&op, &case, node, 8);
                    assert!(x_full == case.all_x(), "other rows: {}", op.explain());
                    y
                };
                case.assert_close(&expected, &op, node.rank, &y, "a call");
            }
        });
    }
}

/// A vocabulary whose groups of 8 no small world but 2 divides.
pub fn a_vocabulary_is_split_in_groups_of_8(machine: Machine) {
    const COLUMNS: usize = 50_272;
    for world in machine.worlds(&[3, 4]) {
        let case = Case::<bf16>::new(OPS[0], [5, COLUMNS, 16], world, Values::Integers, 139);
        let expected = case.expected_on(machine);
        machine.run(world, defaults, |node| {
            let op = build_case(&case, OpOptions::default(), node);
            case.assert_equal(
                &expected,
                &op,
                node.rank,
                &call(&op, &case, node).unwrap(),
                "a call",
            );
        });
    }
}

/// An op says each rank's part, and takes operands of that part alone.
pub fn operands_of_another_part_are_refused(machine: Machine) {
    for world in machine.worlds(&[2, 3]) {
        let w = world as usize;
        machine.run(world, defaults, |node| {
            let ag = AllGatherGemm::<bf16>::builder(16, 16 * w + 8, 24).build(&node.comm).unwrap();
            let rs =
                GemmReduceScatter::<bf16>::builder(16, 24, 16 * w + 8).build(&node.comm).unwrap();
            let parts: Vec<_> = (0..world).map(|rank| ag.columns(Rank::new(rank))).collect();
            let starts = (0..w).map(|rank| if rank == 0 { 0 } else { 16 * rank + 8 });
            assert!(
                parts.iter().map(|part| part.start).eq(starts) && parts[w - 1].end == 16 * w + 8,
                "{parts:?}"
            );
            assert_eq!(parts, (0..world).map(|rank| rs.inner(Rank::new(rank))).collect::<Vec<_>>());
            assert_eq!((ag.inner(node.rank), rs.columns(node.rank)), (0..24, 0..24));
            // That of equal parts, of which no rank has one.
            let (mine, rows) =
                (if node.rank.get() == 0 { 24 } else { 16 }, ag.rows(16, node.rank).unwrap().len());
            let other = 40 - mine;
            let (x, w, mut y) = (
                node.poisoned::<bf16>(2048),
                node.poisoned::<bf16>(2048),
                node.poisoned::<bf16>(2048),
            );
            let view = |memory, rows, cols| node.view(memory, Layout::dense(rows, cols));
            let mut refused = |x_shape: (usize, usize),
                               w_shape: (usize, usize),
                               y_shape: (usize, usize),
                               gathers: bool| {
                let (x, w) = (view(&x, x_shape.0, x_shape.1), view(&w, w_shape.0, w_shape.1));
                let mut y = node.view_mut(&mut y, Layout::dense(y_shape.0, y_shape.1));
                let result = if gathers {
                    ag.call(&x).weight(&w, &mut y).on(node.stream())
                } else {
                    rs.forward(&x, &w, &mut y, node.stream())
                };
                match result.unwrap_err() {
                    CallError::Shape { operand, expected, found, .. } => {
                        (operand, expected.rows, expected.cols, found.rows, found.cols)
                    }
                    other => panic!("{other}"),
                }
            };
            let mine32 = mine as u32;
            assert_eq!(
                refused((rows, 24), (other, 24), (16, mine), true),
                ("w", mine32, 24, other, 24)
            );
            assert_eq!(
                refused((rows, 24), (mine, 24), (16, other), true),
                ("y", 16, mine32, 16, other)
            );
            assert_eq!(
                refused((16, other), (24, mine), (rows, 24), false),
                ("x", 16, mine32, 16, other)
            );
            assert_eq!(
                refused((16, mine), (24, other), (rows, 24), false),
                ("w", 24, mine32, 24, other)
            );
        });
    }
}

/// Every rank has a group at least.
pub fn fewer_groups_of_8_than_ranks_are_refused(machine: Machine) {
    for world in machine.worlds(&[2, 3]) {
        let few = 8 * (world as usize - 1);
        machine.run(world, defaults, |node| {
            let build = |op, n, k| {
                build::<bf16>(op, [16, n, k], OpOptions::default(), &node.comm)
                    .map(drop)
                    .unwrap_err()
            };
            for (refused, extent) in [
                (build(OPS[0], few, 16), "n"),
                (build(OPS[1], 16, few), "k"),
                (build(OPS[2], 16, few), "k"),
            ] {
                match refused {
                    BuildError::Problem(ProblemError::TooSmall { name, padded, .. }) => {
                        assert_eq!((name, padded), (extent, 8 * world));
                    }
                    other => panic!("{other}"),
                }
            }
        });
    }
}
