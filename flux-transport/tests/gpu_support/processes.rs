//! Tests whose ranks are processes: the test starts its own binary again for each.

use flux_core::WorldSize;
use flux_transport::World;
use flux_transport::launch::{Launcher, exit_code};

/// Set for the processes that are ranks.
const IS_RANK: &str = "FLUX_GPU_TEST_IS_RANK";

/// Runs the test named `rank` in a process for each of so many ranks.
pub(crate) fn run(ranks: u32, rank: &str) {
    let status = Launcher::new(WorldSize::new(ranks).unwrap(), std::env::current_exe().unwrap())
        .args(["--exact", rank, "--nocapture", "--test-threads=1"])
        .env(IS_RANK, "1")
        .run()
        .unwrap();
    assert_eq!(exit_code(status), 0, "a rank failed; its words are above");
}

/// The world of this process, if it is a rank.
pub(crate) fn world() -> Option<World> {
    std::env::var_os(IS_RANK)?;
    Some(World::from_env().unwrap())
}
