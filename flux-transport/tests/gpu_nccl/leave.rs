//! A rank drops a working communicator while its peers keep theirs. Ranks are processes: among
//! threads NCCL leaves the work to the last.

use crate::gpu_support::{devices, processes, skip};
use crate::lateness::{assert_soon, scaled};
use flux_transport::internal::nccl;
use flux_transport::{Communicator, Options, Select};
use std::time::{Duration, Instant};

/// For how long the peers keep theirs, where no machine is late: longer than anything that a rank
/// waits for when it leaves.
const KEPT: Duration = Duration::from_secs(20);

#[test]
fn a_rank_leaves_while_its_peers_stay() {
    let Some(devices) = devices("gpu_nccl", 1) else { return };
    if let Err(why) = nccl::available() {
        return skip("gpu_nccl", &why);
    }
    processes::run(2, devices.min(2), "leave::one_rank");
}

#[test]
#[ignore = "run by the tests that start it, in processes of their own"]
fn one_rank() {
    let world = processes::world();
    let options = processes::placed(&world, Options::from(Select::Nccl));
    let connect = || Communicator::connect_blocking(&world, options).unwrap();
    // Rank 1 keeps the first; both drop the second, beside NCCL's work for the first.
    let (first, second) = (connect(), connect());
    if world.rank().get() == 0 {
        let began = Instant::now();
        drop(first);
        assert_soon(began.elapsed(), KEPT / 4);
        drop(second);
        assert_soon(began.elapsed(), KEPT / 2);
    } else {
        drop(second);
        std::thread::sleep(scaled(KEPT));
        first.status().unwrap();
    }
}
