//! Ending a process whose other threads may be inside the GPU's driver.
//!
//! Invariant: the process ends with the given status. `std::process::exit` and `main` run exit
//! handlers of the driver and NCCL under threads that still call them, and can crash.

use crate::out;
use flux_core::Rank;
use flux_transport::internal::control::ranks as named;
use rustix::process::Signal;
use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Time for other ranks of this process to report: ranks that wait for one another fail together.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Ends the process at once, without destructors and exit handlers, after flushing its output.
pub(crate) fn now(code: u8) -> ! {
    flush();
    signal_hook::low_level::exit(code.into())
}

/// Ends the process as `signal` does by default, after flushing its output.
pub(crate) fn by(signal: Signal) -> ! {
    flush();
    // It returns only for a signal that ends nothing.
    let _ = signal_hook::low_level::emulate_default_handler(signal.as_raw());
    now(u8::try_from(128 + signal.as_raw()).unwrap_or(1))
}

fn flush() {
    // A closed pipe changes nothing about the status.
    let _ = std::io::stdout().flush();
    let _ = std::io::stderr().flush();
}

/// Writes a line of this program to the standard error.
pub(crate) fn say(words: &str) {
    out::note(&format!("flux-bench: {words}"));
}

/// An error with its causes, each once: many errors repeat theirs.
pub(crate) fn words(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// What ranks say, in the order in which it is first said, each with all that say it.
#[derive(Debug, Default)]
pub(crate) struct Told(pub(crate) Vec<(Vec<Rank>, String)>);

impl Told {
    /// Whether `rank` is the first to say so.
    pub(crate) fn add(&mut self, rank: Rank, words: String) -> bool {
        if let Some((ranks, _)) = self.0.iter_mut().find(|(_, known)| *known == words) {
            ranks.push(rank);
            return false;
        }
        self.0.push((vec![rank], words));
        true
    }
}

/// Errors that ranks of this process gave up with.
static GIVEN_UP: Mutex<Told> = Mutex::new(Told(Vec::new()));

/// Reports what a rank failed with and ends the process, as its stream may wait in a collective of
/// NCCL for ever. It reports at once, before the rank leaves its world: a launcher ends a rank as
/// soon as another fails for want of it.
pub fn give_up(rank: Rank, error: &anyhow::Error) -> ! {
    {
        let mut told = GIVEN_UP.lock().unwrap_or_else(PoisonError::into_inner);
        if told.add(rank, words(error)) {
            say(&format!("rank {rank}: {}", words(error)));
        }
    }
    std::thread::sleep(LAST_WORDS);
    // Held to the end, so that no rank reports twice.
    let told = GIVEN_UP.lock().unwrap_or_else(PoisonError::into_inner);
    for (ranks, _) in &told.0 {
        if let [first, others @ ..] = &ranks[..]
            && !others.is_empty()
        {
            say(&format!("{}: the same as rank {first}", named(others)));
        }
    }
    now(1)
}

#[cfg(test)]
mod tests {
    use super::words;
    use std::io;

    #[derive(Debug, thiserror::Error)]
    #[error("{step}: {source}")]
    struct Says {
        step: &'static str,
        source: io::Error,
    }

    #[derive(Debug, thiserror::Error)]
    #[error("{step}")]
    struct SaysNot {
        step: &'static str,
        source: io::Error,
    }

    #[test]
    fn each_cause_is_said_once() {
        let source = || io::Error::other("no room");
        let step = "a step";
        assert_eq!(words(&Says { step, source: source() }.into()), "a step: no room");
        assert_eq!(words(&SaysNot { step, source: source() }.into()), "a step: no room");
        assert_eq!(
            words(&anyhow::Error::from(Says { step, source: source() }).context("outside")),
            "outside: a step: no room"
        );
    }
}
