//! Rule: each item multiplies the rows that it stores, each record has the form of its operation,
//! and reductions follow all tiles.

use super::{Record, Violation};
use crate::program::{
    Await, Forward, NONE, Places, RowSource, Sink, TileProgram, Transfer, WorkItem,
};
use crate::{Rank, SumsTo};

pub(super) fn check(p: &TileProgram) -> Result<(), Violation> {
    let violation = |record, what| Err(Violation::Form { rank: p.rank, record, what });
    for (index, item) in p.items.iter().enumerate() {
        let wrong = match (p.problem.op().sums_to(), p.rows.is_flattened()) {
            (SumsTo::Nothing, _) => ag_gemm_item(p, item),
            (SumsTo::Rows | SumsTo::All, false) => gemm_rs_item(p, item),
            (SumsTo::Rows | SumsTo::All, true) => flattened_sum_item(p, item),
        };
        if let Some(what) =
            wrong.or(signal_fields(p, item)).or(await_fields(p, item)).or(part_fields(item))
        {
            return violation(Record::Item(index), what);
        }
    }
    // A kernel's workers walk the items before the copies.
    if p.computed().iter().any(|item| item.sink == Sink::Copy) {
        let index = p.items.iter().position(|item| item.sink == Sink::Copy).unwrap_or_default();
        return violation(Record::Item(index), "copies come after all else");
    }
    // A kernel's worker does not multiply after its first reduction.
    let first_reduction =
        p.items.iter().position(|item| item.sink == Sink::ReduceRows).unwrap_or(p.items.len());
    if let Some(behind) = p
        .computed()
        .get(first_reduction..)
        .unwrap_or_default()
        .iter()
        .position(|item| item.sink != Sink::ReduceRows)
    {
        return violation(
            Record::Item(first_reduction + behind),
            "reductions come after all tiles",
        );
    }
    for (index, transfer) in p.transfers.iter().enumerate() {
        if let Some(what) = transfer_form(p, p.rank, transfer).or_else(|| own_rows(p, transfer)) {
            return violation(Record::Transfer(index), what);
        }
    }
    for (index, forward) in p.forwards.iter().enumerate() {
        if let Some(what) = forward_form(p, forward) {
            return violation(Record::Forward(index), what);
        }
    }
    Ok(())
}

fn ag_gemm_item(p: &TileProgram, item: &WorkItem) -> Option<&'static str> {
    let place =
        if p.rows.is_flattened() { Some(0) } else { Rank::new(item.out_outer).place_at(p.rank) };
    let from_here = (item.a_source, item.a_outer) == (RowSource::Caller, 0);
    let from_place = item.a_source == RowSource::Gather && place == Some(item.a_outer);
    match (place, item.sink) {
        (_, sink) if sink != Sink::Store && sink != Sink::Partial => {
            Some("AllGather-GEMM stores every tile")
        }
        _ if item.dest != p.rank.get() => Some("AllGather-GEMM's output is the rank's own"),
        (None, _) if !from_here => Some("the own shard is read from the caller's x"),
        (Some(_), _) if !from_place => Some(
            "a peer's shard is read from its place in the gather buffer, flattened shards from all \
             of it",
        ),
        _ => None,
    }
}

fn gemm_rs_item(p: &TileProgram, item: &WorkItem) -> Option<&'static str> {
    let peers = p.problem.world().peers();
    let owner = Rank::new(item.a_outer);
    let sent_to = Places::new(p.nodes).destination(p.rank, owner).map(|(dest, _)| dest.get());
    let added = if p.nodes.on_one_rail(p.rank, owner) {
        Places::new(p.nodes).added(p.rank, owner).len()
    } else {
        0
    };
    match item.sink {
        _ if item.a_source != RowSource::Caller => {
            Some("operand A is the caller's shard of the owner's rows")
        }
        Sink::Send if sent_to.is_none() => Some("nothing is sent to oneself"),
        Sink::Send if sent_to != Some(item.dest) => {
            Some("a partial tile goes to its owner, or to the intra-node peer on the owner's rail")
        }
        Sink::Send if item.partials as usize != added => Some(
            "a send between nodes adds the partial tiles of its node, and no other send adds any",
        ),
        Sink::Copy if p.problem.op().sums_to() != SumsTo::All => {
            Some("only a GEMM-AllReduce has peers' results")
        }
        Sink::Copy if item.dest != p.rank.get() || item.partials != 0 || item.a_outer != 0 => {
            Some("a copy is of the own results")
        }
        Sink::Copy if has_own_rows(p, item) => Some("a copy is of rows that peers have finished"),
        Sink::Send | Sink::Partial | Sink::Copy => None,
        _ if owner != p.rank || item.dest != p.rank.get() => {
            Some("a partial tile of a peer's shard is sent")
        }
        Sink::Store if peers > 0 => Some("the own shard is reduced"),
        Sink::Reduce if item.partials as usize != added || added == 0 => Some(
            "a reduction adds a partial tile of every intra-node peer, and one of every other node",
        ),
        Sink::Scatter | Sink::ReduceRows => Some("only flattened rows are scattered"),
        Sink::Store | Sink::Reduce => None,
    }
}

fn flattened_sum_item(p: &TileProgram, item: &WorkItem) -> Option<&'static str> {
    match item.sink {
        _ if item.a_source != RowSource::Caller => Some("operand A is the caller's"),
        Sink::ReduceRows if item.dest != p.rank.get() => {
            Some("a reduction's rows are the rank's own")
        }
        Sink::ReduceRows if item.partials != p.problem.world().get() => {
            Some("a reduction adds the rows of every rank")
        }
        Sink::Copy if !p.rows.has_two_exchanges() => {
            Some("only a GEMM-AllReduce in two exchanges has peers' results")
        }
        Sink::Copy if item.dest != p.rank.get() || item.partials != 0 || item.a_outer != 0 => {
            Some("a copy is of the own results")
        }
        Sink::Copy if has_own_rows(p, item) => Some("a copy is of rows that peers have finished"),
        Sink::Scatter | Sink::Partial | Sink::ReduceRows | Sink::Copy => None,
        Sink::Store | Sink::Send | Sink::Reduce => Some("tiles of flattened rows are scattered"),
    }
}

/// Whether rows of all `m` are of the own shard.
fn has_own_rows(p: &TileProgram, item: &WorkItem) -> bool {
    let own = p.problem.shard_rows(p.rank);
    item.row.max(own.start) < (item.row + item.rows).min(own.end)
}

/// Items whose result others read raise a signal, and no other items do.
fn signal_fields(p: &TileProgram, item: &WorkItem) -> Option<&'static str> {
    let all_reduces = p.problem.op().sums_to() == SumsTo::All;
    match item.sink {
        Sink::ReduceRows if !p.rows.has_two_exchanges() && item.raise != NONE => {
            Some("only an item whose result others read raises a signal")
        }
        Sink::ReduceRows if !p.rows.has_two_exchanges() => None,
        Sink::Reduce | Sink::ReduceRows if all_reduces && item.raise == NONE => {
            Some("an item whose result others read raises a signal")
        }
        Sink::ReduceRows if all_reduces && item.counter != NONE => {
            Some("a reduction has a signal of its own")
        }
        Sink::Reduce | Sink::ReduceRows if all_reduces => None,
        Sink::Store | Sink::Reduce | Sink::ReduceRows | Sink::Copy if item.raise != NONE => {
            Some("only an item whose result others read raises a signal")
        }
        Sink::Send | Sink::Partial | Sink::Scatter if item.raise == NONE => {
            Some("an item whose result others read raises a signal")
        }
        Sink::Partial if item.counter != NONE => Some("a partial item has a signal of its own"),
        Sink::Partial | Sink::Scatter if item.dest != p.rank.get() => {
            Some("a partial item or a scattered tile is the rank's own")
        }
        _ if item.raise == NONE && item.counter != NONE => Some("a counter is for a signal"),
        _ => None,
    }
}

/// Mainloop awaits are in the order of their steps; late awaits have no step.
fn await_fields(p: &TileProgram, item: &WorkItem) -> Option<&'static str> {
    let (rows, late) = (p.awaits_of(item), p.late_awaits_of(item));
    match late_reads(p, item) {
        added if late.len() as u64 > added => {
            Some("more awaits after the multiplication than additions")
        }
        _ if !rows.is_sorted_by_key(|entry| entry.k_step) => {
            Some("rows are awaited in the order of steps along k")
        }
        _ if rows.iter().any(|entry| entry.k_step >= item.k_first + item.k_steps) => {
            Some("a step is awaited that is not multiplied")
        }
        _ if late.iter().any(|entry| entry.k_step != 0) => {
            Some("an await after the multiplication has no step")
        }
        _ if !in_groups(rows, item.await_group) => Some("the awaits of a group have one step"),
        _ => None,
    }
}

/// Most late awaits: one for each part and partial tile. A reduction awaits any number of tiles.
fn late_reads(p: &TileProgram, item: &WorkItem) -> u64 {
    match item.sink {
        Sink::ReduceRows => u64::MAX,
        Sink::Copy => 1,
        Sink::Store | Sink::Send | Sink::Reduce | Sink::Partial | Sink::Scatter => {
            u64::from(item.parts) + u64::from(item.partials.saturating_sub(p.in_mainloop))
        }
    }
}

/// Whether `rows` are groups of `group` entries with one step each.
fn in_groups(rows: &[Await], group: u32) -> bool {
    let together = |entries: &[Await]| {
        entries.len() == group as usize
            && entries.iter().all(|entry| entry.k_step == entries[0].k_step)
    };
    if rows.is_empty() {
        group == 0
    } else {
        group > 0 && rows.chunks(group as usize).all(together)
    }
}

/// Which items count partials and parts.
fn part_fields(item: &WorkItem) -> Option<&'static str> {
    match item.sink {
        // A kernel adds as many as are counted, whatever the sink.
        Sink::Store | Sink::Partial | Sink::Scatter if item.partials != 0 => {
            Some("only an item that adds partial results counts them")
        }
        Sink::Partial | Sink::ReduceRows | Sink::Copy if item.parts != 0 => {
            Some("only a fix-up item adds parts")
        }
        Sink::Partial => None,
        _ if item.parts == 0 && item.part != NONE => Some("an unused split-K slot is named"),
        _ => None,
    }
}

/// Own rows go to intra-node peers, and along the rail.
fn own_rows(p: &TileProgram, transfer: &Transfer) -> Option<&'static str> {
    let dest = Rank::new(transfer.dest);
    let reached = p.nodes.together(p.rank, dest) || p.nodes.on_one_rail(p.rank, dest);
    (!reached)
        .then_some("traffic to another node goes to the rank with the same local number there")
}

/// Rows that came along the rail go to intra-node peers.
fn forward_form(p: &TileProgram, forward: &Forward) -> Option<&'static str> {
    let source = p.nodes.rail(p.rank).find(|source| source.place_at(p.rank) == Some(forward.from));
    match source {
        None => Some("a forward reads rows that came along the rail"),
        Some(source) if (forward.awaits.peer, forward.awaits.k_step) != (source.get(), 0) => {
            Some("a forward awaits its rows from their owner")
        }
        _ if !p.nodes.together(p.rank, Rank::new(forward.to.dest)) => {
            Some("a forward stays in its node")
        }
        _ if forward.to.dest == p.rank.get() => Some("a forward goes to another rank"),
        Some(source) => transfer_form(p, source, &forward.to),
    }
}

/// Checks a transfer of rows of `source`'s shard.
fn transfer_form(p: &TileProgram, source: Rank, transfer: &Transfer) -> Option<&'static str> {
    let place = if p.rows.is_flattened() {
        Some(source.get())
    } else {
        source.place_at(Rank::new(transfer.dest))
    };
    let end = transfer.col + transfer.cols;
    match (p.problem.op().sums_to(), place) {
        (SumsTo::Rows | SumsTo::All, _) => Some("only an AllGather-GEMM has transfers"),
        (_, None) => Some("nothing is transferred to oneself"),
        (_, Some(place)) if place != transfer.place => {
            Some("a rank fills its own place in a gather buffer")
        }
        _ if !transfer.col.is_multiple_of(p.tile.k) => Some("a slice begins at a step along k"),
        _ if !end.is_multiple_of(p.tile.k) && end != p.problem.gathered_columns() => {
            Some("a slice ends at a step along k")
        }
        _ => None,
    }
}
