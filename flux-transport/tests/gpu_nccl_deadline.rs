//! A rank that does not come to an NCCL communicator. Its own binary: the attempt leaves a thread.
#![allow(clippy::unwrap_used, reason = "a test")]

mod gpu_support;

use flux_cuda::CudaDevice;
use flux_transport::internal::nccl::{self, Comm, UniqueId};
use gpu_support::{devices, skip};
use std::time::Duration;

#[test]
fn a_missing_rank_ends_the_join_at_the_deadline() {
    let Some(_) = devices("gpu_nccl_deadline", 1) else { return };
    if let Err(why) = nccl::available() {
        skip("gpu_nccl_deadline", &why);
        return;
    }
    let device = CudaDevice::open(0).unwrap();
    let id = UniqueId::new().unwrap();
    let error = Comm::join(&device, id, 0, 2, Duration::from_secs(2)).unwrap_err();
    assert!(matches!(error, nccl::NcclError::Deadline { rank: 0, world: 2, .. }), "{error}");
}
