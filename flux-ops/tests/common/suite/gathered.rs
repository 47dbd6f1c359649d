//! The gathered `x` of an AllGather-GEMM: the shards of all ranks bit for bit, and refused where it
//! does not fit.

use super::{Case, Machine, Number, build, build_case, call, defaults, layouts};
use crate::common::{Node, OpOptions, Values};
use flux_core::OpKind;
use flux_core::plan::{CommMode, KSplit, Mover, Plan, RowMapping};
use flux_ops::{CallError, DType, FusedLinear, Layout, Location, RawTensor, TensorMut};
use half::{bf16, f16};

const AG: OpKind = OpKind::AllGatherGemm;

/// Most rows of a call.
const MOST: usize = 211;

fn case<T: Number>(machine: Machine, world: u32, m: usize, seed: usize) -> Case<T> {
    let w = world as usize;
    let (n, k) = if machine == Machine::Host { (16 * w, 40) } else { (136 * w, 456) };
    Case::new(AG, [m, n, k], world, Values::Reals, seed as u64)
}

/// A call: `y`, and the gathered rows, which must leave the gaps between them alone.
pub fn call_gathered<T: Number>(
    op: &FusedLinear,
    case: &Case<T>,
    node: &Node,
    gap: usize,
) -> (Vec<T>, Vec<T>) {
    let (lx, lw, ly) = layouts(case, node.rank);
    let (rows, cols) = (case.problem.m() as usize, lx.cols);
    let full = Layout::strided(rows, cols, cols + gap);
    let (x, w) = (node.upload(&case.x(node.rank)), node.upload(&case.w(node.rank)));
    let (mut y, mut x_full) =
        (node.poisoned::<T>(ly.span()), node.poisoned::<T>(rows * full.row_stride));
    let (x, w, mut to) = (node.view(&x, lx), node.view(&w, lw), node.view_mut(&mut x_full, full));
    op.call(&x)
        .weight(&w, &mut node.view_mut(&mut y, ly))
        .gathered(&mut to)
        .on(node.stream())
        .unwrap();
    drop((x, w, to));
    let x_full = node.download(&x_full);
    let (rows, gaps): (Vec<&[T]>, Vec<&[T]>) =
        x_full.chunks_exact(full.row_stride).map(|row| row.split_at(cols)).unzip();
    assert!(
        gaps.concat().iter().all(|gap| gap.to_f32().is_nan()),
        "written between rows: {}",
        op.explain()
    );
    (node.download(&y), rows.concat())
}

/// The op's own plan, and some of every row mapping and mover that the machine has.
fn plans(machine: Machine) -> Vec<Option<Plan>> {
    let plain = Plan::of(machine.tiles()[0]);
    let flattened = Plan { rows: RowMapping::Flattened, ..plain };
    let grouped = Plan {
        rows: RowMapping::PerShard { group: 2 },
        k: KSplit::SplitK(2),
        k_slices: 2,
        ..plain
    };
    let comm = |comm| Some(Plan { comm, ..plain });
    let mut plans = vec![
        None,
        comm(CommMode::Fused { mover: Mover::CopyEngine }),
        comm(CommMode::Fused { mover: Mover::Kernel }),
    ];
    match machine {
        // Across nodes rows are not flattened.
        Machine::TwoNodes { .. } => return plans,
        Machine::Messages(_) => {
            plans.extend([comm(CommMode::Sequential), comm(CommMode::Overlapped { peers: 1 })]);
        }
        _ => {}
    }
    plans.extend([Some(flattened), Some(grouped)]);
    plans
}

fn hands_out<T: Number>(machine: Machine) {
    let rows = [MOST, 1, 7, 96, 2, 131, 24, MOST];
    for world in machine.worlds(&[1, 2, 3, 4, 7, 8]) {
        let cases: Vec<_> =
            rows.iter().enumerate().map(|(call, &m)| case::<T>(machine, world, m, call)).collect();
        for plan in plans(machine) {
            machine.run(world, defaults, |node| {
                let options = OpOptions { workers: node.workers, ..OpOptions::of(plan) };
                let shape = [MOST, cases[0].problem.n() as usize, cases[0].problem.k() as usize];
                let op = build::<T>(AG, shape, options, &node.comm).unwrap();
                for (turn, case) in cases.iter().enumerate() {
                    let alone = call(&op, case, node).unwrap();
                    // Each rank decides for itself, and peers go on meanwhile.
                    if (turn + node.rank.index()) % 3 == 2 {
                        assert!(call(&op, case, node).unwrap() == alone);
                        continue;
                    }
                    let (y, x_full) = call_gathered(&op, case, node, 8 * (turn % 2));
                    assert!(
                        x_full == case.all_x(),
                        "rank {}: other rows, {}: {}",
                        node.rank,
                        case.problem,
                        op.explain()
                    );
                    assert!(
                        y == alone,
                        "rank {}: another result, {}: {}",
                        node.rank,
                        case.problem,
                        op.explain()
                    );
                }
                op.status().unwrap();
            });
        }
    }
}

pub fn gathered_rows_are_those_of_all_ranks(machine: Machine) {
    hands_out::<bf16>(machine);
    hands_out::<f16>(machine);
}

/// Calls follow each other without a wait of the host, so a peer that is ahead fills the next
/// buffer while this rank still copies.
pub fn gathered_rows_of_calls_in_a_row_do_not_mix(machine: Machine) {
    for world in machine.worlds(&[2, 3, 4, 8]) {
        let cases: Vec<_> =
            (0..6).map(|seed| case::<bf16>(machine, world, MOST - 2 * seed, seed)).collect();
        machine.run(world, defaults, |node| {
            let op = build_case(&cases[0], OpOptions::default(), node);
            let w = node.upload(&cases[0].w(node.rank));
            let mut buffers: Vec<_> = cases
                .iter()
                .map(|case| {
                    let (lx, _, ly) = layouts(case, node.rank);
                    let full = Layout::dense(case.problem.m() as usize, lx.cols);
                    let memory = (
                        node.upload(&case.x(node.rank)),
                        node.poisoned::<bf16>(ly.span()),
                        node.poisoned::<bf16>(full.span()),
                    );
                    (memory, (lx, ly, full))
                })
                .collect();
            let lw = layouts(&cases[0], node.rank).1;
            for ((x, y, x_full), (lx, ly, full)) in &mut buffers {
                let (x, w) = (node.view(x, *lx), node.view(&w, lw));
                let (mut y, mut to) = (node.view_mut(y, *ly), node.view_mut(x_full, *full));
                op.call(&x).weight(&w, &mut y).gathered(&mut to).on(node.stream()).unwrap();
            }
            for (case, ((_, _, x_full), _)) in cases.iter().zip(&buffers) {
                assert!(
                    node.download(x_full) == case.all_x(),
                    "rank {}: other rows, {}",
                    node.rank,
                    case.problem
                );
            }
            op.status().unwrap();
        });
    }
}

pub fn a_call_without_rows_gathers_none(machine: Machine) {
    for world in machine.worlds(&[1, 2]) {
        let case = case::<bf16>(machine, world, MOST, 3);
        machine.run(world, defaults, |node| {
            let op = build_case(&case, OpOptions::default(), node);
            let (lx, lw, ly) = layouts(&case, node.rank);
            let none = |layout: Layout| Layout { rows: 0, ..layout };
            let (x, w) = (node.poisoned(lx.span()), node.poisoned(lw.span()));
            let (mut y, mut x_full) =
                (node.poisoned::<bf16>(ly.span()), node.poisoned::<bf16>(lx.span()));
            let (x, w, mut to) =
                (node.view(&x, none(lx)), node.view(&w, lw), node.view_mut(&mut x_full, none(lx)));
            op.call(&x)
                .weight(&w, &mut node.view_mut(&mut y, none(ly)))
                .gathered(&mut to)
                .on(node.stream())
                .unwrap();
            drop((x, w, to));
            assert!(node.download(&x_full).iter().all(|v| v.is_nan()));
            assert!(call_gathered(&op, &case, node, 0).1 == case.all_x());
        });
    }
}

/// One rank makes every bad call, and launches nothing: the next call of all ranks is good.
pub fn gathered_rows_that_do_not_fit_are_refused(machine: Machine) {
    for world in machine.worlds(&[1, 2]) {
        let case = case::<bf16>(machine, world, MOST, 5);
        machine.run(world, defaults, |node| {
            let op = build_case(&case, OpOptions::default(), node);
            if node.rank.get() == world - 1 {
                make_every_bad_call(&op, &case, node);
            }
            assert!(call_gathered(&op, &case, node, 0).1 == case.all_x());
        });
    }
}

fn make_every_bad_call(op: &FusedLinear, case: &Case<bf16>, node: &Node) {
    let (lx, lw, ly) = layouts(case, node.rank);
    let full = Layout::dense(case.problem.m() as usize, lx.cols);
    // Each large enough for any view.
    let of = || node.poisoned::<bf16>(full.span().max(lw.span()).max(ly.span()) + 8 * full.rows);
    let (x, w, mut y, other) = (of(), of(), of(), of());
    let (x_view, w_view, here) =
        (node.view(&x, lx), node.view(&w, lw), node.view(&x, lx).location());
    let y_address = node.address(&y);
    let mut refused = |address, location, layout: Layout| {
        let raw = RawTensor {
            address,
            dtype: DType::Bf16.into(),
            location,
            layout,
            available: layout.span(),
        };
        // SAFETY: what is refused accesses nothing; the memory outlives the calls.
        let mut to = unsafe { TensorMut::<bf16>::from_raw(raw) }.unwrap();
        let mut y = node.view_mut(&mut y, ly);
        op.call(&x_view).weight(&w_view, &mut y).gathered(&mut to).on(node.stream()).unwrap_err()
    };
    let free = node.address(&other);
    for wrong in [Layout::dense(full.rows - 1, full.cols), Layout::dense(full.rows, full.cols + 8)]
    {
        let error = refused(free, here, wrong);
        assert!(
            matches!(error, CallError::Shape { operand: "x_full", found, .. } if found == wrong),
            "{error}"
        );
    }
    let elsewhere = if here == Location::Host { Location::Cuda(0) } else { Location::Host };
    let error = refused(free, elsewhere, full);
    assert!(
        matches!(error, CallError::Location { operand: "x_full", found, .. } if found == elsewhere),
        "{error}"
    );
    for (shares, address) in [("x", node.address(&x)), ("w", node.address(&w)), ("y", y_address)] {
        let error = refused(address, here, full);
        let wanted = if shares == "y" { ("y", "x_full") } else { ("x_full", shares) };
        assert!(
            matches!(error, CallError::Overlap { output, operand, .. }
                if (output, operand) == wanted),
            "{error}"
        );
    }
    assert!(
        node.download(&y).iter().chain(&node.download(&other)).all(|e| e.is_nan()),
        "a refused call wrote"
    );
}
