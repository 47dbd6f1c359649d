//! Pushes by copy engines: rows and signals arrive, in the right half, in the order of calls.

use crate::gpu_support::push::{ROW, calls_arrive, options, push, shard, transfers};
use crate::gpu_support::{Buffer, devices, linked_devices, with_ranks};
use flux_core::program::Transfer;
use flux_transport::{Options, TransportError};

#[test]
fn rows_and_signals_arrive_in_the_half_of_each_call() {
    let Some(world) = linked_devices("gpu_peers", 2) else { return };
    for world in [2, world] {
        let first = u32::MAX - 2;
        with_ranks(world, options(world, first), |this| calls_arrive(&this, first));
    }
}

#[test]
fn ranks_on_one_device_push_to_each_other() {
    let Some(_) = devices("gpu_peers", 1) else { return };
    for world in [2, 3] {
        let shared = Options { shared_device: true, device: Some(0), ..options(world, 1) };
        with_ranks(world, shared, |this| calls_arrive(&this, 1));
    }
}

#[test]
fn a_bad_transfer_is_refused_before_anything_moves() {
    let Some(_) = devices("gpu_peers", 1) else { return };
    let shared = Options { shared_device: true, device: Some(0), ..options(2, 1) };
    with_ranks(2, shared, |this| {
        let mut list = transfers(this.rank(), 2);
        list.push(Transfer { raise: 1000, ..list[0] });
        let x = Buffer::from_words(&this.device, &shard(this.rank(), 1, ROW));
        let mut call = this.comm.begin(this.stream()).unwrap();
        // SAFETY: nothing is enqueued.
        let error = unsafe { call.start(&push(&x, ROW, &list)) }.unwrap_err();
        assert!(matches!(error, TransportError::BadTransfer { index: 2, .. }), "{error}");
        drop(call);
        this.comm.barrier().unwrap();
        assert_eq!(this.control(), [1, 0, 0, 0]);
        this.comm.status().unwrap();
    });
}
