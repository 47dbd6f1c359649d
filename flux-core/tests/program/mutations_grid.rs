//! The rule of the grid, broken by items that still compute everything once.

use crate::mutations::{assert_violates, pick, pick_item};
use crate::strategies::{Call, Knobs, calls, knob_calls};
use flux_core::OpKind::{self, AllGatherGemm, GemmReduceScatter};
use flux_core::layout::RowLayout;
use flux_core::program::check::{Violation, verify};
use flux_core::program::{Chunk, Sink, WorkItem};
use proptest::prelude::*;
use proptest::sample::Index;

/// Calls with shards of two by two tiles, announced whole.
fn two_by_two() -> impl Strategy<Value = Call> {
    let of = |op| calls(op, 1..=6, 2..=2, 2..=2, Just(Chunk::Shard));
    prop_oneof![of(AllGatherGemm), of(GemmReduceScatter)]
}

/// Calls of `op` with flattened rows.
fn flattened(op: OpKind) -> impl Strategy<Value = Call> {
    knob_calls(op, 2..=6, 1..=3, Just(Knobs { rows: RowLayout::Flattened, ..Knobs::PLAIN }))
}

/// Moves the border between the first two blocks of `tile` elements.
fn shift(first: &mut u32, count: &mut u32, tile: u32, by: u32) {
    if *first == 0 {
        *count -= by;
    } else if *first == tile {
        *first -= by;
        *count += by;
    }
}

proptest! {
    #[test]
    fn rows_between_two_tiles(call in two_by_two()) {
        let mut call = call;
        let tile = call.0[0].tile.m;
        prop_assume!(tile > 1 && call.0[0].problem.m_shard() < 2 * tile);
        for p in &mut call.0 {
            p.items.iter_mut().for_each(|item| shift(&mut item.row, &mut item.rows, tile, 1));
        }
        assert_violates!(call, Violation::OffGrid { what: "rows", item: 0, ref found, tile: ref of, .. } if found.start == of.start && found.end + 1 == of.end);
    }

    /// The border moves by whole vectors of 8 columns, or not.
    #[test]
    fn columns_between_two_tiles(call in two_by_two(), by: Index) {
        let mut call = call;
        let tile = call.0[0].tile.n;
        let room = 2 * tile - call.0[0].problem.n_shard();
        prop_assume!(room > 0);
        let by = 1 + by.index(room as usize) as u32;
        for p in &mut call.0 {
            p.items.iter_mut().for_each(|item| shift(&mut item.col, &mut item.cols, tile, by));
        }
        assert_violates!(call, Violation::OffGrid { what: "columns", item: 0, ref found, tile: ref of, .. } if found.start == of.start && found.end + by == of.end);
    }

    #[test]
    fn a_tile_in_two_items(
        call in prop_oneof![calls(AllGatherGemm, 1..=4, 1..=3, 1..=3, Just(Chunk::Shard)), flattened(AllGatherGemm)],
        rank: Index,
        item: Index,
        at: Index,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let index = pick_item(&p.items, item, |_| true);
        cut(&mut p.items, index, at);
        assert_violates!(call, Violation::OffGrid { what: "columns", item, .. } if item == index);
    }

    #[test]
    fn a_reduction_in_two_by_columns(
        call in flattened(GemmReduceScatter),
        rank: Index,
        item: Index,
        at: Index,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let index = pick_item(&p.items, item, |item| item.sink == Sink::ReduceRows);
        cut(&mut p.items, index, at);
        assert_violates!(call, Violation::OffGrid { what: "columns", item, .. } if item == index);
    }

    /// A reduction may be cut by rows.
    #[test]
    fn a_reduction_in_two_by_rows(
        call in flattened(GemmReduceScatter),
        rank: Index,
        item: Index,
        at: Index,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        prop_assume!(p.items.iter().any(|item| item.sink == Sink::ReduceRows && item.rows > 1));
        let index =
            pick_item(&p.items, item, |item| item.sink == Sink::ReduceRows && item.rows > 1);
        let whole = p.items[index];
        let rows = 1 + at.index(whole.rows as usize - 1) as u32;
        p.items[index].rows = rows;
        p.items.insert(
            index + 1,
            WorkItem { row: whole.row + rows, rows: whole.rows - rows, ..whole },
        );
        prop_assert_eq!(verify(&call.0), Ok(()));
    }
}

/// Cuts an item in two by columns.
fn cut(items: &mut Vec<WorkItem>, index: usize, at: Index) {
    let whole = items[index];
    let cols = 1 + at.index(whole.cols as usize - 1) as u32;
    items[index].cols = cols;
    items.insert(index + 1, WorkItem { col: whole.col + cols, cols: whole.cols - cols, ..whole });
}
