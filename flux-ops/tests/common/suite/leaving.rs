//! Ranks that leave while others make calls.

use super::super::{Case, Check, Machine, OpOptions, Values, build_case};
use super::{at_once, call, defaults, unaligned};
use crate::common::lateness::assert_soon;
use crate::common::scaled;
use flux_core::Rank;
use flux_ops::CallError;
use flux_transport::{Fault, Options};
use half::bf16;
use std::time::{Duration, Instant};

/// A rank drops its communicator after a call of all. In the next call every other rank gets an
/// error that names it, long before the deadline.
pub fn a_rank_that_leaves_is_named_at_once(machine: Machine) {
    let deadline = scaled(Duration::from_mins(1));
    for world in machine.worlds(&[2, 3, 4]) {
        for &op in machine.ops() {
            let case =
                Case::<bf16>::new(op, unaligned(machine, op, world), world, Values::Integers, 67);
            let expected = case.expected_on(machine);
            // Kernels are loaded, and NCCL too, before anything is measured.
            machine
                .run(world, defaults, |node| drop(build_case(&case, OpOptions::default(), node)));
            let short = |options: &mut Options| options.deadline = deadline;
            machine.run(world, short, |node| {
                let op = build_case(&case, OpOptions::default(), node);
                case.assert_equal(
                    &expected,
                    &op,
                    node.rank,
                    &call(&op, &case, node).unwrap(),
                    "before it leaves",
                );
                if node.rank.get() == 1 {
                    // Its communicator goes with the node.
                    return;
                }
                let began = Instant::now();
                let returned = call(&op, &case, node);
                let (took, fault) = (began.elapsed(), op.status().unwrap_err());
                let left = |fault: &Fault| {
                    assert!(
                        matches!(fault, Fault::PeerLeft { rank, .. } if *rank == Rank::new(1)),
                        "{fault}"
                    );
                };
                left(&fault);
                match returned {
                    Err(CallError::Fault(failure)) => left(&failure.fault),
                    // It had left before the call, or on CUDA the call returned before the device
                    // gave up.
                    Err(CallError::Transport(_)) | Ok(_) => {}
                    Err(other) => panic!("{other}"),
                }
                assert_soon(took, at_once(machine));
                assert!(matches!(call(&op, &case, node), Err(CallError::Transport(_))));
            });
        }
    }
}
