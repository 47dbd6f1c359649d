//! Bad operands are refused before anything is launched.

use super::{Case, Check, Machine, Node, build_case, call, defaults, layouts, unaligned};
use crate::common::{OPS, OpOptions, Values};
use flux_core::DType;
use flux_ops::{CallError, FusedLinear, Layout, Location, RawTensor, TensorMut, TensorRef};
use flux_transport::{Stream, TransportError};
use half::bf16;

/// One rank makes every bad call there is, the others none: had one of them been launched, the
/// ranks' epochs would be out of step.
pub fn a_refused_call_launches_nothing(machine: Machine) {
    for world in machine.worlds(&[1, 2, 3]) {
        for op in OPS {
            let case =
                Case::<bf16>::new(op, unaligned(machine, op, world), world, Values::Integers, 23);
            let expected = case.expected_on(machine);
            machine.run(world, defaults, |node| {
                let op = build_case(&case, OpOptions::default(), node);
                if node.rank.get() == world - 1 {
                    make_every_bad_call(&op, &case, node);
                }
                case.assert_equal(
                    &expected,
                    &op,
                    node.rank,
                    &call(&op, &case, node).unwrap(),
                    "after refused calls",
                );
            });
        }
    }
}

fn make_every_bad_call(op: &FusedLinear, case: &Case<bf16>, node: &Node) {
    let (lx, lw, ly) = layouts(case, node.rank);
    // So few that every shard has other rows.
    let fewer = case.problem.world().index();
    let smaller = |l: Layout| {
        [Layout::dense(l.rows - fewer, l.cols), Layout::strided(l.rows, l.cols - 8, l.cols)]
    };
    let (x, w) = (node.upload(&case.x(node.rank)), node.upload(&case.w(node.rank)));
    let mut y = node.poisoned::<bf16>(ly.rows * ly.cols);
    let mut refused = |lx, lw, ly| {
        let (x, w) = (node.view(&x, lx), node.view(&w, lw));
        op.forward(&x, &w, &mut node.view_mut(&mut y, ly), node.stream()).unwrap_err()
    };
    let named = |error: CallError, name: &str, found: Layout| match error {
        CallError::Shape { operand, found: in_error, .. } => {
            assert_eq!((operand, in_error), (name, found));
        }
        other => panic!("{other}"),
    };
    // The operand with all rows says how many the call has, so with fewer the other one is wrong.
    let (others, gathers) =
        (|error| matches!(error, CallError::Shape { .. }), case.problem.op() == OPS[0]);
    let [fewer, narrower] = smaller(lx);
    let error = refused(fewer, lw, ly);
    if gathers {
        named(error, "x", fewer);
    } else {
        assert!(others(error));
    }
    named(refused(narrower, lw, ly), "x", narrower);
    for wrong in smaller(lw) {
        named(refused(lx, wrong, ly), "w", wrong);
    }
    let [fewer, narrower] = smaller(ly);
    let error = refused(lx, lw, fewer);
    if gathers {
        assert!(others(error));
    } else {
        named(error, "y", fewer);
    }
    named(refused(lx, lw, narrower), "y", narrower);
    assert!(node.download(&y).iter().all(|e| e.is_nan()), "y was written by a refused call");
    make_every_misplaced_call(op, case, node);
}

/// Operands of the right shape in the wrong place: another device, memory shared with `y`, a stream
/// of another kind.
fn make_every_misplaced_call(op: &FusedLinear, case: &Case<bf16>, node: &Node) {
    let (lx, lw, ly) = layouts(case, node.rank);
    let (at_w, at_y) = (lx.span(), lx.span() + lw.span());
    let memory = node.poisoned::<bf16>(at_y + ly.span());
    let (start, here) = {
        let view = node.view(&memory, (1, at_y + ly.span()));
        (node.address(&memory), view.location())
    };
    let elsewhere = if here == Location::Host { Location::Cuda(0) } else { Location::Host };
    let raw = |layout: Layout, at: usize| RawTensor {
        address: start + 2 * at as u64,
        dtype: DType::Bf16.into(),
        location: here,
        layout,
        available: layout.span(),
    };
    let call = |x: RawTensor, w: RawTensor, y: RawTensor, stream| {
        // SAFETY: all lie inside `memory`, which outlives the call, and what is refused does not
        // access them.
        let (x, w, mut y) = unsafe {
            (
                TensorRef::<bf16>::from_raw(x).unwrap(),
                TensorRef::from_raw(w).unwrap(),
                TensorMut::<bf16>::from_raw(y).unwrap(),
            )
        };
        op.forward(&x, &w, &mut y, stream).unwrap_err()
    };
    let (x, w, y) = (raw(lx, 0), raw(lw, at_w), raw(ly, at_y));
    let named = |error: CallError, name: &str| match error {
        CallError::Location { operand, found, .. } => {
            assert_eq!((operand, found), (name, elsewhere));
        }
        other => panic!("{other}"),
    };
    named(call(RawTensor { location: elsewhere, ..x }, w, y, node.stream()), "x");
    named(call(x, RawTensor { location: elsewhere, ..w }, y, node.stream()), "w");
    named(call(x, w, RawTensor { location: elsewhere, ..y }, node.stream()), "y");
    for (at, name) in [(at_y - 8, "w"), (0, "x")] {
        match call(x, w, raw(ly, at), node.stream()) {
            CallError::Overlap { operand, .. } => assert_eq!(operand, name),
            other => panic!("{other}"),
        }
    }
    // SAFETY: never used: a host rank refuses it for its kind.
    let device = unsafe { Stream::from_raw(2) };
    let foreign = if here == Location::Host { device } else { Stream::Host };
    let refused = call(x, w, y, foreign);
    assert!(
        matches!(refused, CallError::Transport(TransportError::WrongStream { .. })),
        "{refused}"
    );
}
