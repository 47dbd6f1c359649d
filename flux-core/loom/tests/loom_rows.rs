//! Rows that are their own signals, in every interleaving and with every stale read that the memory
//! model allows: polls, restored sentinels, and the writer's next call of the same half. A missing
//! fence of either kind must be found.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p flux-core-loom --release`
#![cfg(loom)]

use flux_core::layout::SENTINEL;
use flux_core::signal::Epoch;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use loom::thread;

/// Calls of a test: the third uses the half of the first, and the epoch wraps before the second.
const CALLS: usize = 3;
const FIRST: Epoch = Epoch::new(u32::MAX);

/// Which fences the kernels have.
#[derive(Clone, Copy)]
struct Fences {
    /// Of a storing thread, before its first row of a call.
    before_rows: bool,
    /// Of a polling thread, behind its last poll of a call.
    behind_polls: bool,
}

const SOUND: Fences = Fences { before_rows: true, behind_polls: true };

/// Two ranks, each with a word of rows in each half.
struct Machine {
    rows: [[AtomicU32; 2]; 2],
    /// Written by a rank when it restores the word of a call, and read by the peer before it stores
    /// that word again. A machine on which one need not precede the other may lose the row.
    restored: [[UnsafeCell<bool>; CALLS]; 2],
    /// The calls that a rank's storing thread may begin: its kernels are ordered.
    begun: AtomicU32,
}

impl Machine {
    fn new() -> Self {
        Self {
            rows: std::array::from_fn(|_| std::array::from_fn(|_| AtomicU32::new(SENTINEL))),
            restored: std::array::from_fn(|_| std::array::from_fn(|_| UnsafeCell::new(false))),
            begun: AtomicU32::new(0),
        }
    }

    fn word(&self, owner: usize, call: usize) -> &AtomicU32 {
        let epoch = FIRST.get().wrapping_add(call as u32);
        &self.rows[owner][Epoch::new(epoch).half()]
    }

    /// Stores a rank's row of a call at its peer.
    fn store(&self, rank: usize, call: usize, fences: Fences) {
        if fences.before_rows {
            fence(Ordering::AcqRel);
        }
        if let Some(last) = call.checked_sub(2) {
            // SAFETY: none is claimed: loom checks whether the peer's access precedes this.
            assert!(self.restored[1 - rank][last].with(|cell| unsafe { *cell }));
        }
        self.word(1 - rank, call).store(call as u32, Ordering::Relaxed);
    }

    /// Awaits the peer's row of a call, and restores its word.
    fn take(&self, rank: usize, call: usize, fences: Fences) {
        let word = self.word(rank, call);
        loop {
            match word.load(Ordering::Relaxed) {
                SENTINEL => thread::yield_now(),
                row => {
                    assert_eq!(row, call as u32, "a row of another call");
                    break;
                }
            }
        }
        if fences.behind_polls {
            fence(Ordering::AcqRel);
        }
        // SAFETY: as in `store`.
        self.restored[rank][call].with_mut(|cell| unsafe { *cell = true });
        word.store(SENTINEL, Ordering::Relaxed);
    }
}

/// One rank stores and polls by one thread, the other by two, whose calls are ordered as kernels
/// are: a thread stores rows of a call when the polls of the call before have ended.
fn exchange(fences: Fences) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let machine = Arc::new(Machine::new());
        let [storing, peer] = [(), ()].map(|()| Arc::clone(&machine));
        let threads = [
            thread::spawn(move || {
                for call in 0..CALLS {
                    while storing.begun.load(Ordering::Acquire) < call as u32 {
                        thread::yield_now();
                    }
                    storing.store(0, call, fences);
                }
            }),
            thread::spawn(move || {
                for call in 0..CALLS {
                    peer.store(1, call, fences);
                    peer.take(1, call, fences);
                }
            }),
        ];
        for call in 0..CALLS {
            machine.take(0, call, fences);
            machine.begun.store(call as u32 + 1, Ordering::Release);
        }
        for thread in threads {
            thread.join().expect("a rank ends");
        }
        for word in machine.rows.iter().flatten() {
            assert_eq!(word.load(Ordering::Relaxed), SENTINEL, "the region is as it was filled");
        }
    });
}

#[test]
fn every_row_arrives_once_and_its_word_is_free_when_its_writer_comes_again() {
    exchange(SOUND);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn rows_that_are_not_fenced_behind_restored_words_are_caught() {
    exchange(Fences { before_rows: false, ..SOUND });
}

#[test]
#[should_panic(expected = "Causality violation")]
fn polls_without_a_fence_behind_them_are_caught() {
    exchange(Fences { behind_polls: false, ..SOUND });
}
