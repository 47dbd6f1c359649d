//! Development tasks: `cargo xtask <task>`.
//!
//! Invariant: this crate depends on none of ours, so that a task runs, and says what is wrong, when
//! they do not build.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command line program answers on stdout, and says on stderr what is wrong"
)]

mod cargo;
mod dist;
mod kernels;
mod test;
mod wheel;

use crate::kernels::Selection;
use clap::{Parser, Subcommand};
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "Development tasks of flux",
    version
)]
struct Cli {
    /// The cargo profile of what is run or packed; `dev` builds faster, for checks whose times do
    /// not count
    #[arg(long, default_value = "release")]
    profile: String,
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Measure the ops against the unfused path, on the GPUs or, without any, on the host
    /// transport (`--help` for its options)
    #[command(disable_help_flag = true)]
    Bench(Passed),
    /// Time the cost model's best plans of layers, and keep the fastest for later runs (`--help`
    /// for its options)
    #[command(disable_help_flag = true)]
    Tune(Passed),
    /// Make one page of HTML of the records in `results/` (`--help` for its options)
    #[command(disable_help_flag = true)]
    Report(Passed),
    /// Run every test that needs no GPU: unit, integration and documentation tests, and the
    /// examples
    Test(Passed),
    /// Kill, stop and withhold ranks, and check every error, rebuild and result (`--help` for its
    /// options)
    #[command(disable_help_flag = true)]
    Faults(Passed),
    /// Compile every kernel, without a GPU, and print its registers, spills, stack and shared
    /// memory; fails where one spills
    Kernels {
        /// Where the cubins go [default: `cubins` in the target folder]
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// For which architecture: `sm_90a`, `sm_80`, `sm_86`, `sm_89`, `sm_100`, `sm_120`, or
        /// `compute_80` and `compute_89` for PTX; `all` for all of them
        #[arg(long, value_name = "ARCH", default_values = ["sm_90a"])]
        arch: Vec<String>,
        /// Only few kernels, which show whether the sources compile
        #[arg(long)]
        cover: bool,
        /// Only those with this text in their names; with several, all of them
        #[arg(long, value_name = "TEXT")]
        only: Vec<String>,
    },
    /// Compare `flux-kernels/images.csv`, a table of kernels' registers, with the sources; compiles
    /// the kernels without a row of their sources, and few others
    Images {
        /// Write the table instead: compile what has changed, and print whose registers have
        #[arg(long)]
        record: bool,
    },
    /// Build `dist/`: what a GPU host without toolchain and network needs to test and measure flux
    Dist {
        /// Every kernel, for hosts of H100 and H200 without NVRTC; else those that measured and
        /// common plans take, and the others are compiled on first use
        #[arg(long)]
        all: bool,
        /// Print the kernels' names, and build nothing
        #[arg(long)]
        list: bool,
    },
    /// Build the wheel of the Python package `flux_tp`, with its tools from PyPI in the target
    /// folder
    Wheel,
    /// Build `dist/` and run its checks on this machine's GPUs
    #[command(disable_help_flag = true)]
    GpuCi(Passed),
    /// Say what this machine has, which transports can work on it, and why others cannot
    Doctor,
    /// Build the documentation of all crates, and open it at `flux_ops`
    Docs,
    /// Run `.ci/run`, every check that a change must pass
    Ci,
}

#[derive(clap::Args)]
struct Passed {
    /// Passed on to what the task runs, such as a filter of tests
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(Cli { profile, task }: Cli) -> anyhow::Result<()> {
    match task {
        Task::Bench(Passed { args }) => cargo::flux_bench(&profile, &["bench"], &args),
        Task::Tune(Passed { args }) => cargo::flux_bench(&profile, &["tune"], &args),
        Task::Report(Passed { args }) => cargo::flux_bench(&profile, &["report"], &args),
        Task::Faults(Passed { args }) => cargo::flux_bench(&profile, &["lab", "faults"], &args),
        Task::Doctor => cargo::flux_bench(&profile, &["doctor"], &[]),
        Task::Test(Passed { args }) => test::run(&args),
        Task::Kernels { out, arch, cover, only } => kernels::compile(
            out.as_deref(),
            &arch.iter().map(String::as_str).collect::<Vec<_>>(),
            if cover { Selection::Cover } else { Selection::Every },
            &only.iter().map(String::as_str).collect::<Vec<_>>(),
        ),
        Task::Images { record } => kernels::images(record),
        Task::Dist { all, list } => {
            let selection = if all { Selection::Every } else { Selection::Shipped };
            if list { dist::list(selection) } else { dist::build(selection).map(drop) }
        }
        Task::Wheel => wheel::build(&profile).map(|wheel| println!("{}", wheel.display())),
        Task::GpuCi(Passed { args })
            if args.iter().any(|word| word == "--help" || word == "-h") =>
        {
            cargo::flux_bench(&profile, &["lab", "gpu-ci"], &["--help".into()])
        }
        Task::GpuCi(Passed { args }) => dist::gpu_ci(&args),
        Task::Docs => docs(),
        Task::Ci => cargo::check(std::process::Command::new(cargo::root().join(".ci/run"))),
    }
}

/// `cargo doc --open` opens the first crate by name, which is `flux_bench`: all are built, and
/// `flux_ops` is opened.
const DOCS: [&[&str]; 2] = [&["--workspace"], &["--package", "flux-tp-ops", "--open"]];

fn docs() -> anyhow::Result<()> {
    for words in DOCS {
        let mut doc = cargo::cargo();
        doc.args(["doc", "--no-deps"]).args(words).current_dir(cargo::root());
        cargo::check(doc)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::DOCS;

    #[test]
    fn the_documentation_opens_at_the_ops_alone() {
        let opened: Vec<_> = DOCS.iter().filter(|words| words.contains(&"--open")).collect();
        assert_eq!(opened, [&["--package", "flux-tp-ops", "--open"]]);
    }
}
