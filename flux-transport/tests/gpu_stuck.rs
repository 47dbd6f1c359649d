//! A device that never becomes idle: dropping or rebuilding its communicator returns, frees
//! nothing, and nobody connects there again.
//!
//! Each transport runs in its own process, as a device is given up for the life of the process.
#![allow(clippy::unwrap_used, reason = "a test")]

mod gpu_support;
mod lateness;

use cudarc::driver::sys;
use flux_cuda::{CudaDevice, PinnedBlock, SideStream};
use flux_transport::internal::{limited, nccl};
use flux_transport::{Communicator, ConnectError, Options, Select, TransportError, World};
use gpu_support::{devices, skip, stream_of};
use lateness::{AMPLE, VARIABLE, of_process, scaled};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

/// Set for the process with the stuck device, to its transport.
const TRANSPORT: &str = "FLUX_GPU_TEST_STUCK";
/// Longer than a device is waited for after calls with a short deadline have failed, where no
/// machine is late.
const LIMIT: Duration = Duration::from_secs(90);

fn in_a_process(transport: Select) {
    let Some(_) = devices("gpu_stuck", 1) else { return };
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--ignored", "--exact", "the_stuck", "--nocapture", "--test-threads=1"])
        .env(TRANSPORT, transport.to_string())
        .env(VARIABLE, of_process().to_string())
        .process_group(0);
    let status = limited::wait(command.spawn().unwrap(), scaled(LIMIT), AMPLE).unwrap();
    let status = status.expect("whoever drops the communicator hangs");
    assert!(status.success(), "its words are above: {status}");
}

#[test]
fn an_nvlink_communicator_is_dropped_on_a_device_that_is_stuck() {
    in_a_process(Select::NvLink);
}

#[test]
fn a_pcie_communicator_is_dropped_on_a_device_that_is_stuck() {
    in_a_process(Select::Pcie);
}

#[test]
fn an_nccl_communicator_is_dropped_on_a_device_that_is_stuck() {
    match nccl::available() {
        Ok(_) => in_a_process(Select::Nccl),
        Err(why) => skip("gpu_stuck", &why),
    }
}

#[test]
#[ignore = "run by the tests that start it, in processes of their own"]
fn the_stuck() {
    let transport = std::env::var(TRANSPORT).expect("a transport");
    let select: Select = transport.parse().unwrap();
    // NCCL alone takes half a second to connect.
    let deadline = scaled(if select == Select::Nccl {
        Duration::from_secs(5)
    } else {
        Duration::from_millis(500)
    });
    let options = Options { select, device: Some(0), deadline, ..Options::default() };
    let connect = || Communicator::connect_blocking(&World::local(1).unwrap()[0], options);
    let comm = connect().unwrap();

    let device = CudaDevice::open(0).unwrap();
    let (stream, word) = (SideStream::new(&device).unwrap(), PinnedBlock::new(&device, 4).unwrap());
    device.bind().unwrap();
    // SAFETY: the stream and the word, which is 0, are there until the end.
    unsafe { sys::cuStreamWaitValue32_v2(stream.raw() as sys::CUstream, word.address(), 1, 0) }
        .result()
        .unwrap();

    // A call that does not end: nccl waits for its own calls, the others for the device.
    comm.begin(stream_of(&stream)).unwrap().finish().unwrap();
    comm.abort(1);
    let began = Instant::now();
    assert!(matches!(comm.drain(), Err(TransportError::NotDrained)));
    assert!(device.is_given_up(), "before anybody connects there again");
    drop(comm);
    assert!(
        began.elapsed() >= options.deadline && !stream.is_idle().unwrap(),
        "it was waited for, in vain"
    );
    let refused = connect().unwrap_err();
    assert!(
        matches!(refused, ConnectError::Unusable { .. })
            && refused.to_string().contains("start a new process"),
        "{refused}"
    );

    // SAFETY: the word is there, and only read by the device.
    unsafe { word.host().cast::<u32>().write_volatile(1) };
    device.synchronize().unwrap();
    drop((stream, word, device));
    let (mut flags, mut active) = (0, 0);
    // SAFETY: both are places for results.
    unsafe { sys::cuDevicePrimaryCtxGetState(0, &raw mut flags, &raw mut active) }
        .result()
        .unwrap();
    assert_eq!(active, 1, "the context goes with the process");
}
