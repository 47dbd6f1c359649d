//! Reports a rank's step, progress and last calls, when asked by a signal.
//!
//! Invariant: a thread of its own answers and waits for no other thread of the rank. The signal's
//! handler only writes a byte.

use crate::end;
use flux_transport::{CallRecord, CallState, Communicator};
use signal_hook::consts::SIGUSR1;
use std::fmt::Write;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Calls in a report.
const CALLS: usize = 4;

#[derive(Debug)]
pub(super) struct ProgressReporter {
    seen: Mutex<Seen>,
}

#[derive(Debug)]
struct Seen {
    step: &'static str,
    since: Instant,
    comm: Option<Communicator>,
}

impl ProgressReporter {
    /// Answers `SIGUSR1` from here on.
    pub(super) fn start() -> std::io::Result<Arc<Self>> {
        let this = Arc::new(Self {
            seen: Mutex::new(Seen { step: "starts", since: Instant::now(), comm: None }),
        });
        let (mut asked, ask) = UnixStream::pair()?;
        signal_hook::low_level::pipe::register(SIGUSR1, ask)?;
        let progress = Arc::clone(&this);
        std::thread::Builder::new().name("progress".to_owned()).spawn(move || {
            while asked.read_exact(&mut [0]).is_ok() {
                progress.report();
            }
        })?;
        Ok(this)
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        // Every field is whole after every line below.
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rank begins a step.
    pub(super) fn step(&self, step: &'static str) {
        let mut seen = self.seen();
        (seen.step, seen.since) = (step, Instant::now());
    }

    /// The rank's communicator from here on; none, and the one before may end.
    pub(super) fn uses(&self, comm: Option<Communicator>) {
        let before = std::mem::replace(&mut self.seen().comm, comm);
        // Outside the lock: it may be the last to let go of it.
        drop(before);
    }

    fn report(&self) {
        let (words, comm) = {
            let seen = self.seen();
            (
                format!("{}, for {:.3} s", seen.step, seen.since.elapsed().as_secs_f64()),
                seen.comm.clone(),
            )
        };
        let Some(comm) = comm else {
            end::say(&format!("a rank without a communicator: {words}"));
            return;
        };
        let rank = comm.rank();
        end::say(&format!("rank {rank}: {words}{}", reported(comm.progress(), &comm.calls())));
        // Last, as it asks the peers.
        match comm.status() {
            Ok(()) => end::say(&format!("rank {rank} knows of no fault")),
            Err(fault) => end::say(&format!("rank {rank} knows of a fault: {fault}")),
        }
    }
}

/// The side stream's place and the last calls, in words.
fn reported(progress: Option<String>, calls: &[CallRecord]) -> String {
    let mut words = progress.map(|place| format!("; {place}")).unwrap_or_default();
    for call in &calls[calls.len().saturating_sub(CALLS)..] {
        let (begun, noted) = (call.begun.as_secs_f64(), call.noted.as_secs_f64());
        // Writing to a string does not fail.
        let _ = match call.state {
            CallState::Begun => {
                write!(words, "; {call}: being made since {begun:.6} s, at {noted:.6} s")
            }
            state => {
                write!(words, "; {call}: {state:?}, begun at {begun:.6} s, so since {noted:.6} s")
            }
        };
    }
    words
}
