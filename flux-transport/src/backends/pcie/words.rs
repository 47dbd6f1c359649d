//! Words in host memory: those that this rank's streams wait for, and those by which ranks say that
//! they gave up.
//!
//! Invariant: a rank sets `broken` before it releases its own streams, and a stream copies the
//! kernel's poison before a shard. Whoever received worthless data finds either word before it
//! takes the call for finished.

use super::layout::{BROKEN, POISONED};
use super::region::PinnedRegion;
use crate::backends::device::calls::AHEAD;
use crate::reason;
use flux_core::Rank;
use flux_core::layout::{FaultRecord, fault, pad_bytes, signal_offset};
use flux_core::signal::Epoch;
use flux_cuda::{PinnedBlock, host_size};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The driver's comparison: the word is `value` or ahead of it, modulo 2^32.
#[cfg(test)]
pub(super) fn reached(word: u32, value: u32) -> bool {
    word.wrapping_sub(value).cast_signed() >= 0
}

/// The value that ends waits for `last` and the calls before it, whatever the word held.
pub(super) fn ending(last: u32) -> u32 {
    last.wrapping_add(AHEAD)
}

/// Why a rank has given up, by its two words; 0 where it has not.
fn reason_of(broken: u32, poisoned: u32) -> u32 {
    match (broken, poisoned) {
        // The kernel's word has no reason. A running host adds it a moment later.
        (0, 1..) => reason::TIMED_OUT,
        (reason, _) => reason,
    }
}

#[derive(Debug)]
pub(super) struct Words {
    rank: u32,
    signals: u32,
    regions: Vec<Arc<PinnedRegion>>,
    /// A pad for each rank, for the signals that the own kernel raises in its place; then the word
    /// that counts calls done.
    local: PinnedBlock,
}

impl Words {
    pub(super) fn local_bytes(world: usize, signals: u32) -> u64 {
        world as u64 * pad_bytes(signals) + 4
    }

    /// Takes all ranks' regions and a block of [`local_bytes`](Self::local_bytes), all words at
    /// `initial`.
    pub(super) fn new(
        rank: u32,
        signals: u32,
        regions: Vec<Arc<PinnedRegion>>,
        local: PinnedBlock,
        initial: u32,
    ) -> Self {
        let words = Self { rank, signals, regions, local };
        for offset in (0..Self::local_bytes(words.regions.len(), signals)).step_by(4) {
            words.local_word(offset).store(initial, Ordering::Relaxed);
        }
        words
    }

    fn local_word(&self, offset: u64) -> &AtomicU32 {
        self.local.word(host_size(offset))
    }

    pub(super) fn regions(&self) -> &[Arc<PinnedRegion>] {
        &self.regions
    }

    pub(super) fn local_pad(&self, rank: u32) -> u64 {
        self.local.address() + u64::from(rank) * pad_bytes(self.signals)
    }

    /// The words of all pads that stand for peers', for the device: the first, and how many.
    pub(super) fn local_words(&self) -> (u64, usize) {
        (self.local.address(), host_size(self.finished_offset() / 4))
    }

    fn finished_offset(&self) -> u64 {
        self.regions.len() as u64 * pad_bytes(self.signals)
    }

    /// Where the side streams say that they are done with a call, for the device.
    pub(super) fn finished_address(&self) -> u64 {
        self.local.address() + self.finished_offset()
    }

    /// The last call that the side streams are done with.
    pub(super) fn finished(&self) -> u32 {
        self.local_word(self.finished_offset()).load(Ordering::Acquire)
    }

    fn peers(&self) -> impl Iterator<Item = (u32, &PinnedRegion)> {
        (0..)
            .zip(&self.regions)
            .filter(|&(peer, _)| peer != self.rank)
            .map(|(peer, region)| (peer, &**region))
    }

    /// Says that this rank has given up, for a reason that is not 0. The first stays.
    pub(super) fn give_up(&self, reason: u32) {
        let word = self.regions[self.rank as usize].word(BROKEN);
        let _ = word.compare_exchange(0, reason, Ordering::SeqCst, Ordering::Relaxed);
    }

    /// Releases waits of this rank's streams up to call `last`, after [`give_up`](Self::give_up).
    /// Repeated until the streams are through, as a running peer may set a word back.
    pub(super) fn end_waits(&self, last: u32) {
        let value = ending(last);
        for (peer, _) in self.peers() {
            for (signal, half) in (0..self.signals).flat_map(|signal| [(signal, 0), (signal, 1)]) {
                self.local_word(
                    u64::from(peer) * pad_bytes(self.signals) + signal_offset(signal, half),
                )
                .store(value, Ordering::Release);
            }
        }
        for (_, region) in self.peers() {
            for signal in 0..self.signals {
                region.word(region.layout.flag(self.rank, signal)).store(value, Ordering::Release);
            }
        }
    }

    /// Publishes the op of call `epoch`, before anything of it that reaches a peer.
    pub(super) fn say(&self, epoch: Epoch, op: u32) {
        self.regions[self.rank as usize].op_hashes().say(epoch, op);
    }

    /// A peer whose calls are not of the ops that this rank's are of.
    pub(super) fn disagreement(&self) -> Option<FaultRecord> {
        let (rank, own) = (Rank::new(self.rank), self.regions[self.rank as usize].op_hashes());
        self.peers()
            .find_map(|(peer, region)| own.against(rank, Rank::new(peer), region.op_hashes()))
    }

    /// A peer that gave up before calls ended without an own fault: it may have sent anything.
    pub(super) fn fault_of_a_peer(&self) -> Option<FaultRecord> {
        let said = |region: &PinnedRegion, word| region.word(word).load(Ordering::SeqCst);
        let broken = |(peer, region): (u32, &PinnedRegion)| match reason_of(
            said(region, BROKEN),
            said(region, POISONED),
        ) {
            0 => None,
            abort => Some(FaultRecord {
                state: 1,
                code: fault::ABORTED,
                rank: peer,
                peer,
                abort,
                ..FaultRecord::default()
            }),
        };
        self.peers().find_map(broken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_rank_whose_host_says_nothing_has_given_up_where_its_kernel_has() {
        let reasons = [(0, 0), (0, 1), (reason::PANICKED, 0), (reason::PANICKED, 1)]
            .map(|(broken, poisoned)| reason_of(broken, poisoned));
        assert_eq!(reasons, [0, reason::TIMED_OUT, reason::PANICKED, reason::PANICKED]);
    }

    proptest! {
        #[test]
        fn an_ended_wait_is_over_and_a_waiting_one_is_not(
            last: u32,
            calls in 0u32..1 << 20, ahead in 1u32..4,
        ) {
            for awaited in [last, last.wrapping_sub(calls)] {
                prop_assert!(reached(ending(last), awaited));
            }
            prop_assert!(
                reached(last, last) && !reached(last, last.wrapping_add(ahead)),
                "also where the numbers wrap",
            );
        }
    }
}
