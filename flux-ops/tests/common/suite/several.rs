//! Several weights that share one gather: each result is that of its weight alone.

use super::{Case, Check, Machine, Number, build_several, defaults, layouts};
use crate::common::{Node, OpOptions, Values};
use flux_core::plan::{CommMode, KSplit, Plan, RowMapping};
use flux_core::{OpKind, ProblemError};
use flux_ops::{
    Activation, AllGatherGemm, BuildError, CallError, FusedLinear, GateLayout, Layout, WeightLayout,
};
use half::{bf16, f16};

const WORLDS: [u32; 4] = [1, 2, 3, 4];

/// As many cases as there are weights, of one `x`. Columns end within a tile, of a weight within
/// the first tile. From three ranks on some have 8 columns more than others, of different weights.
fn cases<T: Number>(
    machine: Machine,
    world: u32,
    m: usize,
    values: Values,
    activation: Activation,
) -> Vec<Case<T>> {
    let (w, more) = (world as usize, world as usize / 3 * 8);
    let (columns, k) = match machine {
        Machine::Host => ([56 * w, 8 * w + more, 40 * w + 2 * more, 24 * w], 72),
        _ => ([520 * w, 136 * w + more, 8 * w + 2 * more, 256 * w], 456),
    };
    let mut cases: Vec<Case<T>> = Vec::new();
    for (n, seed) in columns.into_iter().zip(301..) {
        let case = Case::new(OpKind::AllGatherGemm, [m, n, k], world, values, seed)
            .finished(true, values, activation);
        let case = if let Some(first) = cases.first() { case.with_x_of(first) } else { case };
        cases.push(case);
    }
    cases
}

/// A call: every weight's `y`, and the gathered rows where they are asked for.
fn call_several<T: Number>(
    op: &FusedLinear,
    cases: &[Case<T>],
    node: &Node,
    gathers: bool,
) -> (Vec<Vec<T>>, Option<Vec<T>>) {
    let (rank, of) = (node.rank, |case: &Case<T>| layouts(case, node.rank));
    let x = node.upload(&cases[0].x(rank));
    let w: Vec<_> = cases.iter().map(|case| node.upload(&case.w(rank))).collect();
    let bias: Vec<_> =
        cases.iter().map(|case| case.bias(rank).map(|bias| node.upload(&bias))).collect();
    let mut y: Vec<_> = cases.iter().map(|case| node.poisoned::<T>(of(case).2.span())).collect();
    let full = Layout::dense(cases[0].problem.m() as usize, cases[0].problem.k() as usize);
    let mut x_full = node.poisoned::<T>(full.span());
    {
        let w: Vec<_> = cases.iter().zip(&w).map(|(case, w)| node.view(w, of(case).1)).collect();
        let bias: Vec<_> = bias
            .iter()
            .zip(&w)
            .map(|(bias, w)| bias.as_ref().map(|bias| node.view(bias, (w.layout().rows,))))
            .collect();
        let mut y: Vec<_> =
            cases.iter().zip(&mut y).map(|(case, y)| node.view_mut(y, of(case).2)).collect();
        let (x, mut to) = (node.view(&x, of(&cases[0]).0), node.view_mut(&mut x_full, full));
        let mut call = op.call(&x);
        for ((w, y), bias) in w.iter().zip(&mut y).zip(&bias) {
            call = call.weight(w, y);
            if let Some(bias) = bias {
                call = call.bias(bias);
            }
        }
        let call = if gathers { call.gathered(&mut to) } else { call };
        call.on(node.stream()).unwrap();
    }
    (y.iter().map(|y| node.download(y)).collect(), gathers.then(|| node.download(&x_full)))
}

/// The op's own plan, and every way in which tiles, rows and `k` are cut.
fn plans(machine: Machine) -> Vec<Option<Plan>> {
    let [plain, wide] = [0, 1].map(|tile| Plan::of(machine.tiles()[tile]));
    let grouped =
        Plan { rows: RowMapping::PerShard { group: 2 }, k: KSplit::SplitK(2), k_slices: 2, ..wide };
    let mut plans =
        vec![None, Some(plain), Some(grouped), Some(Plan { k: KSplit::StreamK, ..plain })];
    match machine {
        // Across nodes rows are not flattened.
        Machine::TwoNodes { .. } => return plans,
        Machine::Messages(_) => {
            plans.push(Some(Plan { comm: CommMode::Sequential, k: KSplit::SplitK(2), ..plain }));
        }
        _ => {}
    }
    let flattened = Plan { rows: RowMapping::Flattened, ..plain };
    plans.extend([Some(flattened), Some(Plan { k: KSplit::StreamK, ..flattened })]);
    plans
}

fn share<T: Number>(machine: Machine, values: Values, activation: Activation) {
    for world in machine.worlds(&WORLDS) {
        let rows = if machine == Machine::Host { 17 } else { 129 };
        let cases = cases::<T>(
            machine,
            world,
            rows * world as usize - usize::from(world > 1),
            values,
            activation,
        );
        let expected: Vec<_> = cases.iter().map(|case| case.expected_on(machine)).collect();
        machine.run(world, defaults, |node| {
            // Two weights to four.
            for (plan, weights) in plans(machine).into_iter().zip((2..=4).cycle()) {
                let cases = &cases[4 - weights..];
                let op = build_several(cases, OpOptions::of(plan), node);
                for gathers in [false, true] {
                    let (results, x_full) = call_several(&op, cases, node, gathers);
                    assert!(
                        x_full.is_none_or(|rows| rows == cases[0].all_x()),
                        "other rows: {}",
                        op.explain()
                    );
                    for (number, (case, y)) in cases.iter().zip(&results).enumerate() {
                        let expected = &expected[4 - weights + number];
                        let check = if values == Values::Integers {
                            Case::assert_equal
                        } else {
                            Case::assert_close
                        };
                        check(
                            case,
                            expected,
                            &op,
                            node.rank,
                            y,
                            &format!("weight {number} of {weights}"),
                        );
                    }
                }
            }
        });
    }
}

pub fn several_weights_share_the_gathered_rows(machine: Machine) {
    share::<bf16>(machine, Values::Integers, Activation::Relu);
    share::<f16>(machine, Values::Reals, Activation::Silu);
}

pub fn several_weights_take_any_number_of_rows(machine: Machine) {
    for world in machine.worlds(&[2, 3]) {
        let most = 131;
        let cases = [most, 1, 7, 64]
            .map(|m| cases::<bf16>(machine, world, m, Values::Integers, Activation::None));
        let expected: Vec<Vec<_>> = cases
            .iter()
            .map(|cases| cases.iter().map(|case| case.expected_on(machine)).collect())
            .collect();
        machine.run(world, defaults, |node| {
            let op = build_several(&cases[0], OpOptions::default(), node);
            for (cases, expected) in cases.iter().zip(&expected) {
                let (results, _) = call_several(&op, cases, node, false);
                for ((case, expected), y) in cases.iter().zip(expected).zip(&results) {
                    case.assert_equal(
                        expected,
                        &op,
                        node.rank,
                        y,
                        &format!("m = {}", case.problem.m()),
                    );
                }
            }
        });
    }
}

pub fn what_several_weights_cannot_be_is_refused(machine: Machine) {
    for world in machine.worlds(&[1, 2]) {
        let (w, k) = (world as usize, 24);
        machine.run(world, defaults, |node| {
            let builder = |columns: &[usize]| {
                AllGatherGemm::<bf16>::builder(16, 64 * w, k).several_weights(columns)
            };
            let refused =
                |columns: &[usize]| builder(columns).build(&node.comm).map(drop).unwrap_err();
            let problem = |error| {
                if let BuildError::Problem(error) = error { error } else { panic!("{error}") }
            };
            assert_eq!(
                problem(refused(&[40 * w, 16 * w])),
                ProblemError::Columns { n: 64 * world, sum: 56 * u64::from(world) }
            );
            assert_eq!(problem(refused(&[])), ProblemError::Weights { count: 0 });
            let five = [16 * w, 16 * w, 16 * w, 8 * w, 8 * w];
            assert_eq!(problem(refused(&five)), ProblemError::Weights { count: 5 });
            let error = problem(refused(&[64 * w - 4, 4]));
            assert!(matches!(error, ProblemError::Alignment { name: "n[0]", .. }), "{error}");
            if world > 1 {
                let error = problem(refused(&[64 * w - 8, 8]));
                assert!(
                    matches!(error, ProblemError::TooSmall { name: "n[1]", padded: 16, .. }),
                    "{error}"
                );
            }
            let columns = [48 * w, 16 * w];
            let gated = builder(&columns)
                .gated(GateLayout::Concatenated)
                .build(&node.comm)
                .map(drop)
                .unwrap_err();
            assert!(gated.to_string().starts_with("an op with gates takes one weight"), "{gated}");
            let kn = builder(&columns)
                .weights(WeightLayout::Kn)
                .build(&node.comm)
                .map(drop)
                .unwrap_err();
            assert!(matches!(kn, BuildError::SeveralWeights { weights: WeightLayout::Kn }), "{kn}");

            let builder = builder(&columns).bias(true);
            let op =
                if let Some(workers) = node.workers { builder.workers(workers) } else { builder }
                    .build(&node.comm)
                    .unwrap();
            assert_eq!(
                (op.weight_columns(1, node.rank).len(), op.columns(node.rank).len()),
                (16, 48)
            );
            let memory: Vec<_> = (0..5).map(|_| node.poisoned::<bf16>(48 * 48)).collect();
            let (mut y, mut second) =
                (node.poisoned::<bf16>(16 * 48), node.poisoned::<bf16>(16 * 16));
            let x = node.view(&memory[0], Layout::dense(16 / w, k));
            let [first_w, second_w] = [(1, 48), (2, 16)]
                .map(|(at, n): (usize, usize)| node.view(&memory[at], Layout::dense(n, k)));
            let [first_bias, second_bias] =
                [(3, 48), (4, 16)].map(|(at, n): (usize, usize)| node.view(&memory[at], (n,)));
            let [mut y, mut second_y] = [(&mut y, 48), (&mut second, 16)]
                .map(|(y, n)| node.view_mut(y, Layout::dense(16, n)));
            let given = op.call(&x).weight(&first_w, &mut y).bias(&first_bias).on(node.stream());
            let given = given.unwrap_err();
            assert!(matches!(given, CallError::Weights { takes: 2, given: 1 }), "{given}");
            let bias = op
                .call(&x)
                .weight(&first_w, &mut y)
                .bias(&first_bias)
                .weight(&second_w, &mut second_y)
                .on(node.stream())
                .unwrap_err();
            assert!(bias.to_string().contains("the call brings no bias[1]: make it as"), "{bias}");
            let stray = op
                .call(&x)
                .bias(&first_bias)
                .weight(&first_w, &mut y)
                .weight(&second_w, &mut second_y)
                .bias(&second_bias)
                .on(node.stream())
                .unwrap_err();
            assert!(matches!(stray, CallError::Stray { operand: "bias" }), "{stray}");
            let shape = op
                .call(&x)
                .weight(&first_w, &mut y)
                .bias(&first_bias)
                .weight(&first_w, &mut second_y)
                .bias(&second_bias)
                .on(node.stream())
                .unwrap_err();
            assert!(
                shape
                    .to_string()
                    .starts_with("w[1] is [48, 24], but ag_gemm with m = 16 takes [16, 24]"),
                "{shape}"
            );
            let mut five = op.call(&x);
            let mut ys: Vec<_> = memory.iter().map(|_| node.poisoned::<bf16>(16 * 16)).collect();
            let mut ys: Vec<_> =
                ys.iter_mut().map(|y| node.view_mut(y, Layout::dense(16, 16))).collect();
            for y in &mut ys {
                five = five.weight(&second_w, y);
            }
            let five = five.on(node.stream()).unwrap_err();
            assert!(matches!(five, CallError::Weights { takes: 2, given: 5 }), "{five}");
        });
    }
}
