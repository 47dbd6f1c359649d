//! A rank that drops a communicator which works while its peers keep theirs. Ranks are processes: among threads NCCL leaves the work to the last. The test starts
//! its own binary again for each rank.

use crate::gpu_support::{devices, skip};
use flux_core::WorldSize;
use flux_transport::launch::{Launcher, exit_code};
use flux_transport::{Communicator, Select, World, nccl};
use std::time::{Duration, Instant};

/// Set for the processes that are ranks.
const IS_RANK: &str = "FLUX_GPU_TEST_IS_RANK";
/// For how long the peers keep theirs: longer than anything that a rank waits for when it leaves.
const KEPT: Duration = Duration::from_secs(20);

#[test]
fn a_rank_leaves_while_its_peers_stay() {
    let Some(_) = devices("gpu_nccl", 2) else { return };
    if let Err(why) = nccl::available() {
        return skip("gpu_nccl", &why);
    }
    let status = Launcher::new(WorldSize::new(2).unwrap(), std::env::current_exe().unwrap())
        .args(["--exact", "leave::one_rank", "--nocapture", "--test-threads=1"])
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
    let connect = || Communicator::connect_blocking(&world, Select::Nccl.into()).unwrap();
    // The first is kept by rank 1; the second is dropped by both, beside what NCCL still does of the first.
    let (first, second) = (connect(), connect());
    if world.rank().get() == 0 {
        let began = Instant::now();
        drop(first);
        assert!(began.elapsed() < KEPT / 4, "{:?}", began.elapsed());
        drop(second);
        assert!(began.elapsed() < KEPT / 2, "{:?}", began.elapsed());
    } else {
        drop(second);
        std::thread::sleep(KEPT);
        first.status().unwrap();
    }
}
