//! `auto` on several hosts takes peer memory within each and NCCL between, unless peer access fails
//! or is forbidden on one.
//!
//! Ranks are processes of this machine that count as on two hosts; the test starts its own binary
//! again. Peer access is proven by `FLUX_PROBE` if set.
#![allow(clippy::unwrap_used, reason = "a test")]

mod gpu_support;

use flux_core::{Nodes, WorldSize};
use flux_transport::internal::nccl;
use flux_transport::launch::{Launcher, exit_code};
use flux_transport::{Communicator, Select, TransportKind, World};
use gpu_support::{linked_devices, skip};

/// Set for the processes that are ranks, to what they are to find.
const RANK: &str = "FLUX_GPU_TEST_HOSTS";

/// Has every rank check `case`, and expects `kept` verdicts on disk; the script may set variables.
fn ranks(case: &str, script: &str, kept: usize) {
    if let Err(why) = nccl::available() {
        return skip("gpu_hosts", &why);
    }
    let Some(devices) = linked_devices("gpu_hosts", 4) else { return };
    let cache = tempfile::tempdir().unwrap();
    let even = devices / 2 * 2;
    let status = Launcher::new(WorldSize::new(even).unwrap(), "sh")
        .args([
            "-c".to_owned(),
            format!(
                "{script}; exec \"$0\" --ignored --exact one_rank --nocapture --test-threads=1"
            ),
        ])
        .args([std::env::current_exe().unwrap()])
        .env(RANK, case)
        .env("FLUX_CACHE_DIR", cache.path())
        .apart(2)
        .run()
        .unwrap();
    assert_eq!(exit_code(status), 0, "a rank failed; its words are above");
    assert_eq!(
        std::fs::read_dir(cache.path().join("peers")).map_or(0, Iterator::count),
        kept,
        "verdicts of {case}"
    );
}

#[test]
fn hosts_whose_ranks_reach_their_peers_take_mixed_and_prove_it_once_each() {
    ranks("works", "unset NCCL_P2P_DISABLE FLUX_VETO_PEER", 2);
}

#[test]
fn one_rank_whose_peers_writes_vanish_leaves_nccl_to_all_hosts() {
    // The launcher sets NCCL_P2P_DISABLE on all ranks. What the other host proved is kept.
    ranks(
        "vetoed",
        "unset NCCL_P2P_DISABLE; if [ $FLUX_RANK = 3 ]; then export FLUX_VETO_PEER=1; fi",
        1,
    );
}

#[test]
fn no_host_takes_mixed_where_peer_access_is_forbidden() {
    ranks("forbidden", "true", 0);
}

#[test]
#[ignore = "run by the tests that start it, in processes of their own"]
fn one_rank() {
    let case = std::env::var(RANK).expect("a case");
    let world = World::from_env().unwrap();
    let connect = || Communicator::connect_blocking(&world, Select::Auto).unwrap();
    let first = connect();
    let told = first.explain();
    if case == "works" {
        assert_eq!(
            (first.transport(), first.nodes()),
            (TransportKind::Mixed, Nodes::new(world.size(), 2).unwrap()),
            "{told}"
        );
        for host in ["host 0 (ranks 0 to ", "host 1 (ranks "] {
            assert!(
                told.contains(host) && told.contains("peer access works in both directions"),
                "{told}"
            );
        }
        drop(first);
        let again = connect().explain();
        assert_eq!(again.matches("proven earlier in this boot").count(), 2, "{again}");
        return;
    }
    let reason = match case.as_str() {
        "vetoed" => "peer access does not work from GPU-",
        _ => "not mixed: NCCL_P2P_DISABLE=1 on rank 0",
    };
    assert_eq!(first.transport(), TransportKind::Nccl, "{told}");
    assert!(told.contains("not mixed: ") && told.contains(reason), "{told}");
}
