//! Peers whose writes vanish: every rank finds out, none takes nvlink, and all can go through the host. Ranks are processes, which the environment tells what to find; the test
//! starts its own binary again for each.
#![allow(clippy::unwrap_used, reason = "a test")]

mod gpu_support;

use flux_core::WorldSize;
use flux_transport::launch::{Launcher, exit_code};
use flux_transport::{Communicator, ConnectError, Select, TransportKind, World};
use gpu_support::linked_devices;

/// Set for the processes that are ranks.
const RANK: &str = "FLUX_GPU_TEST_VETO";

#[test]
fn no_rank_takes_nvlink_where_writes_vanish() {
    let Some(devices) = linked_devices("gpu_veto", 2) else { return };
    let status = Launcher::new(WorldSize::new(devices).unwrap(), std::env::current_exe().unwrap())
        .args(["--exact", "one_rank", "--nocapture", "--test-threads=1"])
        .env(RANK, "1")
        .env("FLUX_VETO_PEER", "1")
        .run()
        .unwrap();
    assert_eq!(exit_code(status), 0, "a rank failed; its words are above");
}

#[test]
fn one_rank() {
    if std::env::var_os(RANK).is_none() {
        return;
    }
    let world = World::from_env().unwrap();
    let connect = |select: Select| Communicator::connect_blocking(&world, select.into());
    for select in [Select::Auto, Select::NvLink] {
        let refused = connect(select);
        let told = matches!(refused, Err(ConnectError::Unusable { select: Select::NvLink, .. } | ConnectError::PeerFailed { .. }));
        assert!(told, "{select}: {refused:?}");
    }
    let staged = connect(Select::Pcie).unwrap();
    assert_eq!(staged.transport(), TransportKind::Pcie, "{}", staged.explain());
}
