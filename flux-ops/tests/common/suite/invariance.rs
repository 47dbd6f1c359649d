//! Batch-invariant ops: equal rows have equal bits in every call and at every place, on every
//! transport.

use super::{
    Case, Check, Machine, Number, build, build_case, call, call_with_norm, defaults, unaligned,
};
use crate::common::{Node, OPS, OpOptions, Values};
use flux_core::OpKind;
use flux_core::plan::{Chunk, CommMode, KSplit, Plan, RowMapping, SumOrder};
use flux_ops::{Activation, BuildError};
use flux_transport::TransportKind;
use half::{bf16, f16};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher};

/// Different rows; all others are equal to one of them.
const KINDS: u64 = 5;

/// Numbers of rows of the calls, which fall into many buckets.
fn rows(machine: Machine) -> Vec<usize> {
    match machine {
        Machine::Host => (1..=33).chain([64, 100, 129, 200]).collect(),
        _ => vec![1, 7, 64, 100, 128, 512, 1000, 4096],
    }
}

/// On GPUs with steps of `k` enough for stream-K to pay.
fn shape(machine: Machine, op: OpKind, world: u32, m: usize) -> [usize; 3] {
    let (w, [_, n, _]) = (world as usize, unaligned(machine, op, world));
    let k = if machine == Machine::Host { 136 } else { 1544 };
    [m, n, if op.reduces() { k * w + w / 3 * 8 } else { k }]
}

/// The kind of row `i` of a call with `m` rows: others at each place, in every call.
fn kind(m: usize, i: usize) -> u64 {
    (i as u64 * 7 + i as u64 / 3 + m as u64) % KINDS
}

/// A call with `m` rows, with a bias and, of a sum, a residual.
fn case<T: Number>(machine: Machine, op: OpKind, world: u32, m: usize) -> Case<T> {
    let activation = if op.reduces() { Activation::None } else { Activation::Silu };
    let case = Case::new(op, shape(machine, op, world, m), world, Values::Reals, 167).finished(
        true,
        Values::Reals,
        activation,
    );
    case.with_residual(Values::Reals).with_rows_of(Values::Reals, |i| kind(m, i))
}

/// The bits of each kind of row, as hashes.
type Bits = BTreeMap<u64, u64>;

/// Enters the bits of a call's rows, which are those of their kind.
fn enter<T: Number>(
    bits: &mut Bits,
    case: &Case<T>,
    node: &Node,
    outputs: &[&[T]],
) -> Result<(), String> {
    let (cols, m) = (case.problem.y_shape(node.rank).cols as usize, case.problem.m() as usize);
    let first = case.output_of(node.rank).next().map_or(0, |at| at / case.problem.n() as usize);
    for row in 0..outputs[0].len() / cols {
        let mut hash = DefaultHasher::new();
        for v in outputs.iter().flat_map(|output| &output[row * cols..][..cols]) {
            hash.write_u32(v.to_f32().to_bits());
        }
        let (kind, hash) = (kind(m, first + row), hash.finish());
        if *bits.entry(kind).or_insert(hash) != hash {
            return Err(format!(
                "row {} of {m} has other bits than a row that is equal to it",
                first + row
            ));
        }
    }
    Ok(())
}

/// Enters the bits that other ranks have found, of an op whose rows have all columns on each rank.
fn enter_others(bits: &mut Bits, op: OpKind, node: &Node) -> Result<(), String> {
    let mine: Vec<u8> =
        (0..KINDS).flat_map(|kind| bits.get(&kind).copied().unwrap_or(0).to_le_bytes()).collect();
    let all = node.comm.exchange(&mine).unwrap();
    for (rank, other) in all.iter().enumerate().filter(|_| op.reduces()) {
        for (kind, hash) in
            (0..).zip(other.as_chunks().0.iter().map(|hash| u64::from_le_bytes(*hash)))
        {
            if hash != 0 && *bits.entry(kind).or_insert(hash) != hash {
                return Err(format!("rows of kind {kind} have other bits on rank {rank}"));
            }
        }
    }
    Ok(())
}

/// Calls with many numbers of rows by one op. Returns each rank's bits.
fn bits_of_calls<T: Number>(machine: Machine, op: OpKind, world: u32) -> Vec<Bits> {
    let rows = rows(machine);
    let cases: Vec<Case<T>> = rows.iter().map(|&m| case(machine, op, world, m)).collect();
    let few = cases.iter().rfind(|case| case.problem.m() <= 100).unwrap();
    let expected = few.expected_on(machine);
    machine.run(world, defaults, |node| {
        let options = OpOptions {
            bias: true,
            residual: op.reduces(),
            rms_norm: op.reduces().then_some(1e-5.into()),
            activation: few.activation,
            batch_invariant: true,
            workers: node.workers,
            ..OpOptions::default()
        };
        let most = rows.iter().copied().max().unwrap();
        let built = build::<T>(op, shape(machine, op, world, most), options, &node.comm).unwrap();
        let mut bits = Bits::new();
        // The last ones first: a call does not depend on those before it.
        for case in cases.iter().rev().chain(&cases) {
            let (y, y_norm) = if op.reduces() {
                call_with_norm(&built, case, node)
            } else {
                (call(&built, case, node).unwrap(), Vec::new())
            };
            let outputs = if op.reduces() { vec![&y[..], &y_norm] } else { vec![&y[..]] };
            enter(&mut bits, case, node, &outputs).unwrap_or_else(|why| {
                panic!("rank {}, {op}: {why}: {}", node.rank, built.explain())
            });
            if case.problem.m() == few.problem.m() {
                few.assert_close(&expected, &built, node.rank, &y, "batch-invariant");
            }
        }
        enter_others(&mut bits, op, node)
            .unwrap_or_else(|why| panic!("rank {}, {op}: {why}: {}", node.rank, built.explain()));
        assert_eq!(bits.len() as u64, KINDS, "every kind has bits");
        bits
    })
}

pub fn rows_of_batch_invariant_ops_have_their_own_bits(machine: Machine) {
    for (world, &op) in machine
        .worlds(&[1, 2, 3, 4, 8])
        .into_iter()
        .flat_map(|world| machine.ops().iter().map(move |op| (world, op)))
    {
        if machine.nodes(world).are_mixed() && op.reduces() || machine == Machine::Host && world > 4
        {
            continue;
        }
        bits_of_calls::<bf16>(machine, op, world);
        bits_of_calls::<f16>(machine, op, world);
    }
}

/// Two machines whose executors are the same kernels.
pub fn transports_change_no_bit_of_a_batch_invariant_op(machine: Machine, other: Machine) {
    for (world, op) in
        machine.worlds(&[2, 3, 4, 8]).into_iter().flat_map(|world| OPS.map(|op| (world, op)))
    {
        assert_eq!(
            bits_of_calls::<bf16>(machine, op, world),
            bits_of_calls::<bf16>(other, op, world),
            "{op} of {world} ranks"
        );
    }
}

/// The plans that the op may choose from, one of each tile and one of each row mapping.
fn plans(node: &Node, case: &Case<bf16>) -> Vec<Plan> {
    let (reduces, peers) = (case.problem.op().reduces(), case.problem.world().peers());
    let mut plans: Vec<Plan> = Vec::new();
    for plan in flux_ops::ranked_plans(&node.comm, &case.problem) {
        let plan = Plan { k: KSplit::Whole, ..plan };
        let plan = match plan.rows {
            RowMapping::PerShard { .. } if reduces => continue,
            // Messages in place of the library's collective.
            _ if reduces && node.comm.transport() == TransportKind::Nccl => {
                Plan { chunk: Chunk::Shard, comm: CommMode::Overlapped { peers }, ..plan }
            }
            _ => plan,
        };
        if plans.iter().all(|known| known.tile != plan.tile)
            || plans.iter().all(|known| known.rows != plan.rows)
        {
            plans.push(plan);
        }
    }
    plans
}

pub fn tiles_change_no_bit_of_a_batch_invariant_op(machine: Machine) {
    for (world, op) in machine
        .worlds(&[2, 4])
        .into_iter()
        .flat_map(|world| machine.ops().iter().map(move |&op| (world, op)))
    {
        let case = Case::<bf16>::new(op, shape(machine, op, world, 100), world, Values::Reals, 173)
            .with_rows_of(Values::Reals, |i| kind(100, i));
        machine.run(world, defaults, |node| {
            let plans = plans(node, &case);
            assert!(plans.len() >= if op.reduces() { 9 } else { 10 }, "{plans:?}");
            let mut bits = Bits::new();
            for plan in plans {
                let options = OpOptions {
                    batch_invariant: true,
                    workers: node.workers,
                    ..OpOptions::of(plan)
                };
                let built =
                    build::<bf16>(op, shape(machine, op, world, 100), options, &node.comm).unwrap();
                let y = call(&built, &case, node).unwrap();
                enter(&mut bits, &case, node, &[&y])
                    .unwrap_or_else(|why| panic!("rank {}, {op} by {plan}: {why}", node.rank));
            }
            enter_others(&mut bits, op, node)
                .unwrap_or_else(|why| panic!("rank {}, {op}: {why}", node.rank));
        });
    }
}

/// What the option is for: rows of 512 that are equal have other bits on their owners.
pub fn the_owner_of_a_row_shows_in_its_bits_by_other_plans(machine: Machine) {
    for world in machine.worlds(&[2, 4]) {
        let case = case::<bf16>(machine, OPS[1], world, 512);
        machine.run(world, defaults, |node| {
            let plan = Plan { chunk: Chunk::Tiles(1), ..Plan::of(machine.tiles()[0]) };
            let op = build_case(&case, OpOptions::of(plan), node);
            let mut bits = Bits::new();
            enter(&mut bits, &case, node, &[&call(&op, &case, node).unwrap()]).unwrap();
            let found = enter_others(&mut bits, OPS[1], node);
            assert!(found.is_err(), "no rounding shows: {}", op.explain());
        });
    }
}

pub fn plans_without_one_order_are_refused(machine: Machine) {
    for (world, &op) in machine
        .worlds(&[2, 3])
        .into_iter()
        .flat_map(|world| machine.ops().iter().map(move |op| (world, op)))
    {
        machine.run(world, defaults, |node| {
            let build = |batch_invariant, plan: Option<Plan>| {
                let options =
                    OpOptions { batch_invariant, workers: node.workers, ..OpOptions::of(plan) };
                build::<bf16>(op, shape(machine, op, world, 64), options, &node.comm)
            };
            let tile = machine.tiles()[0];
            let flattened = Plan { rows: RowMapping::Flattened, ..Plan::of(tile) };
            let split = Plan { k: KSplit::SplitK(2), ..flattened };
            let per_shard = op.reduces().then_some((Plan::of(tile), SumOrder::ByOwner));
            let refused = [
                (split, SumOrder::PartsOfK),
                (Plan { k: KSplit::StreamK, ..flattened }, SumOrder::PartsOfK),
            ];
            for (plan, order) in refused.into_iter().chain(per_shard) {
                let error = build(true, Some(plan)).unwrap_err();
                let named = matches!(&error, BuildError::SumOrder { order: found, .. }
                    if *found == order);
                let by_rank_0 = matches!(&error, BuildError::Peer { reason, .. }
                    if reason.contains(&order.to_string()));
                assert!(named || by_rank_0, "rank {}: {error}", node.rank);
            }
            let refused = build(node.rank.get() == 1, None).unwrap_err();
            assert!(matches!(refused, BuildError::Disagreement { .. }), "{refused}");
            assert!(
                refused.to_string().contains("plan of rank 0, batch-invariant, flux "),
                "{refused}"
            );
            if node.comm.nodes().are_mixed() && op.reduces() {
                let error = build(true, None).unwrap_err();
                let by_rank_0 = matches!(&error, BuildError::Peer { reason, .. }
                    if reason.contains("adds up alike"));
                assert!(
                    by_rank_0 || matches!(error, BuildError::NoInvariantPlan { .. }),
                    "{error}"
                );
                return;
            }
            let built = build(true, None).unwrap();
            assert!(built.explain().contains(", batch-invariant, rank "), "{}", built.explain());
        });
    }
}
