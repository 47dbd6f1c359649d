//! Measuring and verifying flux: every figure that is reported was measured beside its baselines in
//! the same run, of an op whose whole output was verified.
//!
//! Programs use [`flux_ops`]. The program `flux-bench` is this library's command line. What users
//! run stands beside what maintainers run, the laboratory (`lab`). All else that is public is for
//! the tests.

#![warn(clippy::print_stderr)]
#![allow(
    clippy::cast_possible_truncation,
    reason = "extents are below 2^24, and hosts with GPUs have 64-bit addresses"
)]

mod atomic_file;
mod bench;
mod cli;
mod compare;
mod doctor;
mod end;
mod harness;
mod lab;
#[cfg(test)]
#[path = "../../flux-transport/tests/lateness/mod.rs"]
mod lateness;
mod launch;
mod limited;
mod limits;
mod machine;
mod out;
mod page;
mod plan;
mod progress;
mod record;
mod report;
mod run;
mod shapes;
mod show;
mod simulate;
mod timeline;
mod trace;
mod tune;

pub use cli::{check_words, main};
pub use end::give_up;
pub use harness::data::{fill as fill_operand, value as operand_value};
pub use harness::epilogue::with_bias as epilogues_with_bias;
pub use harness::gpu::cublas::{Gemm, GemmOperands, GemmShape, available as cublas_available};
pub use harness::reference::verify as verify_on_host;
pub use harness::{
    Buffer, EpilogueArgs, EpilogueSpec, Fill, MadeBy, Norm, OperandSet, Operands, RankContext,
    Violation, Weight, w_window, x_window,
};
pub use lab::{CoreReport, FirstCallReport};
pub use page::{Args as PageArgs, made as made_page};
pub use plan::PlanArgs;
pub use record::{LayerRow, LayersReport, read_ops as read_report};
pub use report::{Execution, PeersReport, Placement, Ranks, Report, Row, SCHEMA, ServingReport};
pub use run::{Args as RunArgs, run as run_file};
pub use shapes::{Layer, layers, parse_op, world};
pub use show::{Args as ShowArgs, picture as shown_picture, rendered as shown_table};
pub use simulate::{
    Both, Compared, LEAST_ROWS, Simulation, compare, plans, published as simulated_published,
    table as simulated_table,
};

/// The README's example, so that it is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
