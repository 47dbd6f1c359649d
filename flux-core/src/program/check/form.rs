//! Rule: each item multiplies the rows that it stores, and each record is of the form that its operation has.

use super::{Record, Violation};
use crate::program::{NONE, TileProgram, Transfer, WorkItem, sink, source};
use crate::{OpKind, Rank};

pub(super) fn check(p: &TileProgram) -> Result<(), Violation> {
    let fault = |record, what| Err(Violation::Form { rank: p.rank, record, what });
    for (index, item) in p.items.iter().enumerate() {
        let wrong = match p.problem.op() {
            OpKind::AllGatherGemm => ag_gemm_item(p.rank, item),
            OpKind::GemmReduceScatter => gemm_rs_item(p, item),
        };
        if let Some(what) = wrong.or(idle_fields(item)) {
            return fault(Record::Item(index), what);
        }
    }
    for (index, transfer) in p.transfers.iter().enumerate() {
        if let Some(what) = transfer_form(p, transfer) {
            return fault(Record::Transfer(index), what);
        }
    }
    Ok(())
}

fn ag_gemm_item(rank: Rank, item: &WorkItem) -> Option<&'static str> {
    let place = Rank::new(item.out_outer).place_at(rank);
    let from_here = (item.a_source, item.a_outer) == (source::CALLER, 0);
    let from_place = item.a_source == source::GATHER && place == Some(item.a_outer);
    match (place, item) {
        _ if item.sink != sink::STORE => Some("AllGather-GEMM stores every tile"),
        _ if item.dest != rank.get() => Some("AllGather-GEMM's output is the rank's own"),
        (None, _) if !from_here => Some("the own shard is read from the caller's x"),
        (Some(_), _) if !from_place => Some("a peer's shard is read from its place in the gather buffer"),
        _ => None,
    }
}

fn gemm_rs_item(p: &TileProgram, item: &WorkItem) -> Option<&'static str> {
    let peers = p.problem.world().peers();
    let own = item.dest == p.rank.get();
    match item.sink {
        _ if (item.a_source, item.a_outer) != (source::CALLER, item.dest) => Some("operand A is the caller's shard of the owner's rows"),
        sink::SEND if own => Some("nothing is sent to oneself"),
        sink::SEND if item.raise == NONE => Some("a partial tile is announced by a signal"),
        sink::SEND => None,
        _ if !own => Some("a partial tile of a peer's shard is sent"),
        sink::STORE if peers > 0 => Some("the own shard is reduced"),
        sink::REDUCE if item.partials != peers || peers == 0 => Some("a reduction adds a partial tile of every peer"),
        _ => None,
    }
}

/// What no form uses: raising without sending, counting without raising, and awaiting what is not needed to send.
fn idle_fields(item: &WorkItem) -> Option<&'static str> {
    match item.sink {
        sink::STORE | sink::REDUCE if item.raise != NONE => Some("only a send raises a signal"),
        _ if item.raise == NONE && item.counter != NONE => Some("a counter is for a signal"),
        sink::SEND if item.await_count > 0 => Some("there is nothing to await"),
        _ => None,
    }
}

fn transfer_form(p: &TileProgram, transfer: &Transfer) -> Option<&'static str> {
    match (p.problem.op(), p.rank.place_at(Rank::new(transfer.dest))) {
        (OpKind::GemmReduceScatter, _) => Some("GEMM-ReduceScatter has no transfers"),
        (_, None) => Some("nothing is transferred to oneself"),
        (_, Some(place)) if place != transfer.place => Some("a rank fills its own place in a peer's gather buffer"),
        _ => None,
    }
}
