//! `flux-bench launch`: a program once for every rank, as processes of this machine.
//!
//! Invariant: the launch fails where a rank failed, and leaves no rank behind.

use crate::report::{LAUNCHED_BY, command_line};
use anyhow::Context;
use flux_core::WorldSize;
use flux_core::rank::MAX_WORLD;
use flux_transport::launch::{Launcher, exit_code};
use std::ffi::OsString;

/// Arguments of `flux-bench launch`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// How many processes; each sees its rank in FLUX_RANK and their number in FLUX_WORLD_SIZE
    #[arg(long)]
    pub ranks: u32,
    /// Have them take themselves for ranks of so many hosts, for tests: they meet over TCP, share no memory, and NCCL has only sockets on the loopback device
    #[arg(long, value_name = "HOSTS")]
    pub hosts: Option<u32>,
    /// The program and its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,
}

/// Runs the ranks to their end, and returns the exit status that stands for all: of the first that failed, or 0.
pub fn run(args: &Args) -> anyhow::Result<u8> {
    let ranks = WorldSize::new(args.ranks).with_context(|| format!("--ranks {} is outside 1 to {MAX_WORLD}", args.ranks))?;
    let (program, words) = args.program.split_first().context("there is no program to launch")?;
    // NVLink multicast can take a shared host's devices out of service.
    let mut launcher = Launcher::new(ranks, program).args(words).env("NCCL_NVLS_ENABLE", "0").env(LAUNCHED_BY, command_line());
    if let Some(hosts) = args.hosts {
        launcher = launcher.apart(hosts);
    }
    Ok(exit_code(launcher.run()?))
}

/// The command of this process, once as each rank: in a launch it is a rank, and looks at `--processes` and `--hosts` no more.
pub fn again(ranks: u32, hosts: Option<u32>) -> anyhow::Result<bool> {
    let program = std::iter::once(std::env::current_exe()?.into_os_string()).chain(std::env::args_os().skip(1)).collect();
    Ok(run(&Args { ranks, hosts, program })? == 0)
}
