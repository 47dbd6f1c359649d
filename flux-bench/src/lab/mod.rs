//! `flux-bench lab`: what maintainers run to find faults and to take single parts' times.

mod compile;
mod core_gemm;
mod faults;
mod first_call;
mod gpu_ci;
mod links;
mod peers;
mod soak;

pub use core_gemm::CoreReport;
pub(crate) use core_gemm::SCHEMA as CORE_SCHEMA;
pub use first_call::FirstCallReport;
pub(crate) use first_call::SCHEMA as FIRST_CALL_SCHEMA;

/// A laboratory command.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Kill, stop and withhold ranks at random moments, and check every error, rebuild and result
    Faults(faults::Args),
    /// Check the ops over a matrix of hard shapes, with late ranks and poisoned memory
    Soak(soak::Args),
    /// Time the kernel as a GEMM, and what raised signals cost it, beside cuBLASLt on one GPU
    Core(core_gemm::Args),
    /// Time PyTorch's GEMM, its serial path with NCCL, and its fused ops
    Peers(peers::Args),
    /// Measure the links between GPUs, and to the host
    Links(links::Args),
    /// Time an op's first call in a new process, beside its later calls
    FirstCall(first_call::Args),
    /// Compile every kernel of this machine's first GPU that is not there yet, on all cores
    Compile,
    /// Run the checks that `cargo xtask dist` packs for a GPU host
    GpuCi(gpu_ci::Args),
}

/// Runs a command, and says whether everything that it checked was right.
pub(crate) fn run(command: &Command) -> anyhow::Result<bool> {
    match command {
        Command::Faults(args) => faults::run(args),
        Command::Soak(args) => soak::run(args),
        Command::Core(args) => core_gemm::run(args),
        Command::Peers(args) => peers::run(args),
        Command::Links(args) => links::run(args).map(|()| true),
        Command::FirstCall(args) => first_call::run(args),
        Command::Compile => compile::run().map(|()| true),
        Command::GpuCi(args) => gpu_ci::run(args),
    }
}
