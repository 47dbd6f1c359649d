//! Tests whose ranks are processes: the test starts its own binary again for each.

use flux_core::WorldSize;
use flux_transport::launch::{Launcher, exit_code};
use flux_transport::{Options, World};

/// Set for the processes that are ranks.
const IS_RANK: &str = "FLUX_GPU_TEST_IS_RANK";

/// How many devices the ranks of a test have, for their processes.
const DEVICES: &str = "FLUX_GPU_TEST_DEVICES";

/// Runs the test named `rank` in `ranks` processes, which share the `devices` if those are fewer.
pub(crate) fn run(ranks: u32, devices: u32, rank: &str) {
    let launcher = Launcher::new(WorldSize::new(ranks).unwrap(), std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", rank, "--nocapture", "--test-threads=1"])
        .env(IS_RANK, "1")
        .env(DEVICES, devices.to_string());
    let launcher = if ranks > devices { launcher.sharing_devices() } else { launcher };
    let status = launcher.run().unwrap();
    assert_eq!(exit_code(status), 0, "a rank failed; its words are above");
}

/// The world of this process, which a test has started.
pub(crate) fn world() -> World {
    assert!(std::env::var_os(IS_RANK).is_some(), "a process of a test");
    World::from_env().unwrap()
}

/// The options of a rank on the device that it has, or shares with its neighbours.
pub(crate) fn placed(world: &World, options: Options) -> Options {
    let (devices, ranks) =
        (std::env::var(DEVICES).unwrap().parse::<u32>().unwrap(), world.size().get());
    let device = world.rank().get() * devices.min(ranks) / ranks;
    Options { device: Some(device), shared_device: ranks > devices, ..options }
}
