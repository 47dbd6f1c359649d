//! Waits that end: each sees its word, the rank's poison, the abort word and the clock.
//!
//! Invariant: the first wait of a rank that fails, and only that one, writes the fault record; a rank whose poison word is set publishes
//! nothing more.

use super::HostMemory;
use super::error::ExecuteError;
use super::memory::{FAULT_WORDS, Word};
use flux_core::layout::{FaultRecord, fault};
use flux_core::signal::Epoch;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The rank is poisoned: leave the call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Poisoned;

/// What a word that is waited for says once it is reached.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wait {
    /// `peer` has raised this signal.
    Signal { index: u32, peer: u32 },
    /// `peer` has consumed an epoch's half.
    Consumed { peer: u32 },
    /// The own mover has finished reading `x`.
    Pushed,
}

/// The waits of one rank in one call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiter<'a> {
    pub(super) memory: HostMemory<'a>,
    pub(super) rank: u32,
    /// Of the call.
    pub(super) epoch: Epoch,
}

impl Waiter<'_> {
    /// Returns once the word has reached `expected`; what its writer published is then visible.
    pub(super) fn until(&self, wait: Wait, expected: Epoch) -> Result<(), Poisoned> {
        let word = match wait {
            Wait::Signal { index, .. } => Word::Signal { rank: self.rank, index },
            Wait::Consumed { peer } => Word::Consumed { rank: self.rank, writer: peer },
            Wait::Pushed => Word::Pushed,
        };
        let word = self.memory.word(word);
        let mut pause = Pause::default();
        let mut started = None;
        loop {
            // Acquire: pairs with the writer's release, so that the payload before it is visible after this.
            let seen = word.load(Ordering::Acquire);
            if expected.reached_by(seen) {
                return Ok(());
            }
            self.poison()?;
            let abort = self.memory.word(Word::Abort).load(Ordering::Acquire);
            if abort != 0 {
                return Err(self.fail(wait, expected, seen, fault::ABORTED, abort));
            }
            if started.get_or_insert_with(Instant::now).elapsed() >= self.memory.deadline() {
                return Err(self.fail(wait, expected, seen, fault::TIMEOUT, 0));
            }
            pause.once();
        }
    }

    /// Whether the rank may go on.
    pub(super) fn poison(&self) -> Result<(), Poisoned> {
        match self.memory.word(Word::Poison).load(Ordering::Acquire) {
            0 => Ok(()),
            _ => Err(Poisoned),
        }
    }

    fn fail(&self, wait: Wait, expected: Epoch, seen: u32, code: u32, abort: u32) -> Poisoned {
        let poison = self.memory.word(Word::Poison);
        if poison.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return Poisoned;
        }
        let (wait, peer, signal) = match wait {
            Wait::Signal { index, peer } => (fault::SIGNAL, peer, index),
            Wait::Consumed { peer } => (fault::CONSUMED, peer, 0),
            Wait::Pushed => (fault::PUSHED, self.rank, 0),
        };
        let record = FaultRecord {
            state: 1,
            code,
            wait,
            rank: self.rank,
            peer,
            signal,
            expected: expected.get(),
            seen,
            epoch: self.epoch.get(),
            abort,
            reserved: [0; 6],
        };
        let words: [u32; FAULT_WORDS as usize] = bytemuck::cast(record);
        for (index, word) in (0..FAULT_WORDS).zip(words).skip(1) {
            self.memory.word(Word::Fault(index)).store(word, Ordering::Relaxed);
        }
        // Release: whoever sees the state sees the fields.
        self.memory.word(Word::Fault(0)).store(words[0], Ordering::Release);
        Poisoned
    }

    /// The error that the rank's fault record describes.
    pub(super) fn error(&self) -> ExecuteError {
        let mut words = [0u32; FAULT_WORDS as usize];
        words[0] = self.memory.word(Word::Fault(0)).load(Ordering::Acquire);
        for (index, word) in (0..).zip(&mut words).skip(1) {
            *word = self.memory.word(Word::Fault(index)).load(Ordering::Relaxed);
        }
        ExecuteError::from_record(&bytemuck::cast(words), self.rank)
    }
}

/// Raises a word to the call's epoch: everything before is visible to whoever sees it.
pub(super) fn publish(word: &AtomicU32, epoch: Epoch) {
    word.store(epoch.get(), Ordering::Release);
}

/// Waits shorter and longer: ranks outnumber the cores of a machine without GPUs, so a waiter soon gives its core away.
#[derive(Default)]
struct Pause(u32);

impl Pause {
    const SPINS: u32 = 64;
    const YIELDS: u32 = 256;
    const NAP: Duration = Duration::from_micros(50);

    fn once(&mut self) {
        match self.0 {
            0..Self::SPINS => std::hint::spin_loop(),
            Self::SPINS..Self::YIELDS => std::thread::yield_now(),
            _ => return std::thread::sleep(Self::NAP),
        }
        self.0 += 1;
    }
}
