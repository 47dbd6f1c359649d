//! Calls whose moments can be counted by hand: a step, a tile on a link, and the addition of a
//! partial tile take 1 us each.

use super::*;
use crate::Rank;
use crate::layout::RowLayout;
use crate::program::{Chunk, NONE, Schedule, TileProgram};
use crate::tile::Generation;
use crate::timeline::{Phase, Span};
use crate::{DType, OpKind, Problem, TileShape, WorldSize};

/// One worker a rank. Tiles of 8x8x8 have 1024 operations a step and 128 bytes of bf16.
const ROUND: Machine = Machine {
    l2_bytes_per_us: 0,
    message_ns: 0,
    message_bytes_per_us: 0,
    staged_bytes_per_us: 0,
    staged_total_bytes_per_us: 0,
    name: "round",
    gpu: "round",
    wires: "none",
    host_staged: false,
    generation: Generation::Hopper,
    multiprocessors: 1,
    ops_per_cycle: 1024,
    clock_mhz: 1,
    memory_bytes_per_us: 1_000_000,
    link_bytes_per_us: 128,
    both_ways_bytes_per_us: 128,
    signal_ns: 100,
    begin_ns: 1000,
    end_ns: 2000,
    tile_ns: 500,
    add_bytes_per_us: 128,
    push_begins_ns: 0,
    push_ns: 0,
    push_round_ns: 0,
    copy_begins_ns: 10_000,
    copy_ns: 1000,
};

fn schedule() -> Schedule {
    Schedule { chunk: Chunk::Tiles(1), ..Schedule::of(TileShape::new(8, 8, 8)) }
}

fn programs(op: OpKind, world: u32, [m, n, k]: [usize; 3], schedule: Schedule) -> Vec<TileProgram> {
    let world = WorldSize::new(world).unwrap();
    let problem = Problem::new(op, m, n, k, DType::Bf16, world).unwrap();
    world.ranks().map(|rank| TileProgram::build(&problem, rank, &schedule).unwrap()).collect()
}

fn ag(world: u32, extents: [usize; 3], schedule: Schedule) -> Vec<TileProgram> {
    programs(OpKind::AllGatherGemm, world, extents, schedule)
}

fn rs(world: u32, extents: [usize; 3], schedule: Schedule) -> Vec<TileProgram> {
    programs(OpKind::GemmReduceScatter, world, extents, schedule)
}

fn nanoseconds(programs: &[TileProgram], machine: Machine) -> u128 {
    simulate(programs, &machine, Mover::Kernel).unwrap().time.as_nanos()
}

const US: fn(u64) -> Duration = Duration::from_micros;
const NS: fn(u64) -> Duration = Duration::from_nanos;

#[test]
fn a_tile_takes_its_steps_or_what_they_read() {
    let one = ag(1, [8, 8, 16], schedule());
    let call = simulate(&one, &ROUND, Mover::Kernel).unwrap();
    assert_eq!(call.time, NS(1000 + 2 * 1000 + 500 + 2000));
    let done = RankTotals {
        done: NS(3500),
        multiplied: US(3),
        multiplying: US(2),
        ..RankTotals::default()
    };
    assert_eq!(call.ranks, [done]);
    // A step reads 8 rows of x and 8 of w, 16 bytes of each.
    assert_eq!(
        nanoseconds(&one, Machine { memory_bytes_per_us: 64, ..ROUND }),
        1000 + 2 * 4000 + 500 + 2000
    );
}

#[test]
fn workers_take_every_nth_item() {
    let three = ag(1, [24, 8, 8], schedule());
    assert_eq!(nanoseconds(&three, ROUND), 3000 + 3 * 1500);
    assert_eq!(nanoseconds(&three, Machine { multiprocessors: 2, ..ROUND }), 3000 + 2 * 1500);
}

#[test]
fn an_own_tile_awaits_the_partial_tile_of_its_peer() {
    let two = rs(2, [16, 8, 16], schedule());
    let call = simulate(&two, &ROUND, Mover::Kernel).unwrap();
    // Sent at 2.5, arrived at 3.6. The own tile is multiplied at 3.5, complete at 4.6.
    assert_eq!(call.time, NS(4600 + 500 + 2000));
    let totals = RankTotals {
        done: NS(5100),
        multiplied: NS(3500),
        multiplying: US(2),
        waiting: NS(100),
        adding: US(1),
        sent: 128,
        received: 128,
    };
    assert_eq!(call.ranks, [totals; 2]);
    assert_eq!(call.on_links(&ROUND), US(1));
    let (mut begin, mut spans) = (US(1), Vec::new());
    for (phase, end) in [
        (Phase::Multiply, 2000),
        (Phase::Send, 2500),
        (Phase::Multiply, 3500),
        (Phase::Wait, 3600),
        (Phase::Add, 4600),
        (Phase::Send, 5100),
    ] {
        spans.push(Span { phase, begin, end: NS(end) });
        begin = NS(end);
    }
    for tracks in &call.tracks {
        assert_eq!((tracks.len(), tracks[0].begin(), tracks[0].spans()), (1, US(1), &spans[..]));
    }
    assert_eq!(
        nanoseconds(&two, Machine { link_bytes_per_us: 32, both_ways_bytes_per_us: 32, ..ROUND }),
        2500 + 4000 + 100 + 1000 + 500 + 2000
    );
}

#[test]
fn a_chunk_is_announced_when_its_last_tile_is_there() {
    let of = |chunk| rs(2, [16, 16, 16], Schedule { chunk, ..schedule() });
    // The second tile is sent at 4 and the chunk announced at 5.1, 0.1 into the first own tile.
    assert_eq!(nanoseconds(&of(Chunk::Shard), ROUND), 5100 + 1000 + 500 + 2500 + 2000);
    assert_eq!(nanoseconds(&of(Chunk::Tiles(1)), ROUND), 5000 + 1000 + 500 + 2500 + 2000);
}

#[test]
fn through_the_host_a_chunk_leaves_whole_and_goes_on_whole() {
    let of = |chunk| rs(2, [16, 16, 16], Schedule { chunk, ..schedule() });
    let host = Machine { host_staged: true, ..ROUND };
    // The chunk of two tiles leaves at 4, takes 2 us, and arrives 2 us later. Single tiles arrive
    // at 4.5 and 6, the second when the first own tile is complete.
    assert_eq!(nanoseconds(&of(Chunk::Shard), host), 8100 + 1000 + 500 + 2500 + 2000);
    assert_eq!(nanoseconds(&of(Chunk::Tiles(1)), host), 5000 + 1000 + 500 + 2500 + 2000);
}

#[test]
fn through_the_host_results_leave_in_whole_chunks_and_are_copied() {
    let of = |chunk| {
        let schedule = Schedule { chunk, own_lag: u32::MAX, ..schedule() };
        programs(OpKind::GemmAllReduce, 2, [16, 16, 16], schedule)
    };
    let host = Machine { host_staged: true, ..ROUND };
    // As above the own tiles end at 9.6 and 12.1. Both leave then, and are there at 16.2.
    assert_eq!(nanoseconds(&of(Chunk::Shard), host), 12_100 + 4000 + 100 + 2 * 1000 + 2000);
    // They end at 6.5 and 9; the second is there at 11.1, when the first was copied.
    assert_eq!(nanoseconds(&of(Chunk::Tiles(1)), host), 9000 + 2000 + 100 + 1000 + 2000);
}

#[test]
fn a_mainloop_partial_tile_takes_half_the_time() {
    let of = |in_mainloop| rs(2, [16, 8, 12 * 16], Schedule { in_mainloop, ..schedule() });
    assert_eq!(nanoseconds(&of(0), ROUND), 1000 + 12_500 + 12_000 + 1000 + 500 + 2000);
    assert_eq!(nanoseconds(&of(1), ROUND), 1000 + 12_500 + 6000 + 500 + 6000 + 500 + 2000);
    // Sent at 13.5, arrived at 34.9. The own tile waits before its seventh step from 19.5 on.
    let slow = simulate(
        &of(1),
        &Machine { link_bytes_per_us: 6, both_ways_bytes_per_us: 6, ..ROUND },
        Mover::Kernel,
    )
    .unwrap();
    let come = 13_500 + 21_334 + 100;
    assert_eq!(
        (slow.time, slow.ranks[0].waiting),
        (NS(come + 500 + 6000 + 500 + 2000), NS(come - 19_500))
    );
}

#[test]
fn a_tile_waits_for_its_rows() {
    let two = ag(2, [16, 16, 8], schedule());
    assert_eq!(nanoseconds(&two, ROUND), 1000 + 2 * 1500 + 2000, "there at 1.1, wanted at 2.5");
    let late = simulate(&two, &Machine { push_begins_ns: 4000, ..ROUND }, Mover::Kernel).unwrap();
    assert_eq!((late.time, late.ranks[0].waiting), (NS(5100 + 1500 + 2000), NS(2600)));
    let copied = |programs: &[TileProgram]| {
        simulate(programs, &ROUND, Mover::CopyEngine).unwrap().time.as_nanos()
    };
    assert_eq!(copied(&two), 10_000 + 1100 + 1500 + 2000);
    // With two slices the second is copied 1 us after the first has arrived, at 11, and awaited
    // before the second step.
    let slices = ag(2, [16, 16, 16], Schedule { k_slices: 2, ..schedule() });
    assert_eq!(copied(&slices), 11_000 + 1000 + 1000 + 100 + 1500 + 2000);
    assert_eq!(
        nanoseconds(&slices, ROUND),
        1000 + 2 * 2500 + 2000,
        "pushed one right after the other"
    );
    let slowly = Machine { push_ns: 4000, push_round_ns: 1000, ..ROUND };
    let slice = 4000 + 8 * 2 * 1000 + 1000;
    assert_eq!(
        nanoseconds(&slices, slowly),
        2 * slice + 100 + 1500 + 2000,
        "eight rows in as many rounds, each loaded and stored"
    );
}

#[test]
fn the_fix_up_item_of_a_split_tile_adds_its_parts() {
    let two = Machine { multiprocessors: 2, ..ROUND };
    // Both parts are multiplied at 2, the partial item is done at 2.5, and its part has 256 bytes.
    assert_eq!(
        nanoseconds(&ag(1, [8, 8, 16], Schedule { split_k: 2, ..schedule() }), two),
        2500 + 2000 + 500 + 2000
    );
}

#[test]
fn a_reduction_awaits_the_rows_that_all_ranks_have_scattered() {
    let flattened = simulate(
        &rs(2, [8, 8, 16], Schedule { rows: RowLayout::Flattened, ..schedule() }),
        &ROUND,
        Mover::Kernel,
    )
    .unwrap();
    // 4 rows of 16 bytes go to the peer, arrived at 3.1; those of both ranks are added.
    assert_eq!(
        (flattened.time, flattened.ranks[1].sent),
        (NS(2500 + 500 + 100 + 1000 + 500 + 2000), 64)
    );
}

#[test]
fn a_signal_that_is_never_raised_is_named() {
    let mut two = rs(2, [16, 8, 16], schedule());
    two[1].items[0].raise = NONE;
    let (rank, peer) = (Rank::new(0), Rank::new(1));
    let stuck = SimulateError::Stuck { rank, item: 1, signal: 0, peer };
    assert_eq!(simulate(&two, &ROUND, Mover::Kernel), Err(stuck.clone()));
    assert_eq!(
        stuck.to_string(),
        "rank 0 waits forever: item 1 awaits signal 0, which rank 1 never raises"
    );
}

#[test]
fn what_is_no_call_over_peer_memory_is_refused() {
    let two = rs(2, [16, 8, 16], schedule());
    assert_eq!(
        simulate(&two[..1], &ROUND, Mover::Kernel),
        Err(SimulateError::Programs { programs: 1, world: 2 })
    );
    assert_eq!(
        simulate(&[], &ROUND, Mover::Kernel),
        Err(SimulateError::Programs { programs: 0, world: 0 })
    );
    let (world, rank) = (WorldSize::new(4).unwrap(), Rank::new(0));
    let problem = Problem::new(OpKind::GemmReduceScatter, 32, 8, 32, DType::Bf16, world).unwrap();
    let nodes = crate::Nodes::new(world, 2).unwrap();
    let program = TileProgram::build_across(&problem, rank, &schedule(), nodes).unwrap();
    assert_eq!(simulate(&vec![program; 4], &ROUND, Mover::Kernel), Err(SimulateError::Nodes));
}
