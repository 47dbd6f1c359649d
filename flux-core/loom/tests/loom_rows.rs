//! Rows that are their own signals: polls, restored sentinels, and the writer's next call of the
//! same half. Every interleaving is tried, with every stale read that the memory model allows. A
//! missing fence of either kind must be found.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p flux-core-loom --release`
#![cfg(loom)]

use flux_core::layout::SENTINEL;
use flux_core::signal::Epoch;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use loom::thread;
use std::ops::Range;

/// Calls of a test: the third uses the half of the first, and the epoch wraps before the second.
const CALLS: usize = 3;
const FIRST: Epoch = Epoch::new(u32::MAX);

/// Which fences the kernels have: of each the half that the rules need. The kernels' do both, but
/// a fence of one thread acquires nothing that another has read, as loom would have it.
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
}

impl Machine {
    fn new() -> Self {
        Self {
            rows: std::array::from_fn(|_| std::array::from_fn(|_| AtomicU32::new(SENTINEL))),
            restored: std::array::from_fn(|_| std::array::from_fn(|_| UnsafeCell::new(false))),
        }
    }

    fn word(&self, owner: usize, call: usize) -> &AtomicU32 {
        let epoch = FIRST.get().wrapping_add(call as u32);
        &self.rows[owner][Epoch::new(epoch).half()]
    }

    /// Stores a rank's row of a call at its peer.
    fn store(&self, rank: usize, call: usize, fences: Fences) {
        if fences.before_rows {
            fence(Ordering::Release);
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
            fence(Ordering::Acquire);
        }
        // SAFETY: none is claimed: loom checks whether another thread has the cell.
        self.restored[rank][call].with_mut(|cell| unsafe { *cell = true });
        word.store(SENTINEL, Ordering::Relaxed);
    }
}

/// Three calls of both ranks. One has another thread for its last call, which begins when those
/// before have ended, as a kernel does: what that stores follows what another thread has polled.
fn exchange(fences: Fences) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(move || {
        let machine = Arc::new(Machine::new());
        let calls = move |machine: &Machine, rank, calls: Range<usize>| {
            for call in calls {
                machine.store(rank, call, fences);
                machine.take(rank, call, fences);
            }
        };
        let [peer, last] = [(), ()].map(|()| Arc::clone(&machine));
        let peer = thread::spawn(move || calls(&peer, 1, 0..CALLS));
        calls(&machine, 0, 0..CALLS - 1);
        let last = thread::spawn(move || calls(&last, 0, CALLS - 1..CALLS));
        for thread in [peer, last] {
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
