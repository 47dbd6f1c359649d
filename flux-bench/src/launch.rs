//! `flux-bench launch`: a program once for every rank, as processes of this machine.
//!
//! Invariant: the launch fails where a rank fails, names the first cause, and leaves no rank
//! behind.

use crate::report::{LAUNCHED_BY, command_line};
use crate::{end, shapes};
use anyhow::{Context, ensure};
use flux_transport::launch::{Failed, Launcher, Others, exit_code};
use flux_transport::{Environment, World, WorldError};
use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;

/// Arguments of `flux-bench launch`.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Args {
    /// How many processes; each sees its rank in FLUX_RANK and their number in FLUX_WORLD_SIZE
    #[arg(long, visible_alias = "tp")]
    pub ranks: u32,
    /// Treat the processes as ranks of so many hosts, for tests: they meet over TCP, and NCCL has
    /// only sockets on the loopback device
    #[arg(long, value_name = "HOSTS")]
    pub hosts: Option<u32>,
    /// Let ranks share devices: NCCL then takes each rank for the only one of its host
    #[arg(long)]
    pub sharing_devices: bool,
    /// Let the other ranks go on where one fails; the launch fails all the same
    #[arg(long)]
    pub keep_going: bool,
    /// Begin each line that a rank prints with its number
    #[arg(long)]
    pub prefix: bool,
    /// Write what each rank prints to rank-R.log in this folder, and to the terminal only with
    /// --prefix
    #[arg(long, value_name = "DIR")]
    pub logs: Option<PathBuf>,
    /// The program and its arguments
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required = true,
        value_name = "PROGRAM"
    )]
    pub program: Vec<OsString>,
}

/// Runs the ranks to their end, and returns the exit status of the first cause of a failure, or 0.
pub(crate) fn run(args: &Args) -> anyhow::Result<u8> {
    let ranks = shapes::world_of("--ranks", args.ranks)?;
    let (program, words) = args.program.split_first().context("there is no program to launch")?;
    // NVLink multicast can take a shared host's devices out of service.
    let mut launcher = Launcher::new(ranks, program)
        .args(words)
        .env("NCCL_NVLS_ENABLE", "0")
        .env(LAUNCHED_BY, command_line());
    launcher = launcher.on_failure(if args.keep_going {
        |failed| tell(failed, Others::GoOn)
    } else {
        |failed| tell(failed, Others::End)
    });
    if let Some(hosts) = args.hosts {
        launcher = launcher.apart(hosts);
    }
    if args.sharing_devices {
        launcher = launcher.sharing_devices();
    }
    if args.prefix {
        launcher = launcher.prefix();
    }
    if let Some(folder) = &args.logs {
        launcher = launcher.logs(folder);
    }
    Ok(exit_code(launcher.run()?))
}

/// Runs this process's command once as each rank, where `--processes` and `--hosts` have no effect.
pub(crate) fn again(ranks: u32, hosts: Option<u32>, sharing_devices: bool) -> anyhow::Result<bool> {
    let program = std::iter::once(std::env::current_exe()?.into_os_string())
        .chain(std::env::args_os().skip(1))
        .collect();
    match run(&Args { ranks, hosts, sharing_devices, program, ..Args::default() })? {
        0 => Ok(true),
        1 => Ok(false),
        // As a rank ended.
        code => end::now(code),
    }
}

/// Reports which rank failed, how, and what becomes of the others.
fn tell(failed: &Failed, others: Others) -> Others {
    let how = match (failed.status.signal(), failed.status.code()) {
        (Some(signal), _) => format!("was killed by signal {signal}"),
        (None, Some(101)) => "panicked (status 101)".to_owned(),
        (None, Some(code)) => format!("ended with status {code}"),
        (None, None) => failed.status.to_string(),
    };
    let then = match others {
        _ if failed.others == 0 => "",
        Others::End => "; ending the others",
        Others::GoOn => "; the others go on",
    };
    end::say(&format!("rank {} {how}{then}", failed.rank));
    others
}

/// Refuses to run inside a launch: each process would do all of the command's work.
pub(crate) fn refuse(command: &str) -> anyhow::Result<()> {
    if let Ok(launched) = Environment::read() {
        let ranks = launched.world.get();
        ensure!(
            ranks == 1,
            "{command} makes its ranks itself, and each of the {ranks} processes of this launch \
             would do all of it: start it without a launcher"
        );
    }
    Ok(())
}

/// What `body` finds as a rank of a launch, which ends where it fails; none without a launcher.
pub(crate) fn as_rank(
    body: impl FnOnce(&World) -> anyhow::Result<bool>,
) -> anyhow::Result<Option<bool>> {
    match World::from_env() {
        Ok(world) => {
            Ok(Some(body(&world).unwrap_or_else(|error| end::give_up(world.rank(), &error))))
        }
        Err(WorldError::NoLauncher) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Refuses another number of ranks than were launched.
pub(crate) fn agree(tp: Option<u32>, world: &World) -> anyhow::Result<()> {
    let ranks = world.size().get();
    ensure!(
        tp.is_none_or(|tp| tp == ranks),
        "--tp {} is asked for in a launch of {ranks} ranks: leave it out, or start without a \
         launcher for ranks as threads",
        tp.unwrap_or_default()
    );
    Ok(())
}
