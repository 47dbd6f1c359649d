//! Communicators that come and go leave nothing behind. A binary of its own: other tests would change what is measured.
#![allow(clippy::unwrap_used, reason = "a test")]

mod gpu_support;

use gpu_support::memory::options;
use gpu_support::{linked_devices, with_ranks};

#[test]
fn two_hundred_communicators_leave_the_memory_as_it_was() {
    let Some(count) = linked_devices("gpu_leaks", 1) else { return };
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
    assert!(descriptors() <= descriptors_before, "{} descriptors, {descriptors_before} before", descriptors());
}
