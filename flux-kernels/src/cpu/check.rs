//! Checks a program once, when an executor is built from it.
//!
//! Invariant: no index of a checked program leaves an operand or the workspace that the program
//! asks for, and no two items store the same element of `y`.

use super::error::ExecuteError;
use flux_core::program::{NONE, RowSource, Sink, TileProgram, WorkItem};
use flux_core::{OpKind, Rank};
use std::collections::BTreeMap;

/// Checks every item against the problem.
pub(super) fn check(program: &TileProgram) -> Result<(), ExecuteError> {
    let fault = |item, what| Err(ExecuteError::Program { rank: program.rank.get(), item, what });
    if [program.tile.m, program.tile.n, program.tile.k].contains(&0) {
        return fault(0, "its tile is empty");
    }
    let mut stored = Stored::default();
    for (index, item) in program.items.iter().enumerate() {
        let what = operands(program, item).or_else(|| results(program, item, &mut stored)).or_else(|| signals(program, item));
        if let Some(what) = what {
            return fault(index, what);
        }
    }
    Ok(())
}

/// The stored rows of `y`: end row by shard, first column and first row. Columns of checked items
/// are equal or disjoint, because they are blocks of the tile's `n`.
#[derive(Default)]
struct Stored(BTreeMap<(u32, u32, u32), u32>);

impl Stored {
    /// Adds the item's rows, the first of which is `row`; `false` if one of them is stored already.
    fn take(&mut self, row: u32, item: &WorkItem) -> bool {
        let (shard, col, end) = (item.out_outer, item.col, row + item.rows);
        // The last range that begins before the item's end also ends last.
        let before = self.0.range((shard, col, 0)..(shard, col, end)).next_back();
        let free = before.is_none_or(|(_, &taken)| taken <= row);
        if free {
            self.0.insert((shard, col, row), end);
        }
        free
    }
}

/// Whether rows are scattered and then reduced.
fn scatters(program: &TileProgram) -> bool {
    program.rows.is_flattened() && program.problem.op().reduces()
}

/// Checks the item's extents, steps and rows of operand A.
fn operands(program: &TileProgram, item: &WorkItem) -> Option<&'static str> {
    let (problem, tile, world) = (&program.problem, program.tile, program.problem.world().get());
    let within = |first: u32, count: u32, block: u32, end: u32| {
        count > 0 && count <= block && first.is_multiple_of(block) && first.checked_add(count).is_some_and(|last| last <= end)
    };
    let (reduces, copies) = (item.sink == Sink::ReduceRows, item.sink == Sink::Copy);
    let of_rank = |rank: u32| problem.shard_rows(Rank::new(rank)).len() as u32;
    let rows = match problem.op() {
        _ if reduces => program.reduced_rows(program.rank).len() as u32,
        _ if program.rows.is_flattened() || copies => problem.m(),
        OpKind::AllGatherGemm if item.out_outer < world => of_rank(item.out_outer),
        OpKind::GemmReduceScatter | OpKind::GemmAllReduce if item.a_outer < world => of_rank(item.a_outer),
        _ => return Some("its shard does not exist"),
    };
    let rows_exist = if item.rows == 0 {
        // Of a shard with one row less a tile may lie behind the end.
        copies || item.row >= rows && item.row <= problem.m_shard()
    } else if reduces || copies {
        item.row.checked_add(item.rows).is_some_and(|last| last <= rows)
    } else {
        within(item.row, item.rows, tile.m, rows)
    };
    if !rows_exist {
        return Some("its rows are not a tile's of the shard");
    }
    let (weight, col) = program.weight_column(item.col);
    if !within(col, item.cols, tile.n, problem.weight_columns(weight, program.rank).len() as u32) {
        return Some("its columns are not a tile's of the output");
    }
    if !reduces && !copies && (item.k_steps == 0 || item.k_first.checked_add(item.k_steps).is_none_or(|end| end > program.k_steps())) {
        return Some("its steps along k do not exist");
    }
    let outer = match (item.a_source, problem.op()) {
        (RowSource::Caller, OpKind::GemmReduceScatter | OpKind::GemmAllReduce) if !program.rows.is_flattened() => world,
        (RowSource::Gather, OpKind::AllGatherGemm) if !program.rows.is_flattened() => problem.world().peers(),
        (RowSource::Caller, _) | (RowSource::Gather, OpKind::AllGatherGemm) => 1,
        (RowSource::Gather, OpKind::GemmReduceScatter | OpKind::GemmAllReduce) => 0,
    };
    (item.a_outer >= outer).then_some("its rows of operand A do not exist")
}

/// Whether the slots of the item's partial tiles exist.
fn adds_slots(program: &TileProgram, item: &WorkItem) -> bool {
    let per_source = u64::from(program.slots_per_source);
    let last = u64::from(item.partial_slot) + u64::from(item.partials.saturating_sub(1)) * per_source;
    item.partials == 0 || last < u64::from(program.problem.world().peers()) * per_source
}

const STORED_TWICE: &str = "elements of y that it stores are stored by an earlier item too";

/// Checks the item's destination, and the partials that it adds.
fn results(program: &TileProgram, item: &WorkItem, stored: &mut Stored) -> Option<&'static str> {
    let (world, peers) = (program.problem.world().get(), program.problem.world().peers());
    let parts = if item.sink == Sink::Partial { 1 } else { item.parts };
    if parts > 0 && item.part.checked_add(parts).is_none_or(|end| end > program.split_k_slots) {
        return Some("its part slots do not exist");
    }
    match item.sink {
        Sink::Partial => None,
        Sink::Scatter if scatters(program) => None,
        Sink::Send | Sink::Reduce if !adds_slots(program, item) => Some("the slots that it adds do not exist"),
        Sink::Send if item.slot < peers.saturating_mul(program.slots_per_source) && item.dest < world => None,
        Sink::ReduceRows if item.partials > world => Some("the rows that it adds do not exist"),
        Sink::Copy if scatters(program) != program.rows.has_two_exchanges() || program.problem.op() != OpKind::GemmAllReduce => {
            Some("there are no peers' results")
        }
        Sink::Copy => (item.rows > 0 && !stored.take(item.row, item)).then_some(STORED_TWICE),
        // Blocks of reduced rows must not mix with those of tiles.
        Sink::Store | Sink::Reduce | Sink::ReduceRows if (item.sink == Sink::ReduceRows) == scatters(program) => {
            let y_shards = if program.problem.op() == OpKind::AllGatherGemm && !program.rows.is_flattened() { world } else { 1 };
            if item.out_outer >= y_shards {
                return Some("its rows of y do not exist");
            }
            let is_finished = item.sink == Sink::Reduce || item.sink == Sink::ReduceRows && program.rows.has_two_exchanges();
            let to_all = program.problem.op() == OpKind::GemmAllReduce && is_finished;
            let first = if to_all { program.problem.shard_rows(program.rank).start } else { 0 };
            (item.rows > 0 && !stored.take(first + item.row, item)).then_some(STORED_TWICE)
        }
        Sink::Store | Sink::Send | Sink::Reduce | Sink::Scatter | Sink::ReduceRows => Some("its result has no place"),
    }
}

/// Checks the signal that the item raises, its counter and its awaits.
fn signals(program: &TileProgram, item: &WorkItem) -> Option<&'static str> {
    let world = program.problem.world().get();
    if item.raise != NONE && (item.raise >= program.signals || item.dest >= world) {
        return Some("the signal that it raises does not exist");
    }
    if item.counter != NONE && item.counter >= program.counters {
        return Some("its counter does not exist");
    }
    let exist = |first: u32, count: u32| {
        let awaits = program.awaits.get(first as usize..).and_then(|rest| rest.get(..count as usize));
        awaits.is_some_and(|awaits| awaits.iter().all(|a| a.signal < program.signals && a.peer < world))
    };
    let all = exist(item.await_first, item.await_count) && exist(item.late_first, item.late_count);
    (!all).then_some("a signal that it awaits does not exist")
}
