//! NCCL as the library uses it: its collectives, and how a communicator is left.
#![allow(clippy::unwrap_used, reason = "a test")]

mod collectives;
#[path = "../gpu_support/mod.rs"]
mod gpu_support;
#[path = "../lateness/mod.rs"]
mod lateness;
mod leave;
