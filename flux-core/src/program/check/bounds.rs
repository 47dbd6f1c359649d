//! Rule: no index and no range points outside the problem, the world or the workspace.

use super::signals::moves;
use super::{Record, Violation};
use crate::program::{NONE, RowSource, Sink, TileProgram, Transfer, WorkItem};
use crate::{Rank, SumsTo};

pub(super) fn check(p: &TileProgram) -> Result<(), Violation> {
    let (world, columns) = (p.problem.world(), p.problem.gathered_columns());
    for (index, item) in p.items.iter().enumerate() {
        let at = Limits { p, record: Record::Item(index) };
        operands(p, at, item)?;
        workspace(p, at, item)?;
    }
    for (index, entry) in p.awaits.iter().enumerate() {
        let at = Limits { p, record: Record::Await(index) };
        at.below("signal", entry.signal, p.signals)?;
        at.below("peer", entry.peer, world.get())?;
        at.below("k_step", entry.k_step, p.k_steps())?;
    }
    for (index, forward) in p.forwards.iter().enumerate() {
        let at = Limits { p, record: Record::Forward(index) };
        at.below("from", forward.from, places(p))?;
        at.below("awaits", forward.awaits.signal, p.signals)?;
    }
    for (transfer, record) in moves(p) {
        let at = Limits { p, record };
        let rows = shard_of(p, transfer)
            .map_or(p.problem.m_shard(), |shard| p.problem.shard_rows(shard).len() as u32);
        at.below("dest", transfer.dest, world.get())?;
        at.below("place", transfer.place, places(p))?;
        at.rows(transfer.row, transfer.rows, rows, rows)?;
        at.range("cols", transfer.col, transfer.cols, columns, columns)?;
        at.below("raise", transfer.raise, p.signals)?;
    }
    Ok(())
}

/// The shard whose rows a transfer moves; `None` for a place that it does not fill.
fn shard_of(p: &TileProgram, transfer: &Transfer) -> Option<Rank> {
    let dest = Rank::new(transfer.dest);
    let fills = |shard: &Rank| {
        if p.rows.is_flattened() {
            shard.get() == transfer.place
        } else {
            shard.place_at(dest) == Some(transfer.place)
        }
    };
    p.problem.world().ranks().find(fills)
}

/// Places in the gather buffer.
fn places(p: &TileProgram) -> u32 {
    if p.rows.is_flattened() { p.problem.world().get() } else { p.problem.world().peers() }
}

/// Operands that an item reads, and the output that it computes.
fn operands(p: &TileProgram, at: Limits<'_>, item: &WorkItem) -> Result<(), Violation> {
    let world = p.problem.world().get();
    let reduction = item.sink == Sink::ReduceRows;
    let of_rank = |rank: u32| p.problem.shard_rows(Rank::new(rank)).len() as u32;
    at.range("cols", item.col, item.cols, p.column_blocks().end(), p.tile.n)?;
    let (x_shards, y_shards) = match p.problem.op().sums_to() {
        _ if p.rows.is_flattened() => (1, 1),
        SumsTo::Nothing => (1, world),
        SumsTo::Rows | SumsTo::All => (world, 1),
    };
    // Flattened places are one matrix.
    let outer = if item.a_source == RowSource::Gather && !p.rows.is_flattened() {
        places(p)
    } else {
        x_shards
    };
    at.below("a_outer", item.a_outer, outer)?;
    at.below("out_outer", item.out_outer, y_shards)?;
    if item.sink == Sink::Copy {
        if item.rows > 0 {
            let most = if p.rows.is_flattened() { p.problem.m() } else { p.tile.m };
            at.rows(item.row, item.rows, p.problem.m(), most)?;
        }
        return at.below("k_steps", item.k_steps, 1_u32);
    }
    let rows = match p.problem.op().sums_to() {
        _ if reduction => p.reduced_rows(p.rank).len() as u32,
        _ if p.rows.is_flattened() => p.problem.m(),
        SumsTo::Nothing => of_rank(item.out_outer),
        SumsTo::Rows | SumsTo::All => of_rank(item.a_outer),
    };
    at.rows(item.row, item.rows, rows, if reduction { rows } else { p.tile.m })?;
    if reduction {
        return at.below("k_steps", item.k_steps, 1_u32);
    }
    at.range("k_steps", item.k_first, item.k_steps, p.k_steps(), p.k_steps())
}

/// Workspace that an item uses.
fn workspace(p: &TileProgram, at: Limits<'_>, item: &WorkItem) -> Result<(), Violation> {
    let world = p.problem.world();
    at.below("dest", item.dest, world.get())?;
    let slots = u64::from(world.peers()) * u64::from(p.slots_per_source);
    let further = u64::from(item.partials.saturating_sub(1)) * u64::from(p.slots_per_source);
    if item.sink == Sink::Send {
        at.below("slot", item.slot, slots)?;
    }
    if matches!(item.sink, Sink::Send | Sink::Reduce) && item.partials > 0 {
        at.below("partial_slot", u64::from(item.partial_slot) + further, slots)?;
    }
    if item.sink == Sink::Partial || item.parts > 0 {
        at.range("part", item.part, item.parts.max(1), p.split_k_slots, p.split_k_slots)?;
    }
    if item.raise != NONE {
        at.below("raise", item.raise, p.signals)?;
    }
    if item.counter != NONE {
        at.below("counter", item.counter, p.counters)?;
    }
    let awaits = [
        ("await_first", item.await_first, item.await_count),
        ("late_first", item.late_first, item.late_count),
    ];
    awaits.into_iter().try_for_each(|(field, first, count)| {
        at.below(field, u64::from(first) + u64::from(count), p.awaits.len() as u64 + 1)
    })?;
    at.below("await_group", item.await_group, u64::from(item.await_count) + 1)
}

/// The record that is checked.
#[derive(Clone, Copy)]
struct Limits<'p> {
    p: &'p TileProgram,
    record: Record,
}

impl Limits<'_> {
    fn below(
        self,
        field: &'static str,
        value: impl Into<u64>,
        limit: impl Into<u64>,
    ) -> Result<(), Violation> {
        let (value, limit) = (value.into(), limit.into());
        if value < limit {
            Ok(())
        } else {
            Err(Violation::OutOfBounds {
                rank: self.p.rank,
                record: self.record,
                field,
                value,
                limit,
            })
        }
    }

    /// As [`range`](Self::range), of rows. There are none of a tile or chunk behind the end, which
    /// a shard with one row less may have.
    fn rows(self, first: u32, count: u32, extent: u32, most: u32) -> Result<(), Violation> {
        if count == 0 && (extent..=self.p.problem.m_shard()).contains(&first) {
            Ok(())
        } else {
            self.range("rows", first, count, extent, most)
        }
    }

    /// Checks a range of `count` elements from `first` within `extent`; `count` is in `1..=most`.
    fn range(
        self,
        field: &'static str,
        first: u32,
        count: u32,
        extent: u32,
        most: u32,
    ) -> Result<(), Violation> {
        self.below(field, count.wrapping_sub(1), most)?;
        self.below(field, u64::from(first) + u64::from(count), u64::from(extent) + 1)
    }
}
