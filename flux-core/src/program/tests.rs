//! Programs of small problems, item by item.

use super::*;
use crate::layout::{RowLayout, WorkspaceSize};
use crate::{DType, OpKind, Problem, Rank, TileShape, WorldSize};

const TILE: TileShape = TileShape::new(128, 256, 64);

fn problem(op: OpKind, world: u32, m_shard: usize) -> Problem {
    let world = WorldSize::new(world).expect("a world size");
    let k = 64 * world.index();
    let n = 8 * 40 * world.index();
    Problem::new(op, m_shard * world.index(), n, k, DType::Bf16, world).expect("a valid problem")
}

fn build(p: &Problem, rank: u32, chunk: Chunk) -> TileProgram {
    let schedule = Schedule { chunk, ..Schedule::of(TILE) };
    TileProgram::build(p, Rank::new(rank), &schedule).expect("a valid schedule")
}

#[test]
fn ag_gemm_reads_its_own_shard_first_and_in_place() {
    // 2 row blocks by 2 column blocks of a shard of 129 x 320.
    let p = problem(OpKind::AllGatherGemm, 3, 129);
    let program = build(&p, 1, Chunk::Tiles(1));
    let shards: Vec<u32> = program.items.iter().map(|item| item.out_outer).collect();
    assert_eq!(shards, [1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0, 0]);
    assert!(
        program.items[..4]
            .iter()
            .all(|i| (i.a_source, i.a_outer, i.await_count) == (RowSource::Caller, 0, 0))
    );
    // Shard 2 lies in place 1, as ranks 0 and 2 have places 0 and 1, and has signals 2 and 3.
    assert!(program.items[4..8].iter().all(|i| (i.a_source, i.a_outer) == (RowSource::Gather, 1)));
    let tail = program.items[5];
    assert_eq!((tail.row, tail.rows, tail.col, tail.cols), (128, 1, 0, 256));
    assert_eq!(program.awaits_of(&tail), [Await { signal: 3, peer: 2, k_step: 0 }]);
    assert_eq!((program.signals, program.counters, program.slots_per_source), (4, 0, 0));
}

#[test]
fn ag_gemm_moves_its_shard_to_the_rank_before_it_first() {
    let p = problem(OpKind::AllGatherGemm, 3, 129);
    let program = build(&p, 1, Chunk::Tiles(1));
    let to = |dest, place, row, rows, raise, step| Transfer {
        dest,
        place,
        row,
        rows,
        col: 0,
        cols: p.k(),
        raise,
        step,
    };
    let expected = [
        to(0, 0, 0, 128, 0, 1),
        to(0, 0, 128, 1, 1, 1),
        to(2, 1, 0, 128, 2, 2),
        to(2, 1, 128, 1, 3, 2),
    ];
    assert_eq!(program.transfers, expected);
    assert_eq!(
        build(&p, 1, Chunk::Tiles(2)),
        build(&p, 1, Chunk::Shard),
        "two row blocks are the shard"
    );
}

#[test]
fn gemm_rs_sends_to_the_next_rank_first_and_keeps_its_own_shard_for_last() {
    // 1 row block by 4 column blocks of a shard of 100 x 960.
    let p = problem(OpKind::GemmReduceScatter, 3, 100);
    let program = build(&p, 1, Chunk::Tiles(3));
    let owners: Vec<u32> = program.items.iter().map(|item| item.dest).collect();
    assert_eq!(owners, [2, 2, 2, 2, 0, 0, 0, 0, 1, 1, 1, 1]);
    // Rank 1 works for rank 2 first, and has its first place: slots 0..4 and signals 0, 1. The
    // second chunk is one tile and needs no counter.
    let sends: Vec<_> =
        program.items[..4].iter().map(|i| (i.slot, i.raise, i.counter, i.raise_after)).collect();
    assert_eq!(sends, [(0, 0, 2, 3), (1, 0, 2, 3), (2, 0, 2, 3), (3, 1, NONE, 1)]);
    let own = program.items[11];
    assert_eq!((own.sink, own.partial_slot, own.partials, own.raise), (Sink::Reduce, 3, 2, NONE));
    assert_eq!(
        program.late_awaits_of(&own),
        [Await { signal: 1, peer: 0, k_step: 0 }, Await { signal: 3, peer: 2, k_step: 0 }]
    );
    assert_eq!((program.signals, program.counters, program.slots_per_source), (4, 4, 4));
}

#[test]
fn the_k_of_a_tile_is_split_in_order_and_its_fix_up_item_comes_last() {
    let p = problem(OpKind::GemmReduceScatter, 2, 100); // 3 column blocks, 2 steps of 32 along k
    let schedule = Schedule { split_k: 9, ..Schedule::of(TileShape::new(128, 256, 32)) };
    let program = TileProgram::build(&p, Rank::new(0), &schedule).expect("a valid schedule");
    let [partial_item, fix_up] = [program.items[6], program.items[7]]; // of the first own tile
    assert_eq!(
        (
            partial_item.sink,
            partial_item.part,
            partial_item.raise,
            partial_item.k_first,
            partial_item.k_steps
        ),
        (Sink::Partial, 3, 1 + 3, 1, 1)
    );
    assert_eq!(
        (fix_up.sink, fix_up.part, fix_up.parts, fix_up.k_first, fix_up.k_steps),
        (Sink::Reduce, 3, 1, 0, 1)
    );
    let late = [Await { signal: 4, peer: 0, k_step: 0 }, Await { signal: 0, peer: 1, k_step: 0 }];
    assert_eq!(program.late_awaits_of(&fix_up), late);
    // Shards of 100 rows are sent in strips of 16.
    let (slots, parts) = (3 * 112 * 256 * 2, 6 * 128 * 256 * 4);
    assert_eq!((program.split_k_slots, program.split_k_offset()), (6, slots));
    assert_eq!(
        program.workspace(),
        WorkspaceSize { half_bytes: slots + parts, signals: 1 + 6, counters: 1 }
    );
}

#[test]
fn an_item_awaits_the_slices_that_it_multiplies() {
    let p = problem(OpKind::AllGatherGemm, 2, 100); // 4 steps of 32 along k
    let schedule =
        Schedule { split_k: 2, k_slices: 2, ..Schedule::of(TileShape::new(128, 256, 32)) };
    let program = TileProgram::build(&p, Rank::new(0), &schedule).expect("a valid schedule");
    // Of the first tile of shard 1.
    let [partial_item, fix_up] = [program.items[4], program.items[5]];
    assert_eq!(program.awaits_of(&partial_item), [Await { signal: 1, peer: 1, k_step: 2 }]);
    assert_eq!(program.awaits_of(&fix_up), [Await { signal: 0, peer: 1, k_step: 0 }]);
    let cut: Vec<_> = program.transfers.iter().map(|t| (t.col, t.cols, t.raise)).collect();
    assert_eq!(cut, [(0, 64, 0), (64, 64, 1)]);
    let grouped = TileProgram::build(
        &problem(OpKind::AllGatherGemm, 3, 100),
        Rank::new(0),
        &Schedule { group: 3, ..schedule },
    );
    let order: Vec<_> =
        grouped.expect("a valid schedule").transfers.iter().map(|t| (t.col > 0, t.step)).collect();
    assert_eq!(
        order,
        [(false, 1), (false, 2), (true, 1), (true, 2)],
        "the first slices of all shards come first"
    );
    let schedule = Schedule { split_k: 1, group: 3, prologue: 2, ..schedule };
    let with_prologue =
        TileProgram::build(&problem(OpKind::AllGatherGemm, 4, 100), Rank::new(0), &schedule)
            .expect("a valid schedule");
    let shards: Vec<_> =
        with_prologue.items.iter().map(|item| (item.out_outer, item.await_count)).collect();
    let first = shards.iter().position(|&(shard, _)| shard > 1).expect("a group");
    assert!(
        shards[..first / 2].iter().all(|&own| own == (0, 0))
            && shards[first / 2..first].iter().all(|&next| next == (1, 2)),
        "{shards:?}"
    );
    assert!(
        shards[first..].iter().all(|&(shard, awaits)| shard > 1 && awaits == 4),
        "two slices of each of two shards: {shards:?}"
    );
    let chunk_ordered = Schedule {
        chunk: Chunk::Tiles(1),
        chunk_ordered: 1,
        ..Schedule::of(TileShape::new(32, 16, 32))
    };
    let program =
        TileProgram::build(&problem(OpKind::AllGatherGemm, 3, 100), Rank::new(0), &chunk_ordered)
            .expect("a valid schedule");
    let rows = |shard| {
        program
            .items
            .iter()
            .filter(move |item| item.out_outer == shard)
            .map(|item| item.row)
            .collect::<Vec<_>>()
    };
    assert!(
        rows(1).is_sorted() && !rows(2).is_sorted() && !rows(0).is_sorted(),
        "the first peer's row blocks one after another: {:?}",
        rows(1)
    );
}

/// Two peers' shards of four row blocks are side by side, two row blocks of each at a time.
#[test]
fn shards_side_by_side_await_a_chunk_of_each() {
    let schedule = Schedule {
        chunk: Chunk::Tiles(2),
        group: 2,
        prologue: 1,
        chunk_ordered: 2,
        ..Schedule::of(TileShape::new(32, 16, 32))
    };
    let program =
        TileProgram::build(&problem(OpKind::AllGatherGemm, 3, 100), Rank::new(0), &schedule)
            .expect("a valid schedule");
    let (own, others) = program.items.split_at(program.items.len() / 3);
    assert!(own.iter().all(|item| item.out_outer == 0 && item.await_count == 0));
    let (first, second) = others.split_at(others.len() / 2);
    for (chunk, items) in [(0, first), (1, second)] {
        let awaits = [(0, 1), (1, 2)].map(|(place, peer)| Await {
            signal: place * 2 + chunk,
            peer,
            k_step: 0,
        });
        assert!(
            items.iter().all(|item| item.row / 64 == chunk && program.awaits_of(item) == awaits),
            "chunk {chunk}"
        );
        assert_eq!(
            items.iter().map(|item| item.out_outer).take(4).collect::<Vec<_>>(),
            [1, 2, 1, 2]
        );
    }
}

#[test]
fn flattened_tiles_read_all_shards_from_the_gather_buffer() {
    let p = problem(OpKind::AllGatherGemm, 3, 100); // 3 row blocks of 128 rows over 3 shards
    let schedule = Schedule { rows: RowLayout::Flattened, raster_group: 1, ..Schedule::of(TILE) };
    let program = TileProgram::build(&p, Rank::new(1), &schedule).expect("a valid schedule");
    let item = program.items.iter().find(|item| item.row == 128).expect("a second row block");
    assert_eq!(
        (item.a_source, item.a_outer, item.row, item.rows, item.out_outer),
        (RowSource::Gather, 0, 128, 128, 0)
    );
    let entry = |rank| Await { signal: rank, peer: rank, k_step: 0 };
    assert_eq!(
        program.awaits_of(item),
        [entry(1), entry(2)],
        "rows 128 to 256 are those of shards 1 and 2, the own one first"
    );
    let moves: Vec<_> =
        program.transfers.iter().map(|t| (t.step, t.dest, t.place, t.raise)).collect();
    assert_eq!(moves, [(0, 1, 1, 1), (1, 0, 1, 1), (2, 2, 1, 1)]);
    assert_eq!(
        program.workspace(),
        WorkspaceSize { half_bytes: 300 * 192 * 2, signals: 3, counters: 3 }
    );
}

#[test]
fn flattened_tiles_are_scattered_to_their_owners_and_reduced_there() {
    // 1 row block over 3 shards by 4 column blocks of 960.
    let p = problem(OpKind::GemmReduceScatter, 3, 20);
    let schedule =
        Schedule { rows: RowLayout::Flattened, chunk: Chunk::Tiles(1), ..Schedule::of(TILE) };
    let program = TileProgram::build(&p, Rank::new(1), &schedule).expect("a valid schedule");
    let tile = program.items[2];
    assert_eq!(
        (tile.sink, tile.row, tile.rows, tile.raise, tile.dest),
        (Sink::Scatter, 0, 60, 4 + 2, 1)
    );
    assert_eq!(program.signalled_ranks(&tile).map(Rank::get).collect::<Vec<_>>(), [0, 1, 2]);
    // 20 rows are reduced as 16 and 4.
    let reductions: Vec<_> =
        program.items[4..].iter().map(|i| (i.sink, i.row, i.rows, i.col, i.partials)).collect();
    assert_eq!(
        reductions[..3],
        [
            (Sink::ReduceRows, 0, 16, 0, 3),
            (Sink::ReduceRows, 16, 4, 0, 3),
            (Sink::ReduceRows, 0, 16, 256, 3)
        ]
    );
    let late = [0, 1, 2].map(|source| Await { signal: source * 4, peer: source, k_step: 0 });
    assert_eq!((reductions.len(), program.late_awaits_of(&program.items[5])), (8, &late[..]));
    assert_eq!(
        program.workspace(),
        WorkspaceSize { half_bytes: 3 * 20 * 960 * 2, signals: 12, counters: 0 }
    );
    let fewer = Schedule { chunk: Chunk::Tiles(3), ..schedule };
    assert_eq!(TileProgram::build(&p, Rank::new(1), &fewer), Ok(program), "as one by one");
}

#[test]
fn one_signal_may_announce_all_scattered_tiles() {
    // 3 row blocks by 4 column blocks, whose middle one holds no rows of the first shard.
    let p = problem(OpKind::GemmReduceScatter, 3, 100);
    let schedule = Schedule { rows: RowLayout::Flattened, ..Schedule::of(TILE) };
    let program = TileProgram::build(&p, Rank::new(1), &schedule).expect("a valid schedule");
    let tiles = &program.items[..12];
    assert!(
        tiles
            .iter()
            .all(|i| (i.sink, i.raise, i.counter, i.raise_after) == (Sink::Scatter, 1, 0, 12))
    );
    assert!(
        tiles.iter().all(|tile| program.signalled_ranks(tile).map(Rank::get).eq(0..3)),
        "all owners"
    );
    let late = [0, 1, 2].map(|source| Await { signal: source, peer: source, k_step: 0 });
    assert!(program.items[12..].iter().all(|reduction| program.late_awaits_of(reduction) == late));
    assert_eq!(
        program.workspace(),
        WorkspaceSize { half_bytes: 300 * 960 * 2, signals: 3, counters: 1 }
    );
    let as_many = Schedule { chunk: Chunk::Tiles(12), ..schedule };
    assert_eq!(
        TileProgram::build(&p, Rank::new(1), &as_many),
        Ok(program),
        "all tiles are the shard"
    );
    // One tile needs no counter.
    let small = problem(OpKind::GemmReduceScatter, 3, 20);
    let wide = Schedule { tile: TileShape::new(128, 960, 64), ..schedule };
    let program = TileProgram::build(&small, Rank::new(1), &wide).expect("a valid schedule");
    assert_eq!(
        (program.items[0].counter, program.items[0].raise_after, program.signals, program.counters),
        (NONE, 1, 3, 0)
    );
}

#[test]
fn a_world_of_one_awaits_and_sends_nothing() {
    for op in [OpKind::AllGatherGemm, OpKind::GemmReduceScatter] {
        let program = build(&problem(op, 1, 300), 0, Chunk::Tiles(1));
        assert!(program.awaits.is_empty() && program.transfers.is_empty());
        assert!(
            program
                .items
                .iter()
                .all(|i| i.sink == Sink::Store && i.raise == NONE && i.await_count == 0)
        );
        assert_eq!(program.workspace(), WorkspaceSize::default());
        let flattened =
            Schedule { chunk: Chunk::Tiles(1), rows: RowLayout::Flattened, ..Schedule::of(TILE) };
        assert_eq!(
            TileProgram::build(&problem(op, 1, 300), Rank::new(0), &flattened),
            Ok(program),
            "there is nothing to flatten"
        );
    }
}

#[test]
fn the_workspace_holds_what_the_indices_reach() {
    let p = problem(OpKind::GemmReduceScatter, 3, 100);
    let size = build(&p, 0, Chunk::Tiles(1)).workspace();
    let slot_bytes = 112 * 256 * 2; // of 100 rows, in strips of 16
    assert_eq!(size, WorkspaceSize { half_bytes: 2 * 4 * slot_bytes, signals: 8, counters: 0 });
}

#[test]
fn a_schedule_that_cannot_be_is_refused_with_its_numbers() {
    let p = problem(OpKind::AllGatherGemm, 2, 128);
    let good = Schedule::of(TILE);
    let text = |rank, schedule: Schedule| {
        TileProgram::build(&p, Rank::new(rank), &schedule).expect_err("refused").to_string()
    };
    assert_eq!(text(2, good), "rank 2 is outside the world of 2 ranks");
    assert_eq!(
        text(0, Schedule { chunk: Chunk::Tiles(0), ..good }),
        "chunk = 0: it must be at least 1"
    );
    assert!(text(0, Schedule { raster_group: 0, ..good }).starts_with("raster_group = 0"));
    assert!(text(0, Schedule { tile: TileShape::new(0, 1, 1), ..good }).starts_with("tile.m = 0"));
    assert_eq!(
        text(0, Schedule { tile: TileShape::new(1 << 25, 1, 1), ..good }),
        "tile.m = 33554432 is above the limit 16777216"
    );

    assert_eq!(text(0, Schedule { split_k: 0, ..good }), "split_k = 0: it must be at least 1");
    assert_eq!(text(0, Schedule { k_slices: 0, ..good }), "k_slices = 0: it must be at least 1");
    assert_eq!(
        text(0, Schedule { stream_k_workers: 0, ..good }),
        "stream_k_workers = 0: it must be at least 1"
    );
    assert_eq!(
        text(0, Schedule { stream_k_workers: 3_000_000, ..good }),
        "stream_k_workers = 3000000 is above the limit 65536"
    );
    assert!(
        TileProgram::build(
            &p,
            Rank::new(0),
            &Schedule { stream_k_workers: MAX_STREAM_K_WORKERS, ..good }
        )
        .is_ok()
    );

    let deep = Problem::new(OpKind::AllGatherGemm, 1 << 18, 16, 1 << 10, DType::Bf16, p.world())
        .expect("a valid problem");
    let schedule = Schedule {
        chunk: Chunk::Tiles(1),
        k_slices: 1 << 10,
        ..Schedule::of(TileShape::new(16, 8, 1))
    };
    let error = TileProgram::build(&deep, Rank::new(0), &schedule).expect_err("refused");
    assert_eq!(error, ScheduleError::TooManySignals { tile: schedule.tile, signals: 1 << 24 });
    // There are few signals, but each row block awaits all of its shard.
    let schedule = Schedule {
        chunk: Chunk::Shard,
        raster_group: 1,
        k_slices: u32::MAX,
        rows: RowLayout::Flattened,
        ..schedule
    };
    let error = TileProgram::build(&deep, Rank::new(0), &schedule).expect_err("refused");
    assert_eq!(error, ScheduleError::TooManyAwaits { tile: schedule.tile, awaits: 1 << 24 });

    let large = problem(OpKind::GemmReduceScatter, 2, 1 << 20);
    let schedule = Schedule { tile: TileShape::new(1, 1, 1), ..good };
    let error = TileProgram::build(&large, Rank::new(0), &schedule).expect_err("refused");
    assert_eq!(error, ScheduleError::TooManyItems { tile: schedule.tile, items: (2 * 640) << 20 });
}
