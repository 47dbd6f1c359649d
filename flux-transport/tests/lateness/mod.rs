//! Time limits of tests, for machines that are busy with other things.
//!
//! How to choose a limit:
//! - A wait that only a hang makes long ends after [`AMPLE`].
//! - A test that something happens soon asserts the order of events or the kind of error. Where
//!   only time tells, it calls [`assert_soon`], whose limit scales with how late the machine is.
//! - A deadline that healthy ranks have to keep is [`scaled`].
//! - A lower limit is exact: no machine makes a wait shorter.
//!
//! Not part of any crate: roots of test programs and of unit tests include it by `#[path]`.
#![allow(dead_code, reason = "each program uses a part")]
#![allow(clippy::unwrap_used, reason = "helpers of tests: a panic is a failed test")]

use rustix::time::{ClockId, clock_gettime};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// For waits that end soon unless something hangs.
pub(crate) const AMPLE: Duration = Duration::from_mins(1);

/// Set for the processes that a test starts: the lateness that it measured, so that all have the
/// same deadlines.
pub(crate) const VARIABLE: &str = "FLUX_TEST_LATENESS";

/// CPU time of a measurement, more than a scheduler's time slice.
const WORK: Duration = Duration::from_millis(20);

/// Fails where something took `limit` or longer; on a late machine, as many times longer as it is
/// late.
#[track_caller]
pub(crate) fn assert_soon(took: Duration, limit: Duration) {
    if let Err(why) = soon(took, limit, || lateness().max(of_process())) {
        panic!("{why}");
    }
}

/// Whether something took less than `limit`, or than as many times longer as the machine is late,
/// which is measured where it matters.
pub(crate) fn soon(
    took: Duration,
    limit: Duration,
    late: impl FnOnce() -> f64,
) -> Result<(), String> {
    if took < limit {
        return Ok(());
    }
    let late = late();
    if took < limit.mul_f64(late) {
        return Ok(());
    }
    Err(format!("{took:?}: the limit is {limit:?}, on a machine that is {late:.1} times late"))
}

/// `time`, or on a late machine as many times longer as it is late; the same for all of a process.
pub(crate) fn scaled(time: Duration) -> Duration {
    time.mul_f64(of_process())
}

/// How late the machine is, as the process that started this one found it, or this one at its first
/// question.
pub(crate) fn of_process() -> f64 {
    static LATENESS: OnceLock<f64> = OnceLock::new();
    let said = || std::env::var(VARIABLE).ok().map(|said| said.parse().unwrap());
    *LATENESS.get_or_init(|| said().unwrap_or_else(lateness))
}

/// How many times longer the machine takes for work, or for a wake-up, than one that is idle: 1 at
/// least.
fn lateness() -> f64 {
    // On all cores, as one that is idle would hide that the others are not.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..cores).map(|_| scope.spawn(|| of_work().max(of_sleep()))).collect();
        worst(threads.into_iter().map(|thread| thread.join().unwrap()))
    })
}

/// The lateness of a machine whose measurements took so many times longer than on one that is idle.
pub(crate) fn worst(measured: impl Iterator<Item = f64>) -> f64 {
    let late = measured.fold(1.0, f64::max);
    // Unloaded machines have ticks and interrupts.
    if late < 1.25 { 1.0 } else { late }
}

fn of_work() -> f64 {
    let (began, until) = (Instant::now(), cpu_time() + WORK);
    while cpu_time() < until {
        std::hint::spin_loop();
    }
    began.elapsed().div_duration_f64(WORK)
}

fn of_sleep() -> f64 {
    let began = Instant::now();
    std::thread::sleep(WORK);
    began.elapsed().div_duration_f64(WORK)
}

/// Of the calling thread.
fn cpu_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap()
}
