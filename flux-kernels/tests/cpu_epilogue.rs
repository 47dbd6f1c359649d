//! Bias, activation and gates of the CPU executor: once for each element, in fp32, whatever the
//! world, the tails and who stores the tile.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod support;

use flux_core::problem::WeightList;
use flux_core::program::{Chunk, Schedule};
use flux_core::signal::Epoch;
use flux_core::{OpKind, Problem, Rank, TileShape, WorldSize};
use flux_kernels::cpu::{
    Buffers, CpuArgs, CpuWeight, Epilogue, ExecuteError, Executor, Input, Rows, RowsMut,
};
use flux_kernels::{Activation, Element, GateLayout, Operand, WeightLayout};
use flux_testkit::{Case, Values};
use half::{bf16, f16};
use std::num::NonZeroUsize;
use std::time::Duration;
use support::{Member, alone, run, sums};

const OPS: [OpKind; 3] = OpKind::ALL;
const WORLDS: [u32; 5] = [1, 2, 3, 4, 8];

/// Two row blocks and three column blocks a shard, the last of each a tail, but in a split extent
/// on the first half of the ranks.
fn problem<T: Element>(op: OpKind, world: u32) -> Problem {
    of_columns::<T>(op, 40, world / 2, world)
}

/// The same with `n` columns a rank, and 8 more on the first `more` ranks.
fn of_columns<T: Element>(op: OpKind, n: usize, more: u32, world: u32) -> Problem {
    let (w, more) = (world as usize, 8 * more as usize);
    let (n, k) = match op {
        OpKind::AllGatherGemm => (n * w + more, 24),
        OpKind::GemmReduceScatter | OpKind::GemmAllReduce => (n, 24 * w + more),
    };
    Problem::new(op, 13 * w, n, k, T::DTYPE, WorldSize::new(world).unwrap()).unwrap()
}

const SCHEDULE: Schedule =
    Schedule { chunk: Chunk::Tiles(2), raster_group: 2, ..Schedule::of(TileShape::new(8, 16, 16)) };

/// An epilogue that adds a bias, where there is one.
fn with_bias<T: Element>(bias: Option<&[T]>) -> Epilogue<'_, T> {
    let mut epilogue = Epilogue::default();
    if let Some(elements) = bias {
        let rows = Input::Rows(Rows { elements, stride: elements.len() });
        epilogue.operands.set(Operand::Bias, 0, rows);
    }
    epilogue
}

/// Runs every rank, and compares each result: integers for equality, reals within the bound.
fn check<T: Element>(case: &Case<T>, values: Values, workers: usize) {
    let expected = case.expected();
    run(&case.problem, &SCHEDULE, workers, Epoch::FIRST, |mut member: Member<'_>| {
        let rank = Rank::new(member.rank);
        let (x, w, bias) = (case.x(rank), case.w(rank), case.bias(rank));
        for _ in 0..2 {
            let (activation, gates) = (case.activation, case.gates);
            let epilogue = Epilogue { activation, gates, ..with_bias(bias.as_deref()) };
            let y = member.call_with(&x, &w, epilogue, Duration::ZERO).unwrap();
            let sums = sums(member.executor.program());
            match values {
                Values::Integers => case.equals(&expected, sums, rank, &y),
                Values::Reals => case.is_close(&expected, sums, rank, &y),
            }
            .unwrap();
        }
    });
}

/// Random numbers, with a bias and without.
fn check_reals<T: Element>(problem: Problem, activation: Activation, gates: Option<GateLayout>) {
    for bias in [true, false] {
        let case = Case::<T>::of(problem, Values::Reals, 9);
        let case = case.finished(bias, Values::Reals, activation);
        let case = if let Some(layout) = gates { case.gated(layout) } else { case };
        check(&case, Values::Reals, 1);
    }
}

#[test]
fn integer_biases_are_added_exactly_once() {
    fn of_type<T: Element>() {
        for (op, world) in OPS.into_iter().flat_map(|op| WORLDS.map(|world| (op, world))) {
            for activation in Activation::of(op).iter().filter(|activation| activation.is_exact()) {
                let case = Case::<T>::of(problem::<T>(op, world), Values::Integers, 5);
                let case = case.finished(true, Values::Integers, *activation);
                check(&case, Values::Integers, 2);
            }
        }
    }
    of_type::<bf16>();
    of_type::<f16>();
}

#[test]
fn every_activation_stays_within_the_derived_bound() {
    for (op, world) in OPS.into_iter().flat_map(|op| WORLDS.map(|world| (op, world))) {
        for &activation in Activation::of(op) {
            check_reals::<bf16>(problem::<bf16>(op, world), activation, None);
            check_reals::<f16>(problem::<f16>(op, world), activation, None);
        }
    }
}

/// Of one tile's columns of gates and ups, and of several with a tail of half a tile's.
#[test]
fn gates_multiply_their_ups_in_both_layouts() {
    fn of_type<T: Element>() {
        for (layout, world) in
            GateLayout::ALL.into_iter().flat_map(|layout| [1, 3, 4].map(|world| (layout, world)))
        {
            for (n, activation) in
                [16, 80].into_iter().flat_map(|n| Activation::ALL.map(|activation| (n, activation)))
            {
                let problem = of_columns::<T>(OpKind::AllGatherGemm, n, 0, world);
                if activation.is_exact() {
                    let case = Case::<T>::of(problem, Values::Integers, 7);
                    let case = case.finished(true, Values::Integers, activation).gated(layout);
                    check(&case, Values::Integers, 2);
                }
                check_reals::<T>(problem, activation, Some(layout));
            }
        }
    }
    of_type::<bf16>();
    of_type::<f16>();
}

#[test]
fn an_epilogue_that_does_not_fit_is_refused_before_anything_is_touched() {
    let p = problem::<bf16>(OpKind::GemmReduceScatter, 1);
    let (program, memory) = alone(&p, 0, &SCHEDULE, Epoch::FIRST);
    let (x, w, bias) = (vec![bf16::ONE; 13 * 24], vec![bf16::ONE; 40 * 24], vec![bf16::ONE; 40]);
    let call = |epilogue: Epilogue<'_, bf16>| {
        let mut y = vec![bf16::NAN; 13 * 40];
        let result = Executor::new(program.clone(), NonZeroUsize::MIN).unwrap().run(
            &mut Buffers::default(),
            CpuArgs {
                scale: None,
                gathered: None,
                x: Rows { elements: &x, stride: 24 },
                weights: WeightList::one(CpuWeight {
                    scale: None,
                    w: Rows { elements: &w, stride: 24 },
                    y: RowsMut { elements: &mut y, stride: 40 },
                }),
                layout: WeightLayout::Nk,
                epilogue,
                memory: memory.view(0, Duration::from_mins(1)),
                await_pushed: false,
                op_hash: 0,
                stamps: None,
            },
        );
        assert!(result.is_ok() || y.iter().all(|y| y.is_nan()));
        result
    };
    let text = call(with_bias(Some(&bias[..39]))).unwrap_err().to_string();
    assert_eq!(text, "bias holds 39 elements with a row stride of 39; 1 rows of 40 need 40");
    let refused =
        call(Epilogue { activation: Activation::Gelu, ..Epilogue::default() }).unwrap_err();
    assert_eq!(refused, ExecuteError::Activation { op: p.op(), activation: Activation::Gelu });
    assert_eq!(refused.to_string(), "gemm_rs takes no activation, and gelu was asked for");
    let gates = Some(GateLayout::Interleaved);
    let refused = call(Epilogue { gates, ..Epilogue::default() }).unwrap_err();
    assert!(matches!(refused, ExecuteError::Gates { n: 40, .. }), "{refused}");
    let with = |operand, input| {
        let mut epilogue = with_bias(Some(&bias[..]));
        epilogue.operands.set(operand, 0, input);
        epilogue
    };
    let rows = |elements| Input::Rows(Rows { elements, stride: 40 });
    let text = call(with(Operand::Residual, rows(&w[..519]))).unwrap_err().to_string();
    assert_eq!(text, "residual holds 519 elements with a row stride of 40; 13 rows of 40 need 520");
    for (operand, input) in [(Operand::Gain, rows(&bias)), (Operand::Bias, Input::InY)] {
        let refused = call(with(operand, input)).unwrap_err();
        let operand = operand.name(0);
        assert_eq!(refused, ExecuteError::NoSuchOperand { op: p.op(), operand });
    }
    assert_eq!(memory.epoch(0), Epoch::FIRST);
    call(with(Operand::Residual, rows(&w[..520]))).unwrap();
}
