//! The ops on every machine: ranks on the host, and on GPUs over each transport. One binary, as all
//! of them run the same suite. Each module whose tests need a GPU begins with `gpu_`.
#![allow(
    clippy::unwrap_used,
    reason = "clippy knows test functions, not the functions that they call"
)]

#[macro_use]
#[path = "../common/mod.rs"]
mod common;
mod gpu_launches;
mod gpu_messages;
mod gpu_mixed;
mod gpu_nvlink;
mod gpu_pcie;
mod gpu_tune;
mod host;
mod host_nodes;
mod host_random;
mod host_tune;
