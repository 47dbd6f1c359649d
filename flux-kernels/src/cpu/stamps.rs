//! Time stamps of a call's workers.
//!
//! Invariant: a worker records into memory of its own, and shows it when it has left the call. A
//! call that is not traced reads no clock.

use crate::abi::{ItemStamps, Stamps, WorkerStamps};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Instant;

/// Where stamps count from; no stamp is 0.
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// What the workers of a traced call have recorded, by their numbers.
#[derive(Debug, Default)]
pub(super) struct Recorded(Mutex<Vec<(usize, WorkerStamps, Vec<ItemStamps>)>>);

/// One worker's recorder.
pub(super) struct Recorder<'a> {
    to: Option<&'a Recorded>,
    life: WorkerStamps,
    items: Vec<ItemStamps>,
}

impl<'a> Recorder<'a> {
    /// Of a worker that begins, in a call that is traced where there is somewhere to record `to`.
    pub(super) fn begin(to: Option<&'a Recorded>) -> Self {
        let mut recorder = Self { to, life: WorkerStamps::default(), items: Vec::new() };
        recorder.life.entered = recorder.now();
        recorder
    }

    /// The time in nanoseconds, or 0 in a call that is not traced.
    pub(super) fn now(&self) -> u64 {
        let nanoseconds = || START.elapsed().as_nanos() as u64 + 1;
        self.to.map_or(0, |_| nanoseconds())
    }

    /// The item with these stamps is done; whether it awaited rows of peers.
    pub(super) fn done(&mut self, stamps: ItemStamps, awaited: bool) {
        if self.to.is_none() {
            return;
        }
        if awaited && self.life.first_rows == 0 {
            self.life.first_rows = stamps.rows_there;
        }
        self.items.push(stamps);
    }

    /// The worker with this number has left the call.
    pub(super) fn left(mut self, number: usize) {
        self.life.left = self.now();
        if let Some(to) = self.to {
            let mut all = to.0.lock().unwrap_or_else(PoisonError::into_inner);
            all.push((number, self.life, self.items));
        }
    }
}

impl Recorded {
    /// The stamps, when all workers have left.
    pub(super) fn stamps(self) -> Stamps {
        let mut all = self.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        all.sort_by_key(|&(number, ..)| number);
        let turns = all.iter().map(|(.., items)| items.len()).max().unwrap_or(0);
        let turn = |turn| all.iter().filter_map(move |(.., items)| items.get(turn).copied());
        Stamps {
            items: (0..turns).flat_map(turn).collect(),
            workers: all.iter().map(|&(_, life, _)| life).collect(),
        }
    }
}
