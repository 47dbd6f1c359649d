//! Symmetric memory: every rank reaches every other's, growth keeps the epoch, and nothing is left behind.

mod gpu_support;

use flux_core::layout::{WorkspaceSize, consumed_offset, signal_offset};
use flux_core::signal::Epoch;
use flux_transport::{Communicator, ConnectError, Options, Select, World};
use gpu_support::{Buffer, RankUnderTest, copy, devices, linked_devices, pattern, read_words, with_ranks};

const WORDS: usize = 1 << 10;
const SIZE: WorkspaceSize = WorkspaceSize { half_bytes: 16 * 4 * WORDS as u64, signals: 40, counters: 8 };

fn options(first_epoch: u32) -> Options {
    Options { reserve: SIZE, first_epoch: Epoch::new(first_epoch), ..Options::default() }
}

/// Every rank writes a block of its own into both halves of every rank's data region, and reads what the others wrote into its own.
fn exchange_blocks(this: &RankUnderTest) {
    let (rank, world, view) = (this.rank(), this.world(), this.view());
    let block = |from: u32| u64::from(from) * 4 * WORDS as u64;
    for half in [0, view.size.half_stride()] {
        for to in 0..world {
            let words = Buffer::from_words(&this.device, &pattern(rank * 16 + to + 1, WORDS));
            copy(&this.device, view.data[to as usize] + half + block(rank), words.address, 4 * WORDS);
        }
    }
    this.comm.barrier().unwrap();
    for half in [0, view.size.half_stride()] {
        for from in 0..world {
            let seen = read_words(&this.device, view.data[rank as usize] + half + block(from), WORDS);
            assert_eq!(seen, pattern(from * 16 + rank + 1, WORDS), "rank {rank} reads what rank {from} wrote");
        }
    }
    this.comm.barrier().unwrap();
}

/// All words of the pad and the control block are as before call `epoch`.
fn assert_fresh(this: &RankUnderTest, epoch: u32) {
    let view = this.view();
    let before = epoch.wrapping_sub(1);
    let pad = view.pads[this.rank() as usize];
    for offset in (0..16).map(consumed_offset).chain((0..view.size.signals).map(signal_offset)) {
        assert_eq!(read_words(&this.device, pad + offset, 1), [before]);
    }
    assert_eq!(this.control(), [epoch, 0, 0, before]);
}

#[test]
fn every_rank_reads_what_every_other_wrote() {
    let Some(world) = linked_devices("gpu_memory", 2) else { return };
    for (world, epoch) in [(world, 1), (2, 0)] {
        with_ranks(world, options(epoch), |this| {
            assert_fresh(&this, epoch);
            exchange_blocks(&this);
            assert_fresh(&this, epoch);
            this.comm.status().unwrap();
        });
    }
}

#[test]
fn ranks_that_share_a_device_reach_each_other() {
    let Some(_) = devices("gpu_memory", 1) else { return };
    for world in [1, 2, 4] {
        let shared = Options { shared_device: true, device: Some(0), ..options(9) };
        with_ranks(world, shared, |this| {
            assert_fresh(&this, 9);
            exchange_blocks(&this);
        });
    }
}

#[test]
fn two_ranks_on_one_device_are_refused_unless_asked_for() {
    let Some(_) = devices("gpu_memory", 1) else { return };
    let worlds = World::local(2).unwrap();
    std::thread::scope(|scope| {
        for world in worlds {
            scope.spawn(move || {
                let options = Options { select: Select::NvLink, device: Some(0), ..Options::default() };
                let error = Communicator::connect_blocking(&world, options).unwrap_err();
                assert!(matches!(error, ConnectError::Unusable { select: Select::NvLink, .. }), "{error}");
                assert!(error.to_string().contains("give each rank a device of its own"), "{error}");
            });
        }
    });
}

#[test]
fn growth_keeps_the_epoch_and_maps_new_memory_everywhere() {
    let Some(count) = devices("gpu_memory", 1) else { return };
    let world = count.min(2);
    with_ranks(world, options(u32::MAX), |this| {
        let old = this.view();
        // Two calls pass; the third, with the number 1, is next.
        for epoch in [u32::MAX, 0] {
            this.comm.begin(this.stream()).unwrap().finish().unwrap();
            this.close_call(epoch);
        }
        this.comm.barrier().unwrap();
        let more = WorkspaceSize { half_bytes: 3 * SIZE.half_bytes + 5, signals: 10, counters: 70_000 };
        this.comm.reserve(more).unwrap();
        let view = this.view();
        assert_eq!(view.size, SIZE.max(more));
        assert_eq!(view.fault, old.fault);
        assert_eq!(view.deadline_ns, old.deadline_ns);
        assert_fresh(&this, 1);
        exchange_blocks(&this);
        // Nothing to do a second time.
        this.comm.reserve(more).unwrap();
        assert_eq!(this.view(), view);
    });
}

#[test]
fn a_growth_beyond_the_device_leaves_the_workspace_as_it_was() {
    let Some(count) = devices("gpu_memory", 1) else { return };
    let world = count.min(2);
    with_ranks(world, options(3), |this| {
        let view = this.view();
        let error = this.comm.reserve(WorkspaceSize { half_bytes: 1 << 42, ..SIZE }).unwrap_err();
        assert!(!error.to_string().is_empty());
        assert_eq!(this.view(), view);
        assert_fresh(&this, 3);
        exchange_blocks(&this);
    });
}

#[test]
fn two_hundred_communicators_leave_the_memory_as_it_was() {
    let Some(count) = devices("gpu_memory", 1) else { return };
    let world = count.min(2);
    let cycle = || {
        with_ranks(world, options(1), |this| {
            this.comm.barrier().unwrap();
            this.device.clone()
        })
    };
    // The first rounds make contexts and whatever the driver keeps; the devices that they return keep the contexts.
    let held = cycle();
    drop(cycle());
    let free = || held.iter().map(|device| device.memory().unwrap().0).collect::<Vec<_>>();
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let (free_before, descriptors_before) = (free(), descriptors());
    for _ in 0..200 {
        drop(cycle());
    }
    // The driver takes device memory in blocks of 2 MiB; a leak of one allocation a cycle would be 800 MiB and more.
    for (before, after) in free_before.iter().zip(free()) {
        assert!(after + (8 << 20) >= *before, "{before} bytes free before, {after} after");
    }
    // Other tests of this process may be starting threads.
    assert!(descriptors() <= descriptors_before + 16, "{} descriptors, {descriptors_before} before", descriptors());
}
