//! .

pub mod cuda;
pub mod nccl;
#[expect(dead_code, reason = "the communicator takes the transport from here")]
pub mod nvlink;
