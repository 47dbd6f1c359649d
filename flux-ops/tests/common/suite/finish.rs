//! Bias and activation: in every element once, and refused where they do not fit.

use super::{Case, Check, Machine, Number, build, build_case, call, defaults, layouts, unaligned};
use crate::common::{Node, OPS, OpOptions, Values};
use flux_core::plan::{Chunk, Plan};
use flux_core::{DType, OpKind};
use flux_ops::{
    Activation, BuildError, CallError, FusedLinear, Layout, Location, RawTensor, TensorMut,
    TensorRef,
};
use flux_testkit::Expected;
use half::{bf16, f16};

const WORLDS: [u32; 5] = [1, 2, 3, 4, 8];

/// Extents and options with several column blocks, the last a tail, so that each tile has its own
/// part of the bias.
fn tiled(machine: Machine, op: OpKind, world: u32) -> ([usize; 3], OpOptions) {
    let w = world as usize;
    match (op, machine) {
        (OpKind::AllGatherGemm, Machine::Host) => ([17 * w, 56 * w, 24], on_host(machine)),
        (OpKind::GemmReduceScatter | OpKind::GemmAllReduce, Machine::Host) => {
            ([17 * w, 56, 24 * w], on_host(machine))
        }
        _ => (unaligned(machine, op, world), OpOptions::default()),
    }
}

fn on_host(machine: Machine) -> OpOptions {
    OpOptions::of(Plan { chunk: Chunk::Tiles(1), ..Plan::of(machine.tiles()[0]) })
}

/// Runs the calls of every case of a world on one communicator: ranks take longer to connect than
/// to call.
fn on_one_communicator<T: Number>(
    machine: Machine,
    world: u32,
    cases: impl Iterator<Item = (Case<T>, OpOptions)>,
    check: impl Fn(&Case<T>, &Expected, &FusedLinear, &Node) + Sync,
) {
    let cases: Vec<_> =
        cases.map(|(case, options)| (case.expected_on(machine), case, options)).collect();
    machine.run(world, defaults, |node| {
        for (expected, case, options) in &cases {
            check(case, expected, &build_case(case, *options, node), node);
        }
    });
}

fn adds_an_integer_bias_once<T: Number>(machine: Machine) {
    for world in machine.worlds(&WORLDS) {
        let exact =
            |op| Activation::of(op).iter().copied().filter(|activation| activation.is_exact());
        let cases = OPS
            .into_iter()
            .flat_map(|op| exact(op).map(move |activation| (op, activation)))
            .map(|(op, activation)| {
                let (shape, options) = tiled(machine, op, world);
                let case = Case::<T>::new(op, shape, world, Values::Integers, 41);
                (
                    case.finished(true, Values::Integers, activation)
                        .with_residual(Values::Integers),
                    options,
                )
            });
        on_one_communicator(machine, world, cases, |case, expected, op, node| {
            for _ in 0..3 {
                case.assert_equal(
                    expected,
                    op,
                    node.rank,
                    &call(op, case, node).unwrap(),
                    "a call",
                );
            }
        });
    }
}

pub fn an_integer_bias_is_added_exactly_once(machine: Machine) {
    adds_an_integer_bias_once::<bf16>(machine);
    adds_an_integer_bias_once::<f16>(machine);
}

fn activates_within_the_bound<T: Number>(machine: Machine) {
    for world in machine.worlds(&WORLDS) {
        let finishes = |op| {
            Activation::of(op)
                .iter()
                .flat_map(|&activation| [true, false].map(|bias| (activation, bias)))
        };
        let cases = OPS
            .into_iter()
            .flat_map(|op| finishes(op).map(move |finish| (op, finish)))
            .map(|(op, (activation, bias))| {
                let (shape, options) = tiled(machine, op, world);
                (
                    Case::<T>::new(op, shape, world, Values::Reals, 43).finished(
                        bias,
                        Values::Reals,
                        activation,
                    ),
                    options,
                )
            });
        on_one_communicator(machine, world, cases, |case, expected, op, node| {
            case.assert_close(expected, op, node.rank, &call(op, case, node).unwrap(), "a call");
        });
    }
}

pub fn activations_stay_within_the_derived_bound(machine: Machine) {
    activates_within_the_bound::<bf16>(machine);
    activates_within_the_bound::<f16>(machine);
}

/// Bias and activation are part of what is agreed, and of what an op says of itself.
pub fn ranks_agree_on_bias_and_activation(machine: Machine) {
    for world in machine.worlds(&[2, 3]) {
        let w = world as usize;
        machine.run(world, defaults, |node| {
            let odd = node.rank.get() == 1;
            let plain = OpOptions::default();
            let odd_ones = [
                (OpOptions { bias: odd, ..plain }, "with bias"),
                (
                    OpOptions {
                        activation: if odd { Activation::Gelu } else { Activation::Silu },
                        ..plain
                    },
                    "no bias, then gelu",
                ),
            ];
            for (options, said) in odd_ones {
                let refused =
                    build::<bf16>(OPS[0], [8 * w, 8 * w, 8], options, &node.comm).unwrap_err();
                assert!(matches!(refused, BuildError::Disagreement { .. }), "{refused}");
                assert!(refused.to_string().contains(said), "{refused}");
            }
            let options = OpOptions {
                bias: true,
                activation: Activation::Silu,
                workers: node.workers,
                ..plain
            };
            let op = build::<bf16>(OPS[0], [8 * w, 8 * w, 8], options, &node.comm).unwrap();
            assert!(op.explain().contains("with bias, then silu"), "{}", op.explain());
        });
    }
}

/// One rank makes every bad call, as in `a_refused_call_launches_nothing`.
pub fn a_bias_that_does_not_fit_is_refused(machine: Machine) {
    for world in machine.worlds(&[1, 2]) {
        for op in OPS {
            let plain =
                Case::<bf16>::new(op, unaligned(machine, op, world), world, Values::Integers, 47);
            let case = plain.clone().finished(true, Values::Integers, Activation::None);
            let (expected, expected_plain) =
                (case.expected_on(machine), plain.expected_on(machine));
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
}

fn make_every_bad_call(with: &FusedLinear, without: &FusedLinear, case: &Case<bf16>, node: &Node) {
    let (lx, lw, ly) = layouts(case, node.rank);
    let (x, w) = (node.upload(&case.x(node.rank)), node.upload(&case.w(node.rank)));
    let mut y = node.poisoned::<bf16>(ly.span());
    let bias = node.poisoned::<bf16>(ly.cols + 8);
    let (x, w) = (node.view(&x, lx), node.view(&w, lw));

    let refused = with.forward(&x, &w, &mut node.view_mut(&mut y, ly), node.stream()).unwrap_err();
    assert!(
        matches!(refused, CallError::NotGiven { operand: "bias", expected }
            if (expected.rows, expected.cols as usize) == (1, ly.cols)),
        "{refused}"
    );
    let whole = Layout::dense(1, ly.cols);
    let refused = without
        .call(&x)
        .weight(&w, &mut node.view_mut(&mut y, ly))
        .bias(&node.view(&bias, whole))
        .on(node.stream())
        .unwrap_err();
    assert!(
        matches!(refused, CallError::Unwanted { operand: "bias", found } if found == whole),
        "{refused}"
    );

    for wrong in
        [Layout::dense(1, ly.cols - 8), Layout::dense(1, ly.cols + 8), Layout::dense(ly.cols, 8)]
    {
        let bias = node.poisoned::<bf16>(wrong.span());
        let refused = with
            .call(&x)
            .weight(&w, &mut node.view_mut(&mut y, ly))
            .bias(&node.view(&bias, wrong))
            .on(node.stream())
            .unwrap_err();
        assert!(
            matches!(refused, CallError::Shape { operand: "bias", found, .. } if found == wrong),
            "{refused}"
        );
    }

    let here = node.view(&bias, whole).location();
    let elsewhere = if here == Location::Host { Location::Cuda(0) } else { Location::Host };
    let raw = RawTensor {
        address: node.address(&bias),
        dtype: DType::Bf16.into(),
        location: elsewhere,
        layout: whole,
        available: ly.cols,
    };
    // SAFETY: what is refused does not access it.
    let other = |raw| unsafe { TensorRef::<bf16>::from_raw(raw) };
    let refused = with
        .call(&x)
        .weight(&w, &mut node.view_mut(&mut y, ly))
        .bias(&other(raw).unwrap())
        .on(node.stream())
        .unwrap_err();
    assert!(
        matches!(refused, CallError::Location { operand: "bias", found, .. } if found == elsewhere),
        "{refused}"
    );
    // The element type and the alignment are the view's to refuse.
    assert!(
        other(RawTensor { dtype: DType::F16.into(), ..raw }).is_err()
            && other(RawTensor { address: raw.address + 2, ..raw }).is_err()
    );

    let address = node.address(&y);
    let inside = RawTensor { address, location: here, ..raw };
    let output = RawTensor { layout: ly, available: ly.span(), ..inside };
    // SAFETY: the memory of `y`, which outlives the call.
    let mut output = unsafe { TensorMut::<bf16>::from_raw(output).unwrap() };
    let refused = with
        .call(&x)
        .weight(&w, &mut output)
        .bias(&other(inside).unwrap())
        .on(node.stream())
        .unwrap_err();
    assert!(matches!(refused, CallError::Overlap { operand: "bias", .. }), "{refused}");
    assert!(node.download(&y).iter().all(|e| e.is_nan()), "y was written by a refused call");
}
