//! The command line.
//!
//! Invariant: the exit status is 0 only where everything was done, and found right where checked.

use crate::{
    bench, doctor, end, lab, launch, limited, out, page, run, show, simulate, trace, tune,
};
use clap::error::ErrorKind;
use clap::{Parser, Subcommand};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// Benchmarks, verification and runs of flux.
#[derive(Debug, Parser)]
#[command(name = "flux-bench", version, about)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Verify and measure the ops beside the unfused path
    Bench(bench::Args),
    /// Time the cost model's best plans of layers, and keep the fastest for later runs
    Tune(tune::Args),
    /// Run an op on operands from a safetensors file
    Run(run::Args),
    /// Start a program once for every rank, as processes of this machine
    Launch(launch::Args),
    /// Say what this machine has, which transports can work on it, and why others cannot
    Doctor(doctor::Args),
    /// Record when each phase of each tile of one call ended, on every rank
    Trace(trace::Args),
    /// Predict what the ops take, by a model of a machine that need not be there
    Simulate(simulate::Args),
    /// Show results that `bench --json` has written: as a table, as a picture
    Show(show::Args),
    /// Make one page of HTML of records, or of two records beside each other
    Report(page::Args),
    /// For maintainers: faults, soak, core, peers, links, first-call, compile, gpu-ci
    #[command(subcommand)]
    Lab(lab::Command),
}

/// Whether these words, the program's name first, are or begin a command line of this program.
///
/// # Errors
/// What `flux-bench` would print, unless only required arguments are missing.
pub fn check_words<'a>(words: impl Iterator<Item = &'a str>) -> Result<(), String> {
    match Cli::try_parse_from(words) {
        Err(error) if error.kind() != ErrorKind::MissingRequiredArgument => Err(error.to_string()),
        _ => Ok(()),
    }
}

/// Runs the command line.
pub fn main() -> ExitCode {
    tracing_subscriber::fmt().with_env_filter(filter()).with_writer(std::io::stderr).init();
    if let Err(error) = flux_transport::launch::hear_of_children() {
        tracing::warn!(%error, "how programs end that this one starts may not be known");
    }
    match act(Cli::parse().command).and_then(|code| out::end().map(|()| code)) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            // The sender knows the reason, and clean-up is done.
            if let Some(signal) = limited::interrupted_by(&error) {
                end::by(signal);
            }
            end::say(&end::words(&error));
            // A failed thread may be left in the driver or in NCCL.
            end::now(1)
        }
    }
}

/// The filter of `FLUX_LOG`; the default where it is unset or cannot be read, which is reported.
fn filter() -> EnvFilter {
    const USUAL: &str = "warn";
    // A value that is not UTF-8 is no filter, but it is set.
    match std::env::var_os("FLUX_LOG").map(|value| value.to_string_lossy().into_owned()) {
        Some(value) if !value.is_empty() => read(&value).unwrap_or_else(|error| {
            end::say(&format!("FLUX_LOG = {value:?} is no filter, so {USUAL} is taken: {error}"));
            USUAL.into()
        }),
        _ => USUAL.into(),
    }
}

/// The filter that `value` says. A misspelt level would pass as a module's name and silence all
/// others.
fn read(value: &str) -> anyhow::Result<EnvFilter> {
    for part in value.split(',').map(str::trim) {
        let is_level = !part.is_empty() && part.parse::<LevelFilter>().is_ok();
        // A filter by spans alone, as `[call]=debug`, names no module.
        anyhow::ensure!(
            is_level || part.starts_with("flux_") || part.starts_with('['),
            "{part:?} is none of off, error, warn, info, debug and trace, nor of the form \
             flux_transport=debug"
        );
    }
    Ok(EnvFilter::try_new(value)?)
}

/// The exit status: of a launch its ranks', else 0 or 1.
fn act(command: Command) -> anyhow::Result<u8> {
    match command {
        Command::Bench(args) => bench::run(&args).map(status),
        Command::Tune(args) => tune::run(&args).map(status),
        Command::Run(args) => run::run(&args).map(|()| 0),
        Command::Launch(args) => launch::run(&args),
        Command::Doctor(args) => Ok(status(doctor::run(&args))),
        Command::Trace(args) => trace::run(&args).map(|()| 0),
        Command::Simulate(args) => simulate::run(&args).map(|()| 0),
        Command::Show(args) => show::run(&args).map(|()| 0),
        Command::Report(args) => page::run(&args).map(status),
        Command::Lab(command) => lab::run(&command).map(status),
    }
}

fn status(right: bool) -> u8 {
    u8::from(!right)
}

#[cfg(test)]
mod tests;
