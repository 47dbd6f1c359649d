//! What the executor relies on in a program, checked once when it is built.
//!
//! Invariant: no index of a checked program leaves an operand or the workspace that the program asks for, and no two items store the
//! same element of `y`.

use super::error::ExecuteError;
use flux_core::program::{NONE, TileProgram, WorkItem, sink, source};
use std::collections::HashSet;

/// Checks every item against the problem.
pub(super) fn check(program: &TileProgram) -> Result<(), ExecuteError> {
    let mut stored = HashSet::new();
    for (index, item) in program.items.iter().enumerate() {
        if let Some(what) = item_fault(program, item, &mut stored) {
            return Err(ExecuteError::Program { rank: program.rank.get(), item: index, what });
        }
    }
    Ok(())
}

fn item_fault(program: &TileProgram, item: &WorkItem, stored: &mut HashSet<(u32, u32, u32)>) -> Option<&'static str> {
    let (problem, tile) = (&program.problem, program.tile);
    let (world, peers) = (problem.world().get(), problem.world().peers());
    let shards = |rows: u32| rows / problem.m_shard();
    let within = |first: u32, count: u32, block: u32, end: u32| {
        count > 0 && count <= block && first.is_multiple_of(block) && first.checked_add(count).is_some_and(|last| last <= end)
    };
    if !within(item.row, item.rows, tile.m, problem.m_shard()) {
        return Some("its rows are not a tile's of the shard");
    }
    if !within(item.col, item.cols, tile.n, problem.n_local()) {
        return Some("its columns are not a tile's of the output");
    }
    match item.a_source {
        source::CALLER if item.a_outer < shards(problem.x_shape().rows) => {}
        source::GATHER if item.a_outer < peers => {}
        _ => return Some("its rows of operand A do not exist"),
    }
    let slots = peers.saturating_mul(program.slots_per_source);
    match item.sink {
        sink::STORE | sink::REDUCE => {
            if item.out_outer >= shards(problem.y_shape().rows) {
                return Some("its rows of y do not exist");
            }
            if !stored.insert((item.out_outer, item.row, item.col)) {
                return Some("its tile of y is stored by an earlier item too");
            }
        }
        sink::SEND if item.slot < slots && item.dest < world => {}
        _ => return Some("its sink does not exist"),
    }
    if item.sink == sink::REDUCE && (item.partials > peers || item.slot >= program.slots_per_source) {
        return Some("the slots that it adds do not exist");
    }
    if item.raise != NONE && (item.raise >= program.signals || item.dest >= world) {
        return Some("the signal that it raises does not exist");
    }
    if item.counter != NONE && item.counter >= program.counters {
        return Some("its counter does not exist");
    }
    let awaits = program.awaits.get(item.await_first as usize..).and_then(|rest| rest.get(..item.await_count as usize));
    match awaits {
        Some(awaits) if awaits.iter().all(|a| a.signal < program.signals && a.peer < world) => None,
        None if item.await_count == 0 => None,
        _ => Some("a signal that it awaits does not exist"),
    }
}
