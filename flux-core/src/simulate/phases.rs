//! The phases of a worker's item, in order.
//!
//! Invariant: each step is multiplied once, after its awaits, and each partial result is added
//! once, after its signal.

use crate::machine::Machine;
use crate::program::{Await, Sink, TileProgram, WorkItem};
use crate::tile::Generation;
use std::time::Duration;

/// One phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Until the signal is raised.
    Await(Await),
    /// Steps along `k`.
    Multiply(Duration),
    /// Addition of partial tiles, parts of `k`, or scattered rows; a copy of results.
    Add(Duration),
    /// Fixed cost of a tile.
    Finish(Duration),
}

/// The phases of `item`; its wave reads `read` bytes in a step.
pub(super) fn of(
    program: &TileProgram,
    item: &WorkItem,
    read: u64,
    machine: &Machine,
) -> Vec<Phase> {
    let (tile, operand) = (program.tile, program.problem.numerics().operand);
    let (percent, through) = match machine.generation {
        Generation::Hopper => (tile.wgmma_step_percent(operand), 0),
        Generation::Portable | Generation::Ada => {
            (100, tile.portable_shared_elements(program.problem.numerics()))
        }
    };
    let multiply = |steps: u32| {
        let along_k = u128::from(tile.k) * u128::from(steps);
        let ops = 2 * u128::from(tile.m) * u128::from(tile.n) * along_k * u128::from(percent) / 100;
        let shared = u128::from(through) * along_k * operand.bytes() as u128;
        // They overlap: the slowest decides.
        let [multiplied, passed] =
            [machine.multiply_time(ops, operand), machine.shared_time(shared)];
        Phase::Multiply(
            multiplied.max(passed).max(machine.read_time(u128::from(read) * u128::from(steps))),
        )
    };
    let elements = u64::from(item.rows) * u64::from(item.cols);
    let partial = machine.add_time(elements * program.problem.numerics().partial_bytes() as u64);
    let part = machine.add_time(elements * size_of::<f32>() as u64);

    let (mut phases, mut step, end) = (Vec::new(), item.k_first, item.k_first + item.k_steps);
    for in_mainloop in program.awaits_of(item) {
        let before = in_mainloop.k_step.clamp(step, end);
        if before > step {
            phases.push(multiply(before - step));
        }
        step = before;
        phases.push(Phase::Await(*in_mainloop));
        if item.partials > 0 {
            // One consumer adds while the other multiplies.
            phases.push(Phase::Add(partial / 2));
        }
    }
    if end > step {
        phases.push(multiply(end - step));
    }
    for (number, late) in (0..).zip(program.late_awaits_of(item)) {
        phases.push(Phase::Await(*late));
        match item.sink {
            Sink::ReduceRows | Sink::Copy => {}
            _ if number < item.parts => phases.push(Phase::Add(part)),
            _ => phases.push(Phase::Add(partial)),
        }
    }
    if item.sink == Sink::ReduceRows {
        phases.push(Phase::Add(partial.saturating_mul(item.partials)));
    }
    if item.sink == Sink::Copy {
        phases.push(Phase::Add(
            machine.add_time(elements * program.problem.numerics().output.bytes() as u64),
        ));
        return phases;
    }
    phases.push(Phase::Finish(Duration::from_nanos(machine.tile_ns)));
    phases
}
