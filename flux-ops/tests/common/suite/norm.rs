//! RMSNorm of finished rows: within the derived bound of the rounded rows, and refused where it
//! does not fit.

use super::{Case, Check, Machine, Number, build, build_case, call, defaults, layouts, unaligned};
use crate::common::{Memory, Node, OpOptions, Values};
use flux_core::plan::{CommMode, Plan, RowMapping};
use flux_core::{DType, OpKind};
use flux_ops::{
    BuildError, CallError, FusedLinear, Layout, Location, RawTensor, TensorMut, TensorRef,
};
use flux_testkit::reference::normalised;
use half::{bf16, f16};

const EPS: f32 = 1e-5;

fn ops(machine: Machine) -> impl Iterator<Item = OpKind> {
    machine.ops().iter().copied().filter(|op| op.reduces())
}

/// Each column's gain, from -2 to 2 in steps of 1/4.
pub fn gain<T: Number>(cols: usize) -> Vec<T> {
    (0..cols).map(|col| T::from_f32((col * 7 % 17) as f32 / 4.0 - 2.0)).collect()
}

/// A call of an op with a norm, and with bias and residual where the case has them: `y` and
/// `y_norm`, which has rows with gaps.
pub(super) fn call_with_norm<T: Number>(
    op: &FusedLinear,
    case: &Case<T>,
    node: &Node,
) -> (Vec<T>, Vec<T>) {
    let (lx, lw, ly) = layouts(case, node.rank);
    let wide = Layout { row_stride: ly.cols + 8, ..ly };
    let (x, w, gain) = (
        node.upload(&case.x(node.rank)),
        node.upload(&case.w(node.rank)),
        node.upload(&gain::<T>(ly.cols)),
    );
    let (mut y, mut y_norm) =
        (node.poisoned(ly.span()), node.poisoned::<T>(ly.rows * wide.row_stride));
    let residual = case.residual(node.rank).map(|rows| node.upload(&rows));
    let residual = residual.as_ref().map(|rows| node.view(rows, ly));
    let (gain, mut to) = (node.view(&gain, (ly.cols,)), node.view_mut(&mut y_norm, wide));
    let bias = case.bias(node.rank).map(|bias| node.upload(&bias));
    let bias = bias.as_ref().map(|bias| node.view(bias, (ly.cols,)));
    {
        let (x, w, mut y) = (node.view(&x, lx), node.view(&w, lw), node.view_mut(&mut y, ly));
        let call = op.call(&x).weight(&w, &mut y).norm(&gain, &mut to);
        let call = if let Some(bias) = &bias { call.bias(bias) } else { call };
        let call = if let Some(residual) = &residual { call.residual(residual) } else { call };
        call.on(node.stream()).unwrap();
    }
    drop((gain, to));
    let y_norm = node.download(&y_norm);
    let (rows, gaps): (Vec<&[T]>, Vec<&[T]>) =
        y_norm.chunks_exact(wide.row_stride).map(|row| row.split_at(ly.cols)).unzip();
    assert!(
        gaps.concat().iter().all(|gap| gap.to_f32().is_nan()),
        "written between rows: {}",
        op.explain()
    );
    (node.download(&y), rows.concat())
}

/// Compares rows with the norms of `y`, within the derived bound.
pub fn assert_normalised<T: Number>(y: &[T], y_norm: &[T], cols: usize, op: &FusedLinear) {
    assert_eq!(y.len(), y_norm.len());
    let wide = |v: &[T]| v.iter().map(|v| v.to_f32()).collect::<Vec<_>>();
    let gain = wide(&gain::<T>(cols));
    for (row, (y, y_norm)) in y.chunks_exact(cols).zip(y_norm.chunks_exact(cols)).enumerate() {
        let wanted = normalised(&wide(y), &gain, EPS, T::DTYPE);
        for (col, (found, wanted)) in y_norm.iter().zip(wanted).enumerate() {
            assert!(
                wanted.is_near(found.to_f32()),
                "row {row}, column {col}: {found:?}, must be {wanted:?}: {}",
                op.explain()
            );
        }
    }
}

fn normalises<T: Number>(machine: Machine) {
    for (world, op) in machine
        .worlds(&[1, 2, 3, 4])
        .into_iter()
        .flat_map(|world| ops(machine).map(move |op| (world, op)))
    {
        let [m, n, k] = unaligned(machine, op, world);
        // One row: shards without rows.
        for rows in [m, 1] {
            let case = Case::<T>::new(op, [rows, n, k], world, Values::Integers, 113)
                .with_residual(Values::Integers);
            let expected = case.expected_on(machine);
            let plain = Plan::of(machine.tiles()[0]);
            let of_rows = |rows| Some(Plan { rows, ..plain });
            let plans = [
                None,
                Some(plain),
                of_rows(RowMapping::Flattened),
                of_rows(RowMapping::FlattenedTwoExchanges),
            ];
            let results = machine.run(world, defaults, |node| {
                plans.map(|plan| {
                    let op = build_case(
                        &case,
                        OpOptions { rms_norm: Some(EPS.into()), ..OpOptions::of(plan) },
                        node,
                    );
                    let (y, y_norm) = call_with_norm(&op, &case, node);
                    case.assert_equal(&expected, &op, node.rank, &y, "with a norm");
                    assert_normalised(&y, &y_norm, n, &op);
                    y_norm
                })
            });
            let same =
                op != OpKind::GemmAllReduce || results.iter().all(|y_norm| *y_norm == results[0]);
            assert!(same, "ranks differ: {}", case.problem);
        }
    }
}

pub fn finished_rows_are_normalised(machine: Machine) {
    normalises::<bf16>(machine);
    normalises::<f16>(machine);
}

/// Behind the library's collective.
pub fn sequential_calls_normalise(machine: Machine) {
    for (world, op) in machine
        .worlds(&[2, 3, 4])
        .into_iter()
        .flat_map(|world| ops(machine).map(move |op| (world, op)))
    {
        let case = Case::<bf16>::new(
            op,
            super::equal_shards(machine, op, world),
            world,
            Values::Reals,
            127,
        );
        let case = case.with_residual(Values::Reals);
        let expected = case.expected_on(machine);
        machine.run(world, defaults, |node| {
            let plan = Plan { comm: CommMode::Sequential, ..Plan::of(machine.tiles()[0]) };
            let op = build_case(
                &case,
                OpOptions { rms_norm: Some(EPS.into()), ..OpOptions::of(plan) },
                node,
            );
            let (y, y_norm) = call_with_norm(&op, &case, node);
            case.assert_close(&expected, &op, node.rank, &y, "a call");
            assert_normalised(&y, &y_norm, case.problem.n() as usize, &op);
        });
    }
}

/// A call without rows takes operands without rows, and writes nothing.
pub fn a_norm_of_no_rows_is_nothing(machine: Machine) {
    for (world, op) in machine
        .worlds(&[1, 2])
        .into_iter()
        .flat_map(|world| ops(machine).map(move |op| (world, op)))
    {
        let case =
            Case::<bf16>::new(op, unaligned(machine, op, world), world, Values::Integers, 131);
        machine.run(world, defaults, |node| {
            let op = build_case(
                &case,
                OpOptions { rms_norm: Some(EPS.into()), ..OpOptions::default() },
                node,
            );
            let none = |layout: Layout| Layout { rows: 0, ..layout };
            let (lx, lw, ly) = layouts(&case, node.rank);
            let (x, w, gain) = (
                node.poisoned::<bf16>(lx.span()),
                node.poisoned(lw.span()),
                node.upload(&gain(ly.cols)),
            );
            let (mut y, mut y_norm) =
                (node.poisoned::<bf16>(ly.span()), node.poisoned::<bf16>(ly.span()));
            let (gain, mut to) =
                (node.view(&gain, (ly.cols,)), node.view_mut(&mut y_norm, none(ly)));
            op.call(&node.view(&x, none(lx)))
                .weight(&node.view(&w, lw), &mut node.view_mut(&mut y, none(ly)))
                .norm(&gain, &mut to)
                .on(node.stream())
                .unwrap();
            drop((gain, to));
            assert!(node.download(&y_norm).iter().all(|v| v.is_nan()), "{}", op.explain());
            let (y, y_norm) = call_with_norm(&op, &case, node);
            assert_normalised(&y, &y_norm, case.problem.n() as usize, &op);
        });
    }
}

pub fn ranks_agree_on_the_norm(machine: Machine) {
    for (world, op) in machine
        .worlds(&[2, 3])
        .into_iter()
        .flat_map(|world| ops(machine).map(move |op| (world, op)))
    {
        let shape = [8 * world as usize, 8, 8 * world as usize];
        machine.run(world, defaults, |node| {
            let build = |rms_norm: Option<f32>| {
                let options = OpOptions {
                    rms_norm: rms_norm.map(Into::into),
                    residual: true,
                    workers: node.workers,
                    ..OpOptions::default()
                };
                build::<bf16>(op, shape, options, &node.comm)
            };
            for odd in [None, Some(1e-6)] {
                let refused =
                    build(if node.rank.get() == 1 { odd } else { Some(EPS) }).unwrap_err();
                assert!(matches!(refused, BuildError::Disagreement { .. }), "{refused}");
                assert!(
                    refused.to_string().contains("no bias, with residual, then rms_norm(1e-5)"),
                    "{refused}"
                );
            }
            for bad in [f32::NAN, f32::INFINITY, -1e-5] {
                let refused = build(Some(bad)).unwrap_err();
                assert!(
                    matches!(refused, BuildError::Epsilon { .. } | BuildError::Peer { .. }),
                    "{refused}"
                );
            }
            assert!(build(Some(0.0)).is_ok());
        });
    }
}

/// One rank makes every bad call, as in `a_refused_call_launches_nothing`.
pub fn a_norm_that_does_not_fit_is_refused(machine: Machine) {
    for (world, op) in machine
        .worlds(&[1, 2])
        .into_iter()
        .flat_map(|world| ops(machine).map(move |op| (world, op)))
    {
        let case =
            Case::<bf16>::new(op, unaligned(machine, op, world), world, Values::Integers, 137);
        let expected = case.expected_on(machine);
        machine.run(world, defaults, |node| {
            let with = build_case(
                &case,
                OpOptions { rms_norm: Some(EPS.into()), ..OpOptions::default() },
                node,
            );
            let without = build_case(&case, OpOptions::default(), node);
            if node.rank.get() == world - 1 {
                make_every_bad_call(&with, &without, &case, node);
            }
            case.assert_equal(
                &expected,
                &with,
                node.rank,
                &call_with_norm(&with, &case, node).0,
                "after refused calls",
            );
            case.assert_equal(
                &expected,
                &without,
                node.rank,
                &call(&without, &case, node).unwrap(),
                "after refused calls",
            );
        });
    }
}

fn make_every_bad_call(with: &FusedLinear, without: &FusedLinear, case: &Case<bf16>, node: &Node) {
    let (lx, lw, ly) = layouts(case, node.rank);
    // Each as large as `y`, whose shape every one is given in turn.
    let of = |layout: Layout| node.poisoned::<bf16>(layout.span().max(ly.span()));
    let (x, w, columns) = (of(lx), of(lw), of(Layout::from((ly.cols + 8,))));
    let (mut y, mut other) =
        (node.poisoned::<bf16>(ly.span()), node.poisoned::<bf16>(ly.span() + 8 * ly.rows));
    let whole = Layout::from((ly.cols,));
    let (x_view, w_view, gain) = (node.view(&x, lx), node.view(&w, lw), node.view(&columns, whole));
    macro_rules! refused {
        ($op:expr, $y:expr $(, $operand:ident($($of:expr),*))*) => {
            $op.call(&x_view)
                .weight(&w_view, &mut node.view_mut($y, ly))
                $(.$operand($($of),*))*
                .on(node.stream())
                .unwrap_err()
        };
    }

    let error = refused!(with, &mut y);
    assert!(
        matches!(error, CallError::NotGiven { operand: "gain", expected }
            if expected.cols as usize == ly.cols),
        "{error}"
    );
    let error = refused!(without, &mut y, norm(&gain, &mut node.view_mut(&mut other, ly)));
    assert!(
        matches!(error, CallError::Unwanted { operand: "gain", .. })
            && error.to_string().ends_with("with rms_norm(eps)"),
        "{error}"
    );

    for wrong in [ly.cols - 8, ly.cols + 8] {
        let gain = node.view(&columns, (wrong,));
        let error = refused!(with, &mut y, norm(&gain, &mut node.view_mut(&mut other, ly)));
        assert!(
            matches!(error, CallError::Shape { operand: "gain", found, .. } if found.cols == wrong),
            "{error}"
        );
        let wrong = Layout::dense(ly.rows, wrong);
        let error = refused!(
            with,
            &mut y,
            norm(&node.view(&columns, whole), &mut node.view_mut(&mut other, wrong))
        );
        assert!(
            matches!(error, CallError::Shape { operand: "y_norm", found, .. } if found == wrong),
            "{error}"
        );
    }

    let here = gain.location();
    let elsewhere = if here == Location::Host { Location::Cuda(0) } else { Location::Host };
    let raw = |address, location, layout: Layout| RawTensor {
        address,
        dtype: DType::Bf16.into(),
        location,
        layout,
        available: layout.span(),
    };
    // SAFETY: what is refused accesses neither; the memory outlives the calls.
    let output = |raw| unsafe { TensorMut::<bf16>::from_raw(raw).unwrap() };
    let error =
        refused!(with, &mut y, norm(&gain, &mut output(raw(node.address(&other), elsewhere, ly))));
    assert!(
        matches!(error, CallError::Location { operand: "y_norm", found, .. } if found == elsewhere),
        "{error}"
    );

    // The operands whose memory `y_norm` shares; the views of memory that is borrowed are raw ones.
    let shared = [
        ("x", node.address(&x)),
        ("w", node.address(&w)),
        ("gain", node.address(&columns)),
        ("y", node.address(&y)),
    ];
    for (shares, address) in shared {
        let error = refused!(with, &mut y, norm(&gain, &mut output(raw(address, here, ly))));
        let wanted = if shares == "y" { ("y", "y_norm") } else { ("y_norm", shares) };
        assert!(
            matches!(error, CallError::Overlap { output, operand, .. }
                if (output, operand) == wanted),
            "{error}"
        );
    }
    // `y` on the gain.
    // SAFETY: the memory of `y`, which outlives the call.
    let on_y = unsafe { TensorRef::<bf16>::from_raw(raw(node.address(&y), here, whole)).unwrap() };
    let error = refused!(with, &mut y, norm(&on_y, &mut node.view_mut(&mut other, ly)));
    assert!(matches!(error, CallError::Overlap { output: "y", operand: "gain", .. }), "{error}");
    assert!(
        node.download(&y).iter().chain(&node.download(&other)).all(|e| e.is_nan()),
        "a refused call wrote"
    );
}
