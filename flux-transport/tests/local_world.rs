//! Worlds of threads: what arrives where, in which order, and how the workspace grows.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod common;

use common::{Words, each_rank, options};
use flux_core::layout::{WorkspaceSize, control};
use flux_core::program::Transfer;
use flux_core::signal::Epoch;
use flux_core::{DType, Rank};
use flux_transport::{
    CollectiveKind, Communicator, ConnectError, Device, Job, LibraryCollective, MessageRounds,
    Options, RowTransfers, Select, Source, Stream, TransportError, TransportKind, World,
};

const ROWS: u32 = 6;
const ROW: u64 = 48;
const PLACE: u64 = ROWS as u64 * ROW;

fn size(world: u32) -> WorkspaceSize {
    WorkspaceSize {
        half_bytes: u64::from(world - 1) * PLACE,
        signals: (world - 1) * 3,
        counters: 5,
    }
}

/// What `rank` moves in a call: three chunks of two rows to every peer, nearest before it first.
fn transfers(comm: &Communicator) -> Vec<Transfer> {
    let (rank, world) = (comm.rank(), comm.world_size());
    let mut all = Vec::new();
    for step in 1..world.get() {
        let dest = rank.before(step, world);
        let place = rank.place_at(dest).unwrap();
        all.extend((0..3).map(|chunk| Transfer {
            dest: dest.get(),
            place,
            row: 2 * chunk,
            rows: 2,
            col: 0,
            cols: 48,
            raise: place * 3 + chunk,
            step,
        }));
    }
    all
}

fn push<'a>(x: &[u8], row_stride: u64, transfers: &'a [Transfer]) -> Job<'a> {
    let x = x.as_ptr().expose_provenance() as u64;
    Job::Rows(RowTransfers {
        x,
        row_stride,
        row_bytes: ROW,
        element_bytes: 1,
        rows: 1,
        place_bytes: PLACE,
        full_places: u32::MAX,
        transfers,
        forwards: &[],
    })
}

fn shard(rank: u32, call: u32, stride: usize) -> Vec<u8> {
    let row = |i: u32| {
        (0..stride).map(move |b| {
            u8::try_from((rank * 89 + call * 31 + i * 7 + u32::try_from(b).unwrap()) % 251).unwrap()
        })
    };
    (0..ROWS).flat_map(row).collect()
}

/// One call that moves the shard, checks what came, and closes as an executor does.
fn call(comm: &Communicator, number: u32, stride: usize) {
    let (rank, world) = (comm.rank(), comm.world_size());
    let x = shard(rank.get(), number, stride);
    let mut call = comm.begin(Stream::Host).unwrap();
    let words = Words::new(call.memory(), rank);
    let protocol = words.open();
    // SAFETY: `x` lives and is not written until `finish` has returned.
    let started = unsafe { call.start(&push(&x, stride as u64, &transfers(comm))) }.unwrap();
    assert_eq!(started.pushes, world.get() > 1);
    for peer in world.ranks().filter(|&peer| peer != rank) {
        let expected = shard(peer.get(), number, stride);
        let place = peer.place_at(rank).unwrap();
        for chunk in 0..3 {
            words.wait(&protocol, place * 3 + chunk, peer).unwrap();
            for row in (2 * chunk)..(2 * chunk + 2) {
                let offset = u64::from(place) * PLACE + u64::from(row) * ROW;
                let from = row as usize * stride;
                assert_eq!(
                    words.read(protocol.half(), offset, ROW),
                    expected[from..][..usize::try_from(ROW).unwrap()]
                );
            }
        }
    }
    words.leave(protocol, started.pushes).unwrap();
    call.finish().unwrap();
}

#[test]
fn shards_arrive_with_their_flags_for_every_world_size() {
    for n in 1..=8 {
        each_rank(n, |world| {
            let comm = Communicator::connect_blocking(&world, options(size(n))).unwrap();
            assert_eq!(
                (comm.transport(), comm.device(), comm.rank()),
                (TransportKind::Host, Device::Host, world.rank())
            );
            for number in 0..50 {
                call(&comm, number, if number % 2 == 0 { 48 } else { 80 });
            }
            comm.status().unwrap();
        });
    }
}

#[test]
fn slices_of_rows_arrive_at_every_rank_the_own_one_too() {
    const COLS: u32 = 20;
    let size = WorkspaceSize { half_bytes: 3 * PLACE, signals: 6, counters: 0 };
    each_rank(3, |world| {
        let comm = Communicator::connect_blocking(&world, options(size)).unwrap();
        let (rank, world) = (comm.rank(), comm.world_size());
        let x = shard(rank.get(), 0, 80);
        // each half of the row, with a signal of its own, into the rank's place everywhere
        let halves = [(0, COLS), (COLS, ROW as u32 - COLS)];
        let to = |dest: Rank| (0..).zip(halves).map(move |(slice, cut)| (dest, slice, cut));
        let transfer = |(dest, slice, (col, cols)): (Rank, u32, (u32, u32))| {
            let raise = 2 * rank.get() + slice;
            Transfer {
                dest: dest.get(),
                place: rank.get(),
                row: 1,
                rows: ROWS - 1,
                col,
                cols,
                raise,
                step: 0,
            }
        };
        let list: Vec<Transfer> = world.ranks().flat_map(to).map(transfer).collect();
        let mut call = comm.begin(Stream::Host).unwrap();
        let words = Words::new(call.memory(), rank);
        let protocol = words.open();
        // SAFETY: `x` lives and is not written until `finish` has returned.
        let started = unsafe { call.start(&push(&x, 80, &list)) }.unwrap();
        for source in world.ranks() {
            let expected = shard(source.get(), 0, 80);
            for (slice, (col, cols)) in (0..).zip(halves) {
                words.wait(&protocol, 2 * source.get() + slice, source).unwrap();
                for row in 1..ROWS {
                    let offset =
                        u64::from(source.get()) * PLACE + u64::from(row) * ROW + u64::from(col);
                    let sent = &expected[row as usize * 80 + col as usize..][..cols as usize];
                    assert_eq!(words.read(protocol.half(), offset, u64::from(cols)), sent);
                }
            }
        }
        words.leave(protocol, started.pushes).unwrap();
        call.finish().unwrap();
    });
}

#[test]
fn epochs_wrap_around() {
    each_rank(3, |world| {
        let first_epoch = Epoch::new(u32::MAX - 5);
        let comm =
            Communicator::connect_blocking(&world, Options { first_epoch, ..options(size(3)) })
                .unwrap();
        (0..12).for_each(|number| call(&comm, number, 48));
    });
}

#[test]
fn the_workspace_grows_and_the_epoch_goes_on() {
    each_rank(4, |world| {
        let comm =
            Communicator::connect_blocking(&world, options(WorkspaceSize::default())).unwrap();
        assert_eq!(comm.workspace_size(), WorkspaceSize::default());
        comm.reserve(size(4)).unwrap();
        (0..3).for_each(|number| call(&comm, number, 48));
        let larger = WorkspaceSize { half_bytes: 5 << 20, signals: 4, counters: 70 };
        comm.reserve(larger).unwrap();
        assert_eq!(comm.workspace_size(), larger.max(size(4)));
        let call_now = comm.begin(Stream::Host).unwrap();
        let words = Words::new(call_now.memory(), comm.rank());
        assert_eq!(words.open().epoch(), Epoch::FIRST.next().next().next());
        drop(call_now);
        (3..9).for_each(|number| call(&comm, number, 48));
        let before = comm.begin(Stream::Host).unwrap().memory().clone();
        comm.reserve(size(2)).unwrap();
        assert_eq!(
            *comm.begin(Stream::Host).unwrap().memory(),
            before,
            "what is held already is kept"
        );
        comm.barrier().unwrap();
    });
}

#[test]
fn a_disagreeing_reserve_fails_on_every_rank_and_changes_nothing() {
    each_rank(3, |world| {
        let comm = Communicator::connect_blocking(&world, options(size(3))).unwrap();
        let wanted = WorkspaceSize {
            half_bytes: if world.rank().get() == 1 { 1 << 20 } else { 2 << 20 },
            ..size(3)
        };
        match comm.reserve(wanted).unwrap_err() {
            TransportError::Disagreement { values, .. } => {
                assert!(values.contains("rank 1: ") && values.contains("1048576"), "{values}");
            }
            other => panic!("{other}"),
        }
        assert_eq!(comm.workspace_size(), size(3));
        call(&comm, 0, 48);
    });
}

#[test]
fn ranks_at_different_calls_do_not_grow_their_workspace() {
    each_rank(2, |world| {
        let comm =
            Communicator::connect_blocking(&world, options(WorkspaceSize::default())).unwrap();
        if comm.rank().get() == 1 {
            let call = comm.begin(Stream::Host).unwrap();
            let words = Words::new(call.memory(), comm.rank());
            words.leave(words.open(), false).unwrap();
            call.finish().unwrap();
        }
        match comm.reserve(size(2)).unwrap_err() {
            TransportError::Disagreement { what, values } => {
                assert_eq!(what, "number of the next call");
                let [first, second] = [Epoch::FIRST, Epoch::FIRST.next()];
                assert_eq!(values, format!("{first} on rank 0, {second} on rank 1"));
            }
            other => panic!("{other}"),
        }
        assert_eq!(comm.workspace_size(), WorkspaceSize::default());
        comm.barrier().unwrap();
    });
}

#[test]
fn memory_that_cannot_be_had_is_an_error_on_every_rank() {
    each_rank(2, |world| {
        let comm = Communicator::connect_blocking(&world, options(size(2))).unwrap();
        for half_bytes in [u64::MAX, 1 << 62] {
            let error =
                comm.reserve(WorkspaceSize { half_bytes, signals: 1, counters: 1 }).unwrap_err();
            assert!(matches!(error, TransportError::OutOfMemory { .. }), "{error}");
        }
        call(&comm, 0, 48);
    });
}

#[test]
fn a_large_workspace_takes_memory_only_where_it_is_touched() {
    let pages = || -> u64 {
        let text = std::fs::read_to_string("/proc/self/statm").unwrap();
        text.split(' ').nth(1).unwrap().parse().unwrap()
    };
    let before = pages();
    each_rank(2, |world| {
        let large = WorkspaceSize { half_bytes: 256 << 20, signals: 8, counters: 8 };
        let comm = Communicator::connect_blocking(&world, options(large)).unwrap();
        assert_eq!(comm.workspace_size(), large);
        comm.barrier().unwrap();
        // 1 GiB in all, in 4 KiB pages; other tests take a little
        assert!(pages() - before < (1 << 18) / 4, "{before} pages before, {} now", pages());
        comm.barrier().unwrap();
    });
}

#[test]
fn transfers_that_lead_outside_the_workspace_are_refused_before_anything_moves() {
    each_rank(2, |world| {
        let comm = Communicator::connect_blocking(&world, options(size(2))).unwrap();
        let good = transfers(&comm)[0];
        let bad = [
            (Transfer { dest: 2, ..good }, "dest = 2, limit 2"),
            (Transfer { col: 1, ..good }, "end of the columns = 49, limit 48"),
            (Transfer { raise: 3, ..good }, "raise = 3, limit 3"),
            (Transfer { row: 5, ..good }, "end of the rows = 336, limit 288"),
            (Transfer { place: 1, ..good }, "end of the place = 576, limit 288"),
        ];
        let x = shard(0, 0, 48);
        for (transfer, text) in bad {
            let mut call = comm.begin(Stream::Host).unwrap();
            // SAFETY: `x` outlives the call.
            let error = unsafe { call.start(&push(&x, 48, &[good, transfer])) }.unwrap_err();
            assert!(error.to_string().contains(text), "{error}");
        }
        comm.status().unwrap();
        call(&comm, 0, 48);
    });
}

#[test]
fn a_job_that_the_transport_does_not_carry_is_refused_and_the_call_taken_back() {
    each_rank(2, |world| {
        let comm = Communicator::connect_blocking(&world, options(size(2))).unwrap();
        let collective = LibraryCollective {
            kind: CollectiveKind::AllReduce,
            shard: 0,
            row_stride: 0,
            row_bytes: 0,
            rows: 0,
            offset: 0,
            dtype: DType::Bf16,
            op: 1,
        };
        let source = Source::Stored { of_all: false };
        let messages = MessageRounds { source, place_bytes: 0, rounds: &[], peers: 1, op: 1 };
        for (job, why) in [
            (Job::Scattered { op: 1 }, "no memory of the host to scatter rows to"),
            (Job::Messages(messages), "carries no messages"),
            (Job::Collective(collective), "no collectives of a library"),
        ] {
            let mut call = comm.begin(Stream::Host).unwrap();
            // SAFETY: it is refused.
            let refused = unsafe { call.start(&job) }.unwrap_err();
            assert!(matches!(refused, TransportError::MoverUnusable { .. }), "{refused}");
            assert!(refused.to_string().contains(why), "{refused}");
        }
        assert_eq!(comm.status(), Ok(()));
        call(&comm, 0, 48);
    });
}

#[test]
fn options_that_differ_are_an_error_on_every_rank() {
    each_rank(3, |world| {
        let reserve = WorkspaceSize { signals: world.rank().get() / 2, ..WorkspaceSize::default() };
        let error = Communicator::connect_blocking(&world, options(reserve)).unwrap_err();
        assert!(matches!(error, ConnectError::Disagreement { what: "options", .. }), "{error}");
    });
}

#[test]
fn connecting_is_a_future_for_any_runtime() {
    each_rank(3, |world| {
        let comm = pollster::block_on(Communicator::connect(&world, Select::Host)).unwrap();
        let all = comm.exchange(&[u8::try_from(comm.rank().get()).unwrap()]).unwrap();
        assert_eq!(all, [[0], [1], [2]]);
        assert!(comm.explain().contains("host"));
    });
}

#[test]
fn a_world_of_one_needs_nobody() {
    let comm = Communicator::connect_blocking(&World::single(), options(size(2))).unwrap();
    let mut call = comm.begin(Stream::Host).unwrap();
    // SAFETY: there is nothing to move.
    let started = unsafe { call.start(&push(&[], 0, &[])) }.unwrap();
    assert!(!started.pushes && !call.capturing());
    let words = Words::new(call.memory(), comm.rank());
    words.leave(words.open(), false).unwrap();
    call.finish().unwrap();
    assert_eq!(comm.begin(Stream::Host).unwrap().memory().control % control::COUNTERS.min(128), 0);
}

#[test]
fn calls_of_several_threads_come_one_after_another() {
    each_rank(2, |world| {
        let comm = Communicator::connect_blocking(&world, options(size(2))).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let comm = comm.clone();
                // all calls carry the same data, so it does not matter which thread's calls meet
                scope.spawn(move || (0..50).for_each(|_| call(&comm, 7, 48)));
            }
        });
        assert_eq!(comm.status(), Ok(()));
    });
}
