//! Ranks as threads, with several workers each, walk their tile programs over the signal protocol.
//! Instead of multiplying, each item checks that all data it would read is of this call and its
//! source.

#![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

use flux_core::layout::RowLayout;
use flux_core::layout::{FAULT_BYTES, WorkspaceSize, control, fault, pad_bytes};
use flux_core::program::{
    Await, Chunk, Forward, NONE, RowSource, Schedule, Sink, TileProgram, WorkItem,
};
use flux_core::signal::{
    Control, Epoch, Left, Poisoned, Protocol, SharedMemory, Word, Words, initialise, read_fault,
};
use flux_core::{DType, Nodes, OpKind, Problem, Rank, TileShape, WorldSize};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// Memory of all ranks: pads, control and fault blocks as words. The data region is one stamp for
/// each step of a gathered row, each slot, each split-K slot, or each row and column block of
/// scattered rows.
struct RankMemory {
    world: WorldSize,
    size: WorkspaceSize,
    pads: Vec<Vec<u32>>,
    control: Vec<Vec<u32>>,
    faults: Vec<Vec<u32>>,
    data: Vec<[Half; 2]>,
}

/// A rank's data of one half.
struct Half {
    shared: Vec<AtomicU64>,
    parts: Vec<AtomicU64>,
    /// By row of all `m`, then column block.
    results: Vec<AtomicU64>,
}

impl Half {
    fn new(p: &TileProgram) -> Self {
        let (world, m_shard) = (p.problem.world().get(), p.problem.m_shard());
        let col_blocks = p.problem.n_local(p.rank).div_ceil(p.tile.n);
        let shared = world
            * p.slots_per_source
                .max(m_shard * p.k_steps())
                .max(p.problem.most_y_rows() * col_blocks);
        let cells = |count: u32| (0..count).map(|_| AtomicU64::new(0)).collect();
        Self {
            shared: cells(shared),
            parts: cells(p.split_k_slots),
            results: cells(p.problem.m() * col_blocks),
        }
    }

    fn write(&self, cell: u32, value: u64) {
        self.shared[cell as usize].store(value, Relaxed);
    }

    fn read(&self, cell: u32) -> u64 {
        self.shared[cell as usize].load(Relaxed)
    }
}

/// The number that a source writes in a call; no other writer has the same.
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

impl RankMemory {
    fn new(programs: &[TileProgram], first: Epoch) -> Self {
        let world = programs[0].problem.world();
        let size = programs[0].workspace();
        let words =
            |bytes: u64| vec![vec![0_u32; usize::try_from(bytes / 4).unwrap()]; world.index()];
        let half = || Half::new(&programs[0]);
        let mut machine = Self {
            world,
            size,
            pads: words(pad_bytes(size.signals)),
            control: words(control::bytes(size.counters)),
            faults: words(FAULT_BYTES),
            data: world.ranks().map(|_| [half(), half()]).collect(),
        };
        for (rank, words) in world.ranks().zip(machine.words()) {
            initialise(&words, rank, size, first);
        }
        machine
    }

    fn words(&mut self) -> Vec<SharedMemory> {
        let address = |block: &mut Vec<u32>| block.as_mut_ptr().expose_provenance() as u64;
        let pads: Vec<_> = self.pads.iter_mut().map(address).collect();
        let blocks = self.control.iter_mut().zip(&mut self.faults);
        // SAFETY: the blocks have the sizes that the layout asks for and are reached through the
        // views only. Their heap memory outlives the views, whose threads every test joins.
        blocks
            .map(|(c, f)| unsafe {
                SharedMemory::new(pads.clone(), address(c), address(f), self.size)
            })
            .collect()
    }
}

/// One worker's walk: items `worker`, `worker + workers`, ...
fn walk(
    p: &TileProgram,
    call: Protocol<'_, SharedMemory>,
    data: &[[Half; 2]],
    worker: usize,
    workers: usize,
) -> Result<Left, Poisoned> {
    for item in p.items.iter().skip(worker).step_by(workers) {
        let wait = |entry: &Await| {
            call.wait(entry.signal, Rank::new(entry.peer), patient(Duration::from_mins(1)))
        };
        p.awaits_of(item).iter().try_for_each(wait)?;
        check_rows(p, call, data, item);
        p.late_awaits_of(item).iter().try_for_each(wait)?;
        finish(p, call, data, item);
        call.complete(item, p.signalled_ranks(item))?;
    }
    call.leave(
        u32::try_from(workers).unwrap(),
        !p.transfers.is_empty(),
        patient(Duration::from_mins(1)),
    )
}

/// Checks that every step of every gathered row of `item` is its source's.
fn check_rows(
    p: &TileProgram,
    call: Protocol<'_, SharedMemory>,
    data: &[[Half; 2]],
    item: &WorkItem,
) {
    if item.a_source != RowSource::Gather {
        return;
    }
    let (m_shard, k_steps) = (p.problem.m_shard(), p.k_steps());
    for row in item.row..item.row + item.rows {
        let (owner, own_row) = p.problem.owner_of(row);
        let (place, source, row) = if p.rows.is_flattened() {
            (owner.get(), owner.get(), own_row)
        } else {
            (item.a_outer, item.out_outer, row)
        };
        for step in item.k_first..item.k_first + item.k_steps {
            let index = row * k_steps + step;
            let seen = data[p.rank.index()][call.half()].read(place * m_shard * k_steps + index);
            assert_eq!(
                seen,
                stamp(call.epoch(), source, index),
                "row {row}, step {step} in {item:?}"
            );
        }
    }
}

/// Checks the partial results of `item`, and stores its own.
fn finish(p: &TileProgram, call: Protocol<'_, SharedMemory>, data: &[[Half; 2]], item: &WorkItem) {
    let place =
        if p.rows.has_two_exchanges() { p.problem.m_shard() } else { p.problem.most_y_rows() };
    let (rank, epoch) = (p.rank.get(), call.epoch());
    let at = |rank: u32| &data[rank as usize][call.half()];
    let own = at(rank);
    for part in (0..item.parts).map(|i| item.part + i) {
        assert_eq!(own.parts[part as usize].load(Relaxed), stamp(epoch, rank, part), "{item:?}");
    }
    let col_blocks = p.problem.n_local(p.rank).div_ceil(p.tile.n);
    // Index of a row within its owner's rows.
    let scattered = |row: u32| row * col_blocks + item.col / p.tile.n;
    if matches!(item.sink, Sink::Send | Sink::Reduce) && item.partials > 0 {
        // In the order of sending: around the own node, then for the own shard around the others.
        let (per_node, nodes) =
            (p.nodes.per_node(), if item.sink == Sink::Reduce { p.nodes.count() } else { 1 });
        let steps = (1..per_node).chain((1..nodes).map(|distance| distance * per_node));
        let sources = steps.map(|step| p.nodes.before(p.rank, step));
        for (place, source) in (0..item.partials).zip(sources) {
            let slot = place * p.slots_per_source + item.partial_slot;
            assert_eq!(
                own.read(slot),
                stamp(epoch, source.get(), slot % p.slots_per_source),
                "{item:?}"
            );
        }
    }
    let result = |row: u32| (row * col_blocks + item.col / p.tile.n) as usize;
    let share = || {
        let first = p.problem.shard_rows(p.rank).start;
        for (peer, row) in p
            .signalled_ranks(item)
            .flat_map(|peer| (item.row..item.row + item.rows).map(move |row| (peer, row)))
        {
            at(peer.get()).results[result(first + row)].store(stamp(epoch, rank, row), Relaxed);
        }
    };
    match item.sink {
        Sink::Reduce if item.raise != NONE => share(),
        Sink::Copy => {
            for row in item.row..item.row + item.rows {
                let (owner, own_row) = p.problem.owner_of(row);
                assert_eq!(
                    own.results[result(row)].load(Relaxed),
                    stamp(epoch, owner.get(), own_row),
                    "row {row} in {item:?}"
                );
            }
        }
        Sink::Send => {
            at(item.dest).write(item.slot, stamp(epoch, rank, item.slot % p.slots_per_source));
        }
        Sink::Partial => {
            own.parts[item.part as usize].store(stamp(epoch, rank, item.part), Relaxed);
        }
        Sink::Scatter => {
            for owner in p.problem.world().ranks() {
                let owned = p.reduced_rows(owner);
                for row in (item.row..item.row + item.rows).filter(|row| owned.contains(row)) {
                    let index = scattered(row - owned.start);
                    at(owner.get())
                        .write(rank * place * col_blocks + index, stamp(epoch, rank, index));
                }
            }
        }
        Sink::ReduceRows => {
            for (source, row) in (0..item.partials)
                .flat_map(|source| (item.row..item.row + item.rows).map(move |row| (source, row)))
            {
                let index = scattered(row);
                assert_eq!(
                    own.read(source * place * col_blocks + index),
                    stamp(epoch, source, index),
                    "row {row} in {item:?}"
                );
            }
            if item.raise != NONE {
                share();
            }
        }
        _ => {}
    }
}

/// A rank's mover, for one call.
fn push(p: &TileProgram, call: Protocol<'_, SharedMemory>, data: &[[Half; 2]]) {
    let (m_shard, k_steps) = (p.problem.m_shard(), p.k_steps());
    for t in &p.transfers {
        for row in t.row..t.row + t.rows {
            for step in t.col / p.tile.k..(t.col + t.cols).div_ceil(p.tile.k) {
                let index = row * k_steps + step;
                let value = stamp(call.epoch(), p.rank.get(), index);
                data[t.dest as usize][call.half()]
                    .write(t.place * m_shard * k_steps + index, value);
            }
        }
        call.publish(Rank::new(t.dest), t.raise);
    }
    for Forward { from, awaits, to } in &p.forwards {
        call.wait(awaits.signal, Rank::new(awaits.peer), patient(Duration::from_mins(1))).unwrap();
        for row in to.row..to.row + to.rows {
            for step in to.col / p.tile.k..(to.col + to.cols).div_ceil(p.tile.k) {
                let index = row * k_steps + step;
                let value =
                    data[p.rank.index()][call.half()].read(from * m_shard * k_steps + index);
                data[to.dest as usize][call.half()]
                    .write(to.place * m_shard * k_steps + index, value);
            }
        }
        call.publish(Rank::new(to.dest), to.raise);
    }
    if !p.transfers.is_empty() {
        call.pushed();
    }
}

fn programs(op: OpKind, world: u32, schedule: Schedule) -> Vec<TileProgram> {
    programs_on(op, world, world, schedule)
}

fn programs_on(op: OpKind, nodes: u32, world: u32, schedule: Schedule) -> Vec<TileProgram> {
    let world = WorldSize::new(world).unwrap();
    let (m, n, k) = match op {
        // The first rank has 8 columns or elements of k more than the others.
        OpKind::AllGatherGemm => (37, 40 * world.index() + 8, 40),
        OpKind::GemmReduceScatter | OpKind::GemmAllReduce => {
            (37, 40 * world.index(), 40 * world.index() + 8)
        }
    };
    let problem = Problem::new(op, m * world.index(), n, k, DType::Bf16, world).unwrap();
    let nodes = Nodes::new(world, nodes).unwrap();
    world
        .ranks()
        .map(|rank| TileProgram::build_across(&problem, rank, &schedule, nodes).unwrap())
        .collect()
}

/// Runs `calls` calls on all ranks, with the wrap of the epoch in the middle.
fn run(programs: &[TileProgram], workers: usize, calls: u32) {
    let first = Epoch::new(0).before(calls / 2);
    let mut machine = RankMemory::new(programs, first);
    let words = machine.words();
    let (world, data) = (machine.world, &machine.data);
    thread::scope(|scope| {
        for (p, words) in programs.iter().zip(&words) {
            scope.spawn(move || {
                for number in 0..calls {
                    // Ranks drift apart.
                    if number % world.get() == p.rank.get() {
                        thread::sleep(Duration::from_micros(300));
                    }
                    let call = Protocol::open(words, p.rank);
                    thread::scope(|scope| {
                        scope.spawn(move || push(p, call, data));
                        let walk =
                            |worker| scope.spawn(move || walk(p, call, data, worker, workers));
                        let left: Vec<_> = (0..workers).map(walk).collect::<Vec<_>>();
                        let left: Vec<_> =
                            left.into_iter().map(|t| t.join().unwrap().unwrap()).collect();
                        assert_eq!(
                            left.iter().filter(|&&left| left == Left::Closed).count(),
                            1,
                            "{left:?}"
                        );
                    });
                }
            });
        }
    });
    for words in &words {
        let epoch = words.control(Control::Epoch).load_acquire();
        assert_eq!(epoch, first.get().wrapping_add(calls));
        assert_eq!(read_fault(words), None);
    }
}

/// 3 row blocks of a shard, 3 steps along `k`.
const TILE: TileShape = TileShape::new(16, 16, 16);

#[test]
fn calls_read_what_the_same_call_left_across_the_wrap_of_the_epoch() {
    for op in OpKind::ALL {
        for (world, chunk, raster_group) in [
            (1, Chunk::Shard, u32::MAX),
            (2, Chunk::Tiles(1), 1),
            (3, Chunk::Tiles(2), 2),
            (5, Chunk::Shard, u32::MAX),
        ] {
            run(
                &programs(op, world, Schedule { chunk, raster_group, ..Schedule::of(TILE) }),
                3,
                40,
            );
        }
    }
}

#[test]
fn calls_with_split_k_slices_and_flattened_rows_read_what_the_same_call_left() {
    for op in OpKind::ALL {
        for (world, k_slices, split_k, rows, group) in [
            (1, 2, 3, RowLayout::Flattened, 1),
            (2, 3, 1, RowLayout::Flattened, 1),
            (3, 2, 2, RowLayout::PerShard, 2),
            (3, 2, 2, RowLayout::Flattened, 1),
            (5, 3, 3, RowLayout::Flattened, 1),
        ] {
            let schedule = Schedule {
                chunk: Chunk::Tiles(2),
                k_slices,
                split_k,
                rows,
                group,
                ..Schedule::of(TILE)
            };
            run(&programs(op, world, schedule), 3, 40);
            if rows.is_flattened() && op == OpKind::GemmAllReduce {
                run(
                    &programs(
                        op,
                        world,
                        Schedule { rows: RowLayout::FlattenedTwoExchanges, ..schedule },
                    ),
                    3,
                    40,
                );
            }
        }
    }
}

#[test]
fn calls_across_nodes_read_what_the_same_call_left() {
    for op in [OpKind::AllGatherGemm, OpKind::GemmReduceScatter] {
        for (nodes, world, split_k, group) in [(2, 4, 1, 1), (2, 6, 2, 2), (3, 6, 1, 3)] {
            let schedule =
                Schedule { chunk: Chunk::Tiles(2), split_k, group, ..Schedule::of(TILE) };
            run(&programs_on(op, nodes, world, schedule), 2, 40);
        }
    }
}

#[test]
fn a_missing_peer_ends_the_call_with_a_record_that_names_it() {
    let schedule = Schedule { chunk: Chunk::Tiles(1), ..Schedule::of(TILE) };
    let programs = programs(OpKind::GemmReduceScatter, 2, schedule);
    let mut machine = RankMemory::new(&programs, Epoch::FIRST);
    let words = machine.words();
    let call = Protocol::open(&words[0], Rank::new(0));
    assert_eq!(call.wait(2, Rank::new(1), patient(Duration::from_millis(5))), Err(Poisoned));

    let record = read_fault(&words[0]).unwrap();
    assert_eq!(
        (record.code, record.wait, record.rank, record.peer, record.signal),
        (fault::TIMEOUT, fault::SIGNAL, 0, 1, 2)
    );
    assert_eq!((record.expected, record.seen, record.epoch, record.abort), (1, 0, 1, 0));

    // Other waits of the rank give up at once, nothing more is published, and the first record
    // stays.
    let never = |_| -> ControlFlow<()> { unreachable!("a poisoned wait does not pause") };
    assert_eq!(call.wait(0, Rank::new(1), never), Err(Poisoned));
    assert_eq!(call.complete(&programs[0].items[0], [Rank::new(1)]), Err(Poisoned));
    assert_eq!(call.leave(1, false, never), Err(Poisoned));
    assert_eq!(words[0].control(Control::Epoch).load_acquire(), 1, "the call is not closed");
    assert_eq!(read_fault(&words[0]), Some(record));
    assert_eq!(read_fault(&words[1]), None);
}

#[test]
fn the_abort_word_ends_a_wait_and_is_recorded() {
    let schedule = Schedule::of(TILE);
    let mut machine = RankMemory::new(&programs(OpKind::AllGatherGemm, 3, schedule), Epoch::FIRST);
    let words = machine.words();
    let call = Protocol::open(&words[2], Rank::new(2));
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
