//! Peer memory as ranks use it: what each stores at the others, and what copy engines push.
#![allow(clippy::unwrap_used, reason = "a test")]

#[path = "../gpu_support/mod.rs"]
mod gpu_support;
mod memory;
mod push;
