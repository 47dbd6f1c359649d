//! What `auto` takes where peers' writes vanish or are forbidden, on one rank or all, and where all
//! is well.
//!
//! Ranks are processes with variables that say what to find; the test starts its own binary again.
//! Peer access is proven by `FLUX_PROBE` if set.
#![allow(clippy::unwrap_used, reason = "a test")]

mod gpu_support;

use flux_core::WorldSize;
use flux_transport::launch::{Launcher, exit_code};
use flux_transport::{Communicator, ConnectError, Options, Select, TransportKind, World};
use gpu_support::linked_devices;

/// Set for the processes that are ranks, to what they are to find.
const RANK: &str = "FLUX_GPU_TEST_VETO";
/// Set for a rank that is to be on the device of this UUID.
const DEVICE: &str = "FLUX_GPU_TEST_DEVICE";
/// The case in which ranks ask for the first device that they see.
const OWN_FIRST: &str = "own first";

/// Whether a probe is named, which sees devices that ranks do not.
fn probes() -> bool {
    std::env::var_os("FLUX_PROBE").is_some_and(|program| !program.is_empty())
}

/// Has every rank check `case`; the script may set variables first.
fn ranks(case: &str, script: &str) {
    let Some(devices) = linked_devices("gpu_veto", 2) else { return };
    let cache = tempfile::tempdir().unwrap();
    let status = Launcher::new(WorldSize::new(devices).unwrap(), "sh")
        .args([
            "-c".to_owned(),
            format!(
                "{script}; exec \"$0\" --ignored --exact one_rank --nocapture --test-threads=1"
            ),
        ])
        .args([std::env::current_exe().unwrap()])
        .env(RANK, case)
        .env("FLUX_CACHE_DIR", cache.path())
        .run()
        .unwrap();
    assert_eq!(exit_code(status), 0, "a rank failed; its words are above");
    let kept = std::fs::read_dir(cache.path().join("peers")).map_or(0, Iterator::count);
    assert_eq!(
        kept,
        usize::from(["works", OWN_FIRST].contains(&case) || case == "hidden" && probes()),
        "what was proven is kept, and what was pretended is not"
    );
}

#[test]
fn where_peers_are_reached_all_take_nvlink_and_prove_it_once() {
    ranks("works", "unset NCCL_P2P_DISABLE FLUX_VETO_PEER");
}

#[test]
fn ranks_that_see_their_own_device_alone_take_nvlink() {
    if std::env::var_os("CUDA_VISIBLE_DEVICES").is_some() {
        return gpu_support::skip(
            "gpu_veto",
            &"CUDA_VISIBLE_DEVICES is set, so the ranks' devices have other numbers",
        );
    }
    ranks(
        "hidden",
        "unset NCCL_P2P_DISABLE FLUX_VETO_PEER; export CUDA_VISIBLE_DEVICES=$FLUX_LOCAL_RANK",
    );
}

/// A script that shows each rank the devices of its list and selects the one at its index.
fn shown(
    lists: &[Vec<u32>],
    name: impl Fn(u32) -> String,
    place: impl Fn(usize) -> usize,
) -> String {
    let uuid = |device: u32| flux_cuda::device_info(device).unwrap().uuid;
    let arms = lists.iter().enumerate().map(|(rank, list)| {
        let names: Vec<String> = list.iter().map(|&device| name(device)).collect();
        format!(
            "{rank}) export CUDA_VISIBLE_DEVICES={} {DEVICE}={};;",
            names.join(","),
            uuid(list[place(rank)])
        )
    });
    format!(
        "unset NCCL_P2P_DISABLE FLUX_VETO_PEER; case $FLUX_RANK in {} esac",
        arms.collect::<String>()
    )
}

#[test]
fn ranks_that_each_see_their_own_device_first_take_nvlink() {
    if std::env::var_os("CUDA_VISIBLE_DEVICES").is_some() {
        return gpu_support::skip(
            "gpu_veto",
            &"CUDA_VISIBLE_DEVICES is set, so the ranks' devices have other numbers",
        );
    }
    let Some(count) = linked_devices("gpu_veto", 2) else { return };
    // Every rank's device is number 0 there, and no two ranks number any device alike.
    let lists: Vec<Vec<u32>> =
        (0..count).map(|rank| (0..count).map(|at| (rank + at) % count).collect()).collect();
    ranks(OWN_FIRST, &shown(&lists, |device| device.to_string(), |_| 0));
}

#[test]
fn ranks_that_are_shown_uuids_from_the_last_on_take_nvlink() {
    let Some(count) = linked_devices("gpu_veto", 2) else { return };
    let lists = vec![(0..count).rev().collect(); count as usize];
    ranks(
        "works",
        &shown(
            &lists,
            |device| flux_cuda::device_info(device).unwrap().uuid.to_string(),
            |rank| rank,
        ),
    );
}

#[test]
fn no_rank_takes_nvlink_where_writes_vanish() {
    ranks("vetoed", "export FLUX_VETO_PEER=1");
}

#[test]
fn one_rank_whose_peers_writes_vanish_is_enough() {
    ranks("vetoed", "if [ $FLUX_RANK = 1 ]; then export FLUX_VETO_PEER=1; fi");
}

#[test]
fn no_rank_takes_nvlink_where_peer_access_is_forbidden() {
    ranks("forbidden", "export NCCL_P2P_DISABLE=1");
}

#[test]
fn one_rank_that_is_forbidden_peer_access_is_enough() {
    ranks("forbidden", "if [ $FLUX_RANK = 1 ]; then export NCCL_P2P_DISABLE=1; fi");
}

#[test]
#[ignore = "run by the tests that start it, in processes of their own"]
fn one_rank() {
    let case = std::env::var(RANK).expect("a case");
    let world = World::from_env().unwrap();
    let device = (case == OWN_FIRST).then_some(0);
    let connect = |select: Select| {
        Communicator::connect_blocking(&world, Options { device, ..select.into() })
    };
    let first = connect(Select::Auto).unwrap();
    let told = first.explain();
    if let Ok(uuid) = std::env::var(DEVICE) {
        let ordinal = first.device().ordinal().unwrap();
        assert_eq!(flux_cuda::device_info(ordinal).unwrap().uuid.to_string(), uuid, "{told}");
    }
    if ["works", OWN_FIRST].contains(&case.as_str()) {
        assert_eq!(first.transport(), TransportKind::NvLink, "{told}");
        assert!(
            told.contains("peer access works in both directions") && told.contains("proven"),
            "{told}"
        );
        let again = connect(Select::Auto).unwrap().explain();
        assert!(again.contains("proven earlier in this boot"), "{again}");
        return;
    }
    if case == "hidden" {
        assert_eq!(first.transport(), TransportKind::NvLink, "{told}");
        let word = if probes() { "proven in a process of its own" } else { "not proven" };
        assert!(told.contains(word), "{told}");
        return;
    }
    let reason = if case == "vetoed" {
        "peer access does not work from GPU-"
    } else {
        "NCCL_P2P_DISABLE=1 on rank"
    };
    assert_eq!(first.transport(), TransportKind::Pcie, "{told}");
    assert!(told.contains("not nvlink: ") && told.contains(reason), "{told}");
    drop(first);
    let refused = connect(Select::NvLink);
    let said = matches!(
        refused,
        Err(ConnectError::Unusable { select: Select::NvLink, .. } | ConnectError::PeerFailed { .. })
    );
    assert!(said, "nvlink by name: {refused:?}");
}
