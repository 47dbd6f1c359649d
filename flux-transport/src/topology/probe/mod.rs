//! Whether devices reach each other's memory, proven by data.
//!
//! Invariant: an answer comes in bounded time, and nothing unproven passes for proven: a probe that
//! hangs, crashes or gives no whole report means no. Only reports are kept on disk, for one boot.
//!
//! Asked in this order:
//!
//! - The cache on disk.
//! - A child process: `FLUX_PROBE`, this program if it calls [`serve`], or `flux-probe` beside it
//!   or on the path.
//! - A thread of this process, which notices a hang and does not survive a crash.

mod cache;
mod child;
mod devices;
mod exchange;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod program;
mod proof;
mod report;
mod request;
mod ways;

pub use proof::{Proof, Verdict};
pub(crate) use report::line;
pub use report::{Direction, Report};

use crate::topology::Settings;
use cache::CacheKey;
use flux_cuda::DeviceUuid;
use report::ChildReport;
use request::{REQUEST, Request};
use std::ffi::OsStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use ways::Ways;

/// How long a probe may take: contexts on all devices of a cold machine, and some.
pub const LIMIT: Duration = Duration::from_secs(30);

/// Makes a rank, and any probe, find that peers' writes do not arrive; for tests.
const VETO: &str = "FLUX_VETO_PEER";

/// Whether `FLUX_VETO_PEER=1` has this process find that peer access does not work.
pub fn vetoed() -> bool {
    is_one(std::env::var_os(VETO).as_deref())
}

/// Whether `NCCL_P2P_DISABLE=1`, in the environment or NCCL's files, forbids peer access.
pub fn forbidden() -> bool {
    is_one(Settings::read().get("NCCL_P2P_DISABLE").as_deref())
}

fn is_one(variable: Option<&OsStr>) -> bool {
    variable.and_then(OsStr::to_str).is_some_and(|value| value.trim().parse() == Ok(1))
}

/// Whether this program answers when it is started again.
static SERVES: AtomicBool = AtomicBool::new(false);

/// Makes this program its own probe. Call it first thing in `main`.
///
/// In a process that was started as a probe it answers on stdout and ends the process. In any other
/// it returns at once, and allows the program to be started again as a probe.
///
/// ```
/// flux_transport::probe::serve();
/// // ... the program
/// ```
pub fn serve() {
    SERVES.store(true, Ordering::Relaxed);
    let Some(text) = std::env::var_os(REQUEST).filter(|text| !text.is_empty()) else { return };
    // This process ends whatever the driver does. Without the thread the parent ends it.
    let _ = std::thread::Builder::new().spawn(|| {
        std::thread::sleep(LIMIT + Duration::from_secs(5));
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
    });
    let request = text.to_str().and_then(Request::decode);
    let unknown = || {
        ChildReport::Cannot(format!(
            "{REQUEST} is not a request of flux {}",
            env!("CARGO_PKG_VERSION")
        ))
    };
    let answer = request.map_or_else(unknown, |request| devices::ask(&request));
    let written = std::io::Write::write_all(&mut std::io::stdout(), answer.encode().as_bytes());
    #[allow(
        clippy::exit,
        reason = "a probe has nothing else to do, and what the driver left running ends with it"
    )]
    std::process::exit(i32::from(written.is_err()))
}

/// Whether these devices reach each other's memory. Takes little more than [`LIMIT`], usually no
/// time: answers are kept on disk.
///
/// `veto` makes a probe find that nothing arrives, for tests; that is not kept.
pub fn prove(devices: &[DeviceUuid], veto: bool) -> Proof {
    let mut devices = devices.to_vec();
    devices.sort();
    devices.dedup();
    if devices.len() < 2 {
        return Proof::without(Verdict::Works, "one device has no peers".to_owned());
    }
    let env = |name: &str| std::env::var_os(name);
    let own = std::env::current_exe().ok();
    let ways = Ways {
        cache: if veto { None } else { cache::folder(env).zip(CacheKey::here(&devices)) },
        program: program::find(env, own.as_deref(), SERVES.load(Ordering::Relaxed)),
        here: devices::ask,
    };
    ways.ask(&Request { devices, veto }, LIMIT)
}

#[cfg(test)]
mod tests {
    use super::report::tests::uuid;
    use super::*;

    #[test]
    fn a_switch_is_on_at_one_alone() {
        for (value, on) in [
            (None, false),
            (Some(""), false),
            (Some("0"), false),
            (Some("1"), true),
            (Some(" 1"), true),
            (Some("yes"), false),
        ] {
            assert_eq!(is_one(value.map(OsStr::new)), on, "{value:?}");
        }
    }

    #[test]
    fn one_device_needs_no_proof() {
        assert_eq!(prove(&[uuid(3), uuid(3)], false).verdict, Verdict::Works);
    }
}
