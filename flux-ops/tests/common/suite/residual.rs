//! Residuals: in every element once, in place too, and refused where they do not fit.

use super::{
    Case, Check, Machine, Number, build, build_case, call, defaults, few_rows, layouts, unaligned,
};
use crate::common::{Memory, Node, OpOptions, Values};
use flux_core::plan::{Chunk, KSplit, Plan, RowMapping};
use flux_core::{DType, OpKind};
use flux_ops::{
    Activation, BuildError, CallError, FusedLinear, Layout, Location, RawTensor, TensorMut,
    TensorRef,
};
use half::{bf16, f16};

const WORLDS: [u32; 4] = [1, 2, 3, 4];

/// The ops with a residual that the machine has.
fn ops(machine: Machine) -> impl Iterator<Item = OpKind> {
    machine.ops().iter().copied().filter(|op| op.reduces())
}

/// The op's own choice, and every way in which a result is written.
fn plans(machine: Machine) -> Vec<Option<Plan>> {
    let mut plans = vec![None];
    for tile in machine.tiles().into_iter().take(if machine == Machine::Host { 1 } else { 2 }) {
        for (rows, k) in [
            (RowMapping::PerShard { group: 1 }, KSplit::Whole),
            (RowMapping::PerShard { group: 2 }, KSplit::SplitK(2)),
            (RowMapping::Flattened, KSplit::Whole),
            (RowMapping::Flattened, KSplit::SplitK(3)),
            (RowMapping::FlattenedTwoExchanges, KSplit::Whole),
        ] {
            plans.push(Some(Plan { rows, k, chunk: Chunk::Tiles(1), ..Plan::of(tile) }));
        }
    }
    plans
}

/// A call whose `y` holds the residual.
fn call_in_place<T: Number>(op: &FusedLinear, case: &Case<T>, node: &Node) -> Vec<T> {
    let (lx, lw, ly) = layouts(case, node.rank);
    let (x, w) = (node.upload(&case.x(node.rank)), node.upload(&case.w(node.rank)));
    let mut y = node.upload(&case.residual(node.rank).unwrap());
    let bias = case.bias(node.rank).map(|bias| node.upload(&bias));
    let bias = bias.as_ref().map(|bias| node.view(bias, (ly.cols,)));
    let (x, w, mut to) = (node.view(&x, lx), node.view(&w, lw), node.view_mut(&mut y, ly));
    let call = op.call(&x).weight(&w, &mut to).residual_in_y();
    let call = if let Some(bias) = &bias { call.bias(bias) } else { call };
    call.on(node.stream()).unwrap();
    drop(to);
    node.download(&y)
}

fn adds_an_integer_residual_once<T: Number>(machine: Machine, bias: bool) {
    for (world, op) in machine
        .worlds(&WORLDS)
        .into_iter()
        .flat_map(|world| ops(machine).map(move |op| (world, op)))
    {
        for (shape, plans) in [
            (unaligned(machine, op, world), vec![None]),
            (few_rows(machine, op, world), plans(machine)),
        ] {
            let case = Case::<T>::new(op, shape, world, Values::Integers, 101).finished(
                bias,
                Values::Integers,
                Activation::None,
            );
            let case = case.with_residual(Values::Integers);
            let expected = case.expected_on(machine);
            machine.run(world, defaults, |node| {
                for &plan in &plans {
                    let op = build_case(&case, OpOptions::of(plan), node);
                    case.assert_equal(
                        &expected,
                        &op,
                        node.rank,
                        &call(&op, &case, node).unwrap(),
                        "a call",
                    );
                    case.assert_equal(
                        &expected,
                        &op,
                        node.rank,
                        &call_in_place(&op, &case, node),
                        "in place",
                    );
                }
            });
        }
    }
}

pub fn an_integer_residual_is_added_exactly_once(machine: Machine) {
    adds_an_integer_residual_once::<bf16>(machine, false);
    adds_an_integer_residual_once::<f16>(machine, true);
}

/// In place it has the same bits, and of a GEMM-AllReduce so have all ranks.
pub fn residuals_stay_within_the_derived_bound(machine: Machine) {
    for (world, op) in machine
        .worlds(&[1, 3, 4])
        .into_iter()
        .flat_map(|world| ops(machine).map(move |op| (world, op)))
    {
        for bias in [false, true] {
            let case =
                Case::<bf16>::new(op, unaligned(machine, op, world), world, Values::Reals, 103);
            let case =
                case.finished(bias, Values::Reals, Activation::None).with_residual(Values::Reals);
            let expected = case.expected_on(machine);
            let plans = plans(machine);
            let results = machine.run(world, defaults, |node| {
                let of_plan = |&plan: &Option<Plan>| {
                    let op = build_case(&case, OpOptions::of(plan), node);
                    let y = call(&op, &case, node).unwrap();
                    case.assert_close(&expected, &op, node.rank, &y, "a call");
                    assert!(
                        call_in_place(&op, &case, node) == y,
                        "other bits in place: {}",
                        op.explain()
                    );
                    y
                };
                plans.iter().map(of_plan).collect::<Vec<_>>()
            });
            let same = op != OpKind::GemmAllReduce || results.iter().all(|y| *y == results[0]);
            assert!(same, "ranks differ: {}", case.problem);
        }
    }
}

/// Rows of the residual with gaps, other ones than those of `y`.
pub fn strides_of_a_residual_are_honoured(machine: Machine) {
    for (world, op) in machine
        .worlds(&[1, 2, 3])
        .into_iter()
        .flat_map(|world| ops(machine).map(move |op| (world, op)))
    {
        let case =
            Case::<bf16>::new(op, unaligned(machine, op, world), world, Values::Integers, 107)
                .with_residual(Values::Integers);
        let expected = case.expected_on(machine);
        machine.run(world, defaults, |node| {
            let op = build_case(&case, OpOptions::default(), node);
            let (lx, lw, ly) = layouts(&case, node.rank);
            let (wide, rows) =
                (Layout { row_stride: ly.cols + 16, ..ly }, case.residual(node.rank).unwrap());
            let gap = [bf16::NAN; 16];
            let spread: Vec<bf16> = rows
                .chunks_exact(ly.cols)
                .flat_map(|row| row.iter().chain(&gap))
                .copied()
                .collect();
            let (x, w, rows) = (
                node.upload(&case.x(node.rank)),
                node.upload(&case.w(node.rank)),
                node.upload(&spread),
            );
            let mut y = node.poisoned(ly.span());
            let rows = node.view(&rows, wide);
            op.call(&node.view(&x, lx))
                .weight(&node.view(&w, lw), &mut node.view_mut(&mut y, ly))
                .residual(&rows)
                .on(node.stream())
                .unwrap();
            case.assert_equal(&expected, &op, node.rank, &node.download(&y), "with gaps");
        });
    }
}

pub fn ranks_agree_on_the_residual(machine: Machine) {
    for (world, op) in machine
        .worlds(&[2, 3])
        .into_iter()
        .flat_map(|world| ops(machine).map(move |op| (world, op)))
    {
        let shape = [8 * world as usize, 8, 8 * world as usize];
        machine.run(world, defaults, |node| {
            let options = OpOptions { residual: node.rank.get() == 1, ..OpOptions::default() };
            let refused = build::<bf16>(op, shape, options, &node.comm).unwrap_err();
            assert!(matches!(refused, BuildError::Disagreement { .. }), "{refused}");
            assert!(refused.to_string().contains("no bias, with residual"), "{refused}");
            let options =
                OpOptions { residual: true, workers: node.workers, ..OpOptions::default() };
            let op = build::<bf16>(op, shape, options, &node.comm).unwrap();
            assert!(op.explain().contains("no bias, with residual"), "{}", op.explain());
        });
    }
}

/// One rank makes every bad call, as in `a_refused_call_launches_nothing`.
pub fn a_residual_that_does_not_fit_is_refused(machine: Machine) {
    for (world, op) in machine
        .worlds(&[1, 2])
        .into_iter()
        .flat_map(|world| ops(machine).map(move |op| (world, op)))
    {
        let plain =
            Case::<bf16>::new(op, unaligned(machine, op, world), world, Values::Integers, 109);
        let case = plain.clone().with_residual(Values::Integers);
        let (expected, expected_plain) = (case.expected_on(machine), plain.expected_on(machine));
        machine.run(world, defaults, |node| {
            let (with, without) = (
                build_case(&case, OpOptions::default(), node),
                build_case(&plain, OpOptions::default(), node),
            );
            if node.rank.get() == world - 1 {
                make_every_bad_call(&with, &without, &case, node);
            }
            case.assert_equal(
                &expected,
                &with,
                node.rank,
                &call(&with, &case, node).unwrap(),
                "after refused calls",
            );
            plain.assert_equal(
                &expected_plain,
                &without,
                node.rank,
                &call(&without, &plain, node).unwrap(),
                "after refused calls",
            );
        });
    }
}

fn make_every_bad_call(with: &FusedLinear, without: &FusedLinear, case: &Case<bf16>, node: &Node) {
    let (lx, lw, ly) = layouts(case, node.rank);
    let (x, w) = (node.upload(&case.x(node.rank)), node.upload(&case.w(node.rank)));
    let mut y = node.poisoned::<bf16>(ly.span() + 8);
    let rows = node.poisoned::<bf16>(ly.span() + 8 * ly.rows + ly.cols);
    let (x, w) = (node.view(&x, lx), node.view(&w, lw));
    macro_rules! refused {
        ($op:expr, $y:expr $(, $operand:ident($($of:expr),*))*) => {
            $op.call(&x)
                .weight(&w, &mut node.view_mut($y, ly))
                $(.$operand($($of),*))*
                .on(node.stream())
                .unwrap_err()
        };
    }

    let error = refused!(with, &mut y);
    let (rows_of_y, cols_of_y) = (ly.rows as u32, ly.cols as u32);
    let fits = |rows, cols| (rows, cols) == (rows_of_y, cols_of_y);
    assert!(
        matches!(error, CallError::NotGiven { operand: "residual", expected }
            if fits(expected.rows, expected.cols)),
        "{error}"
    );
    let error = refused!(without, &mut y, residual(&node.view(&rows, ly)));
    assert!(
        matches!(error, CallError::Unwanted { operand: "residual", found } if found == ly),
        "{error}"
    );
    let error = refused!(without, &mut y, residual_in_y());
    assert!(matches!(error, CallError::Unwanted { operand: "residual", .. }), "{error}");

    let (less, more) = (Layout::dense(ly.rows, ly.cols - 8), Layout::dense(ly.rows, ly.cols + 8));
    for wrong in [less, more, Layout::dense(ly.rows + 1, ly.cols), Layout::dense(1, ly.cols)] {
        let error = refused!(with, &mut y, residual(&node.view(&rows, wrong)));
        assert!(
            matches!(error, CallError::Shape { operand: "residual", found, .. } if found == wrong),
            "{error}"
        );
    }

    let here = node.view(&rows, ly).location();
    let elsewhere = if here == Location::Host { Location::Cuda(0) } else { Location::Host };
    let raw = RawTensor {
        address: node.address(&rows),
        dtype: DType::Bf16.into(),
        location: elsewhere,
        layout: ly,
        available: ly.span(),
    };
    // SAFETY: what is refused does not access it.
    let other = |raw| unsafe { TensorRef::<bf16>::from_raw(raw).unwrap() };
    let error = refused!(with, &mut y, residual(&other(raw)));
    assert!(
        matches!(error, CallError::Location { operand: "residual", found, .. }
            if found == elsewhere),
        "{error}"
    );

    // Eight columns off, and the rows of `y` at another stride: elements of one are others of the
    // other.
    let address = node.address(&y);
    let output = RawTensor { address, location: here, ..raw };
    let wide = Layout { row_stride: ly.cols + 8, ..ly };
    for aliased in [
        RawTensor { address: address + 16, ..output },
        RawTensor { layout: wide, available: wide.span(), ..output },
    ] {
        // SAFETY: the memory of `y`, which outlives the call.
        let mut y = unsafe { TensorMut::<bf16>::from_raw(output).unwrap() };
        let error = with
            .call(&x)
            .weight(&w, &mut y)
            .residual(&other(aliased))
            .on(node.stream())
            .unwrap_err();
        assert!(matches!(error, CallError::Overlap { operand: "residual", .. }), "{error}");
    }
    assert!(node.download(&y).iter().all(|e| e.is_nan()), "y was written by a refused call");
}
