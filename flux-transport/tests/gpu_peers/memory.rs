//! Symmetric memory: every rank reaches every other's, and growth keeps the epoch.

use crate::gpu_support::memory::{SIZE, assert_fresh, exchange_blocks, options};
use crate::gpu_support::{devices, linked_devices, with_ranks};
use flux_core::layout::WorkspaceSize;
use flux_transport::{Communicator, ConnectError, Options, Select, World};

#[test]
fn every_rank_reads_what_every_other_wrote() {
    let Some(world) = linked_devices("gpu_peers", 2) else { return };
    for (world, epoch) in [(world, 1), (2, 0)] {
        with_ranks(world, options(epoch), |this| {
            assert_fresh(&this, epoch);
            exchange_blocks(&this);
            assert_fresh(&this, epoch);
            this.comm.status().unwrap();
            // No rank leaves while another still looks at the workspace by a call.
            this.comm.barrier().unwrap();
        });
    }
}

#[test]
fn ranks_that_share_a_device_reach_each_other() {
    let Some(_) = devices("gpu_peers", 1) else { return };
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
    let Some(_) = devices("gpu_peers", 1) else { return };
    let worlds = World::local(2).unwrap();
    std::thread::scope(|scope| {
        for world in worlds {
            scope.spawn(move || {
                let options =
                    Options { select: Select::NvLink, device: Some(0), ..Options::default() };
                let error = Communicator::connect_blocking(&world, options).unwrap_err();
                assert!(
                    matches!(error, ConnectError::Unusable { select: Select::NvLink, .. }),
                    "{error}"
                );
                assert!(
                    error.to_string().contains("give each rank a device of its own"),
                    "{error}"
                );
            });
        }
    });
}

#[test]
fn growth_keeps_the_epoch_and_maps_new_memory_everywhere() {
    let Some(count) = linked_devices("gpu_peers", 1) else { return };
    let world = count.min(2);
    with_ranks(world, options(u32::MAX), |this| {
        let old = this.view();
        // Two calls pass; the third, with the number 1, is next.
        for epoch in [u32::MAX, 0] {
            this.comm.begin(this.stream()).unwrap().finish().unwrap();
            this.close_call(epoch);
        }
        this.comm.barrier().unwrap();
        let more =
            WorkspaceSize { half_bytes: 3 * SIZE.half_bytes + 5, signals: 10, counters: 70_000 };
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
    let Some(count) = linked_devices("gpu_peers", 1) else { return };
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
