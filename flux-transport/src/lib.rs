//! .

#[expect(dead_code, reason = "the nvlink transport maps memory and copies with what is not public")]
pub mod cuda;
pub mod nccl;
