//! Ranks as processes, one device each, or four on one: memory travels as file descriptors.
#![allow(clippy::unwrap_used, reason = "a test")]

mod gpu_support;

use flux_core::layout::WorkspaceSize;
use flux_transport::{Options, Select};
use gpu_support::{RankUnderTest, linked_devices, memory, processes, push};

#[test]
fn processes_share_memory_push_and_grow() {
    let Some(devices) = linked_devices("gpu_processes", 1) else { return };
    processes::run(if devices == 1 { 4 } else { devices }, devices, "one_rank");
}

#[test]
#[ignore = "run by the tests that start it, in processes of their own"]
fn one_rank() {
    let world = processes::world();
    let ranks = world.size().get();
    let first = u32::MAX - 2;
    let reserve = push::options(ranks, first).reserve.max(memory::SIZE);
    let options = Options { select: Select::NvLink, reserve, ..push::options(ranks, first) };
    let this = RankUnderTest::connect(&world, processes::placed(&world, options));
    memory::assert_fresh(&this, first);
    memory::exchange_blocks(&this);
    push::calls_arrive(&this, first);
    let epoch = first.wrapping_add(push::CALLS);
    this.comm.reserve(WorkspaceSize { half_bytes: 2 * reserve.half_bytes, ..reserve }).unwrap();
    memory::assert_fresh(&this, epoch);
    memory::exchange_blocks(&this);
    push::calls_arrive(&this, epoch);
    this.comm.status().unwrap();
}
