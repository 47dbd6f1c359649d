//! What this machine is, as reports name it, and which devices ranks work on.

use anyhow::{Context, bail};
use flux_transport::internal::nccl;
use flux_transport::{Communicator, Launch, Mover, Options, Select};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What a rank was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ranks {
    /// A thread of the one process.
    #[default]
    Threads,
    /// A process.
    Processes,
}

impl fmt::Display for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Threads => "threads",
            Self::Processes => "processes",
        })
    }
}

pub(crate) fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| n.get() as u32)
}

/// Nanoseconds of the clock that all processes of a machine share.
pub(crate) fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// GPUs that this process sees; 0 without CUDA.
pub(crate) fn gpu_count() -> u32 {
    flux_cuda::device_count().unwrap_or(0)
}

/// Whether ranks of a transport work on GPUs here; `auto` is what `FLUX_TRANSPORT` names.
pub(crate) fn uses_gpus(select: Select) -> anyhow::Result<bool> {
    match asked(select)? {
        Select::Host => Ok(false),
        Select::Auto => Ok(gpu_count() > 0),
        _ if gpu_count() > 0 => Ok(true),
        select => match flux_cuda::available() {
            Err(why) => bail!("transport {select} needs GPUs: {why}"),
            Ok(()) => bail!("transport {select} needs GPUs: this process sees none"),
        },
    }
}

/// The transport that is asked for: `FLUX_TRANSPORT` where `select` is `auto`.
pub(crate) fn asked(select: Select) -> anyhow::Result<Select> {
    // A value that is not UTF-8 names no transport, but it is set.
    let variable =
        std::env::var_os("FLUX_TRANSPORT").map(|value| value.to_string_lossy().into_owned());
    named(select, variable.as_deref())
}

/// The transport that is asked for, with the variable's value.
fn named(select: Select, variable: Option<&str>) -> anyhow::Result<Select> {
    match variable {
        Some(name) if select == Select::Auto && !name.is_empty() => {
            name.parse().context("FLUX_TRANSPORT")
        }
        _ => Ok(select),
    }
}

/// Options of a rank: a GPU of its own, or one shared by `ranks_per_gpu` neighbours.
pub(crate) fn options(select: Select, local_rank: u32, ranks_per_gpu: u32) -> Options {
    let mut options = Options::from(select);
    if ranks_per_gpu > 1 && select != Select::Host && gpu_count() > 0 {
        options.device = Some(local_rank / ranks_per_gpu);
        options.shared_device = true;
    }
    options
}

/// Ranks whose kernels run on a GPU at once: those of one process; several processes take turns.
pub(crate) fn at_once(launch: Launch, ranks_per_gpu: u32) -> u32 {
    if launch == Launch::Threads { ranks_per_gpu } else { 1 }
}

/// CTAs that an op can have on `comm`'s device of `sms` SMs, beside the transport's own.
pub(crate) fn ctas(comm: &Communicator, sms: u32) -> u32 {
    match comm.capabilities().mover {
        Mover::Messages { channels, .. } => sms.saturating_sub(channels.all).max(1),
        _ => sms,
    }
}

/// A version of CUDA, `1000 * major + 10 * minor`, in words.
pub(crate) fn cuda_version(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// A version of NCCL or cuBLASLt, `10000 * major + 100 * minor + patch`, in words.
pub(crate) fn library_version(version: u32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// The version of CUDA that the driver supports.
pub(crate) fn cuda() -> Option<String> {
    flux_cuda::driver_version().ok().map(cuda_version)
}

/// The version of NCCL.
pub(crate) fn nccl() -> Option<String> {
    nccl::version().ok().map(library_version)
}

/// The version of the kernel module: the first word with dots.
pub(crate) fn driver() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    driver_of(&text)
}

fn driver_of(text: &str) -> Option<String> {
    let version = |w: &&str| w.contains('.') && w.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.lines().next()?.split_whitespace().find(version).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::{driver_of, named};
    use flux_transport::Select;

    #[test]
    fn the_variable_names_what_is_left_open_and_no_nonsense() {
        assert_eq!(named(Select::Auto, None).unwrap(), Select::Auto);
        assert_eq!(named(Select::Auto, Some("")).unwrap(), Select::Auto);
        assert_eq!(named(Select::Auto, Some("pcie")).unwrap(), Select::Pcie);
        assert_eq!(named(Select::Host, Some("pigeon")).unwrap(), Select::Host);
        let error = format!("{:#}", named(Select::Auto, Some("pigeon")).unwrap_err());
        assert!(error.starts_with("FLUX_TRANSPORT: `pigeon` names no transport"), "{error}");
    }

    #[test]
    fn the_driver_is_found_in_the_modules_text() {
        let text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release \
                    Build  (x)  Thu\nGCC version:  gcc 12.3.0\n";
        assert_eq!(driver_of(text).as_deref(), Some("580.159.03"));
        assert_eq!(driver_of("nothing here"), None);
    }
}
