//! Signals that end a run from outside.
//!
//! Invariant: whoever waits for a rank checks for a signal, so an interrupted run leaves neither
//! ranks nor files behind.

use anyhow::bail;
use flux_transport::launch::Signals;
use rustix::process::Signal;
use std::io;
use std::sync::{Arc, OnceLock};

/// Whether a signal has come that ends the run; for all who wait.
#[derive(Clone, Debug)]
pub(super) struct Interrupt(Arc<Noted>);

#[derive(Debug)]
struct Noted {
    signals: Signals,
    first: OnceLock<Signal>,
}

impl Interrupt {
    /// Notes what comes from here on, for as long as a copy of this lives.
    pub(super) fn catch() -> io::Result<Self> {
        Ok(Self(Arc::new(Noted { signals: Signals::catch()?, first: OnceLock::new() })))
    }

    pub(super) fn came(&self) -> Option<Signal> {
        let Noted { signals, first } = &*self.0;
        if let Some(signal) = first.get().copied().or_else(|| signals.take()) {
            return Some(*first.get_or_init(|| signal));
        }
        None
    }

    pub(super) fn check(&self) -> anyhow::Result<()> {
        match self.came() {
            Some(signal) => bail!("ended by signal {}", signal.as_raw()),
            None => Ok(()),
        }
    }
}
