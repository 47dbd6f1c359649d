//! Ranks as processes, one device each: memory travels as file descriptors. The test starts its own binary again for each rank.
#![allow(clippy::unwrap_used, reason = "a test")]

mod gpu_support;

use flux_core::WorldSize;
use flux_core::layout::WorkspaceSize;
use flux_transport::launch::{Launcher, exit_code};
use flux_transport::{Options, Select, World};
use gpu_support::{RankUnderTest, linked_devices, memory, push};

/// Set for the processes that are ranks.
const IS_RANK: &str = "FLUX_GPU_TEST_IS_RANK";

#[test]
fn processes_share_memory_push_and_grow() {
    let Some(devices) = linked_devices("gpu_processes", 2) else { return };
    if std::env::var_os(IS_RANK).is_some() {
        return;
    }
    let ranks = WorldSize::new(devices).unwrap();
    let status = Launcher::new(ranks, std::env::current_exe().unwrap())
        .args(["--exact", "one_rank", "--nocapture", "--test-threads=1"])
        .env(IS_RANK, "1")
        .run()
        .unwrap();
    assert_eq!(exit_code(status), 0, "a rank failed; its words are above");
}

#[test]
fn one_rank() {
    if std::env::var_os(IS_RANK).is_none() {
        return;
    }
    let world = World::from_env().unwrap();
    let ranks = world.size().get();
    let first = u32::MAX - 2;
    let reserve = push::options(ranks, first).reserve.max(memory::SIZE);
    let options = Options { select: Select::NvLink, reserve, ..push::options(ranks, first) };
    let this = RankUnderTest::connect(&world, options);
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
