//! Ranks as threads, several workers each, walk their tile programs against the signal protocol; instead of a matrix product each item
//! checks that every element it would read is the one that the call and the source should have left there.

#![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

use flux_core::layout::{FAULT_BYTES, WorkspaceSize, control, fault, pad_bytes};
use flux_core::program::{Chunk, Schedule, TileProgram, sink, source};
use flux_core::signal::{Epoch, Left, Poisoned, Protocol, SharedMemory, Word, Words, initialise, read_fault};
use flux_core::tile::Raster;
use flux_core::{DType, OpKind, Problem, Rank, TileShape, WorldSize};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// Memory of all ranks: pads, control and fault blocks as words, and the data region as one stamp for each row of a gather place, or each
/// slot.
struct Machine {
    world: WorldSize,
    size: WorkspaceSize,
    pads: Vec<Vec<u32>>,
    control: Vec<Vec<u32>>,
    faults: Vec<Vec<u32>>,
    data: Vec<[Vec<AtomicU64>; 2]>,
}

/// What a source leaves for a call: nobody else writes this number.
fn stamp(epoch: Epoch, source: u32, index: u32) -> u64 {
    u64::from(epoch.get()) << 32 | u64::from(source) << 24 | u64::from(index)
}

fn patient(deadline: Duration) -> impl FnMut(u64) -> ControlFlow<()> {
    let start = Instant::now();
    move |_| {
        thread::yield_now();
        if start.elapsed() < deadline { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    }
}

impl Machine {
    fn new(programs: &[TileProgram], first: Epoch) -> Self {
        let world = programs[0].problem.world();
        let size = programs[0].workspace();
        let words = |bytes: u64| vec![vec![0_u32; usize::try_from(bytes / 4).unwrap()]; world.index()];
        let cells = (programs[0].slots_per_source.max(programs[0].problem.m_shard()) * world.get()) as usize;
        let half = || (0..cells).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
        let mut machine = Self {
            world,
            size,
            pads: words(pad_bytes(size.signals)),
            control: words(control::bytes(size.counters)),
            faults: words(FAULT_BYTES),
            data: world.ranks().map(|_| [half(), half()]).collect(),
        };
        for (rank, words) in world.ranks().zip(machine.words()) {
            initialise(&words, rank, world, size, first);
        }
        machine
    }

    fn words(&mut self) -> Vec<SharedMemory> {
        let pads: Vec<*mut u8> = self.pads.iter_mut().map(|pad| pad.as_mut_ptr().cast()).collect();
        let blocks = self.control.iter_mut().zip(&mut self.faults);
        // SAFETY: the blocks have the sizes that the layout asks for, their heap memory outlives the views, which every test joins its
        // threads to see the end of, and is reached through the views only.
        blocks.map(|(c, f)| unsafe { SharedMemory::new(&pads, c.as_mut_ptr().cast(), f.as_mut_ptr().cast(), self.size) }).collect()
    }
}

/// One worker's walk: items `worker`, `worker + workers`, ...
fn walk(
    p: &TileProgram,
    call: Protocol<'_, SharedMemory>,
    data: &[[Vec<AtomicU64>; 2]],
    worker: usize,
    workers: usize,
) -> Result<Left, Poisoned> {
    let half = call.half();
    let own = &data[p.rank.index()][half];
    for item in p.items.iter().skip(worker).step_by(workers) {
        for entry in p.awaits_of(item).iter().chain(p.late_awaits_of(item)) {
            call.wait(entry.signal, Rank::new(entry.peer), patient(Duration::from_secs(20)))?;
        }
        if item.a_source == source::GATHER {
            for row in item.row..item.row + item.rows {
                let cell = item.a_outer * p.problem.m_shard() + row;
                assert_eq!(own[cell as usize].load(Relaxed), stamp(call.epoch(), item.out_outer, row), "row {row} in {item:?}");
            }
        }
        match item.sink {
            sink::SEND => data[item.dest as usize][half][item.slot as usize]
                .store(stamp(call.epoch(), p.rank.get(), item.slot % p.slots_per_source), Relaxed),
            sink::REDUCE => {
                let peers = p.problem.world().ranks().filter(|&peer| peer != p.rank);
                for (place, peer) in (0..item.partials).zip(peers) {
                    let slot = place * p.slots_per_source + item.slot;
                    assert_eq!(own[slot as usize].load(Relaxed), stamp(call.epoch(), peer.get(), item.slot), "{item:?}");
                }
            }
            _ => {}
        }
        call.complete(item, p.heard_by(item))?;
    }
    call.leave(u32::try_from(workers).unwrap(), !p.transfers.is_empty(), patient(Duration::from_secs(20)))
}

/// The mover of one rank, for one call.
fn push(p: &TileProgram, call: Protocol<'_, SharedMemory>, data: &[[Vec<AtomicU64>; 2]]) {
    for t in &p.transfers {
        for row in t.row..t.row + t.rows {
            let cell = t.place * p.problem.m_shard() + row;
            data[t.dest as usize][call.half()][cell as usize].store(stamp(call.epoch(), p.rank.get(), row), Relaxed);
        }
        call.publish(Rank::new(t.dest), t.raise);
    }
    if !p.transfers.is_empty() {
        call.pushed();
    }
}

fn programs(op: OpKind, world: u32, schedule: Schedule) -> Vec<TileProgram> {
    let world = WorldSize::new(world).unwrap();
    let split = 8 * world.index();
    let problem = Problem::new(op, 37 * world.index(), 5 * split, split, DType::Bf16, world).unwrap();
    world.ranks().map(|rank| TileProgram::build(&problem, rank, &schedule).unwrap()).collect()
}

/// Runs `calls` calls on all ranks, whose last is `u32::MAX + calls / 2`, modulo 2^32: the wrap lies in the middle.
fn run(programs: &[TileProgram], workers: usize, calls: u32) {
    let first = Epoch::new(0).before(calls / 2);
    let mut machine = Machine::new(programs, first);
    let words = machine.words();
    let (world, data) = (machine.world, &machine.data);
    thread::scope(|scope| {
        for (p, words) in programs.iter().zip(&words) {
            scope.spawn(move || {
                for number in 0..calls {
                    // ranks drift apart, each in turn
                    if number % world.get() == p.rank.get() {
                        thread::sleep(Duration::from_micros(300));
                    }
                    let call = Protocol::open(words, p.rank, world);
                    thread::scope(|scope| {
                        scope.spawn(move || push(p, call, data));
                        let walk = |worker| scope.spawn(move || walk(p, call, data, worker, workers));
                        let left: Vec<_> = (0..workers).map(walk).collect::<Vec<_>>();
                        let left: Vec<_> = left.into_iter().map(|t| t.join().unwrap().unwrap()).collect();
                        assert_eq!(left.iter().filter(|&&left| left == Left::Closed).count(), 1, "{left:?}");
                    });
                }
            });
        }
    });
    for words in &words {
        let epoch = words.control(flux_core::signal::Control::Epoch).load_acquire();
        assert_eq!(epoch, first.get().wrapping_add(calls));
        assert_eq!(read_fault(words), None);
    }
}

const TILE: TileShape = TileShape::new(16, 16, 64);

#[test]
fn calls_read_what_the_same_call_left_across_the_wrap_of_the_epoch() {
    for op in [OpKind::AllGatherGemm, OpKind::GemmReduceScatter] {
        for (world, chunk, raster) in [
            (1, Chunk::Shard, Raster::RowsFastest),
            (2, Chunk::Tiles(1), Raster::ColumnsFastest),
            (3, Chunk::Tiles(2), Raster::RowGroups(2)),
            (5, Chunk::Shard, Raster::RowsFastest),
        ] {
            run(&programs(op, world, Schedule { chunk, raster, ..Schedule::of(TILE) }), 3, 40);
        }
    }
}

#[test]
fn a_missing_peer_ends_the_call_with_a_record_that_names_it() {
    let schedule = Schedule { chunk: Chunk::Tiles(1), ..Schedule::of(TILE) };
    let programs = programs(OpKind::GemmReduceScatter, 2, schedule);
    let mut machine = Machine::new(&programs, Epoch::FIRST);
    let words = machine.words();
    let call = Protocol::open(&words[0], Rank::new(0), machine.world);
    assert_eq!(call.wait(2, Rank::new(1), patient(Duration::from_millis(5))), Err(Poisoned));

    let record = read_fault(&words[0]).unwrap();
    assert_eq!((record.code, record.wait, record.rank, record.peer, record.signal), (fault::TIMEOUT, fault::SIGNAL, 0, 1, 2));
    assert_eq!((record.expected, record.seen, record.epoch, record.abort), (1, 0, 1, 0));

    // the other waits of the rank give up at once, nothing more is published, and the first record stays
    let never = |_| -> ControlFlow<()> { unreachable!("a poisoned wait does not pause") };
    assert_eq!(call.wait(0, Rank::new(1), never), Err(Poisoned));
    assert_eq!(call.complete(&programs[0].items[0], [Rank::new(1)]), Err(Poisoned));
    assert_eq!(call.leave(1, false, never), Err(Poisoned));
    assert_eq!(words[1].consumed(Rank::new(1), Rank::new(0)).load_acquire(), 0, "no credit is given");
    assert_eq!(read_fault(&words[0]), Some(record));
    assert_eq!(read_fault(&words[1]), None);
}

#[test]
fn the_abort_word_ends_a_wait_and_is_recorded() {
    let schedule = Schedule::of(TILE);
    let mut machine = Machine::new(&programs(OpKind::AllGatherGemm, 3, schedule), Epoch::FIRST);
    let words = machine.words();
    let call = Protocol::open(&words[2], Rank::new(2), machine.world);
    let mut looks = 0;
    let result = call.wait(1, Rank::new(1), |count| {
        looks = count;
        words[2].abort().store_release(7);
        ControlFlow::Continue(())
    });
    assert_eq!((result, looks), (Err(Poisoned), 1));
    let record = read_fault(&words[2]).unwrap();
    assert_eq!((record.code, record.abort, record.peer), (fault::ABORTED, 7, 1));
}

#[test]
fn a_call_does_not_close_before_the_credits_of_the_next() {
    let schedule = Schedule::of(TILE);
    let mut machine = Machine::new(&programs(OpKind::GemmReduceScatter, 2, schedule), Epoch::FIRST);
    let words = machine.words();
    let leave = |epoch: u32| {
        let call = Protocol::open(&words[0], Rank::new(0), machine.world);
        assert_eq!(call.epoch(), Epoch::new(epoch));
        call.leave(1, false, patient(Duration::from_millis(5)))
    };
    assert_eq!(leave(1), Ok(Left::Closed), "nobody has used the half of call 2 before");
    assert_eq!(leave(2), Err(Poisoned), "rank 1 has not consumed call 1, whose half call 3 would use");
    let record = read_fault(&words[0]).unwrap();
    assert_eq!((record.wait, record.peer, record.expected, record.seen), (fault::CONSUMED, 1, 1, 0));
}
