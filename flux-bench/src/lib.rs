//! Measuring and verifying flux: every figure that is reported was measured beside its baselines in
//! the same run, of an op whose whole output was verified.
//!
//! The program `flux-bench` is this library's command line.

#![warn(clippy::print_stderr)]
#![allow(clippy::cast_possible_truncation, reason = "extents are below 2^24, and hosts with GPUs have 64-bit addresses")]

pub mod atomic_file;
pub mod bench;
pub mod cli;
pub mod core_gemm;
pub mod data;
pub mod defect;
pub mod doctor;
pub mod end;
pub mod faults;
pub mod finish;
pub mod first_call;
pub mod gpu;
pub mod gpu_ci;
pub mod launch;
pub mod limited;
pub mod limits;
pub mod links;
pub mod machine;
pub mod memory;
pub mod op;
pub mod operands;
pub mod out;
pub mod peers;
pub mod plan;
pub mod ranks;
pub mod reference;
pub mod report;
pub mod rest;
pub mod run;
pub mod shapes;
pub mod show;
pub mod simulate;
pub mod site;
pub mod soak;
pub mod stats;
pub mod trace;

/// The README's example, so that it is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
