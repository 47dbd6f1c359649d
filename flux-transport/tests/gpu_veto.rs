//! Peers whose writes vanish: every rank finds out, and all go through the host. Ranks are processes, which the environment tells what to find; the test
//! starts its own binary again for each.
#![allow(clippy::unwrap_used, reason = "a test")]

mod gpu_support;

use flux_core::WorldSize;
use flux_transport::launch::{Launcher, exit_code};
use flux_transport::{Communicator, ConnectError, Select, TransportKind, World};
use gpu_support::linked_devices;

/// Set for the processes that are ranks, to what they are to be told.
const CASE: &str = "FLUX_GPU_TEST_VETO";

fn run(test: &str, variable: &str) {
    let Some(devices) = linked_devices(test, 2) else { return };
    let status = Launcher::new(WorldSize::new(devices).unwrap(), std::env::current_exe().unwrap())
        .args(["--exact", "one_rank", "--nocapture", "--test-threads=1"])
        .env(CASE, variable)
        .env(variable, "1")
        .run()
        .unwrap();
    assert_eq!(exit_code(status), 0, "a rank failed; its words are above");
}

#[test]
fn all_ranks_choose_the_host_where_writes_vanish() {
    run("gpu_veto", "FLUX_VETO_PEER");
}

#[test]
fn all_ranks_leave_peers_memory_alone_where_they_are_told_to() {
    run("gpu_veto", "NCCL_P2P_DISABLE");
}

#[test]
fn one_rank() {
    let Some(case) = std::env::var_os(CASE) else { return };
    let world = World::from_env().unwrap();
    let comm = Communicator::connect_blocking(&world, Select::Auto.into()).unwrap();
    assert_eq!(comm.transport(), TransportKind::Pcie, "{}", comm.explain());
    let (words, vetoed) = (comm.explain(), case == "FLUX_VETO_PEER");
    let why = if vetoed { "does not work" } else { "NCCL_P2P_DISABLE is set" };
    assert!(words.starts_with("pcie: ") && words.contains("as nvlink cannot be used") && words.contains(why), "{words}");
    let asked = Communicator::connect_blocking(&world, Select::NvLink.into());
    if vetoed {
        let refused = matches!(asked, Err(ConnectError::Unusable { select: Select::NvLink, .. } | ConnectError::PeerFailed { .. }));
        assert!(refused, "{asked:?}");
    } else {
        assert_eq!(asked.unwrap().transport(), TransportKind::NvLink, "who asks for it gets it");
    }
}
