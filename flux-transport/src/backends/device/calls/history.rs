//! The op-sequence hash: ranks compare it where no kernel reaches another's pad.
//!
//! Invariant: a call's hash covers all calls before it, so ranks that made other calls differ from
//! then on. It is published before anything of the call that reaches a peer.

use flux_core::Rank;
use flux_core::layout::{FaultRecord, fault};
use flux_core::signal::Epoch;
use std::sync::atomic::{AtomicU64, Ordering};

/// Calls that are remembered. Hosts run ahead by what a driver queues, about a thousand calls, so
/// two ranks always share a remembered call.
const CALLS: usize = 4096;

/// Appends a call of `op` to `history`. Never 0, which stands for nothing.
fn then(history: u32, op: u32) -> u32 {
    // FNV-1a, continued. Steps are invertible, so different histories stay different; others
    // collide once in 2^32.
    let step = |history| {
        op.to_le_bytes()
            .iter()
            .fold(history, |hash: u32, &byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
    };
    // 0 is replaced by its own successor, which follows no other history.
    Some(step(history)).filter(|&next| next != 0).unwrap_or_else(|| step(0))
}

/// A call, and which ops it and those before it were of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpHash {
    epoch: Epoch,
    history: u32,
}

impl OpHash {
    /// Where nothing was said yet, before call `first`.
    pub(crate) const fn before(first: Epoch) -> Self {
        Self { epoch: first.before(1), history: 0 }
    }

    /// In one word, so that nobody reads half of it; the call's number comes first in memory.
    pub(crate) const fn word(self) -> u64 {
        (self.history as u64) << 32 | self.epoch.get() as u64
    }

    pub(crate) const fn from_word(word: u64) -> Self {
        Self { epoch: Epoch::new(word as u32), history: (word >> 32) as u32 }
    }

    /// Whether nothing has been said of call `epoch` yet.
    pub(crate) const fn precedes(self, epoch: Epoch) -> bool {
        self.epoch.is_before(epoch)
    }

    /// The call that was spoken of.
    pub(crate) const fn epoch(self) -> Epoch {
        self.epoch
    }

    /// What was said of the ops of the calls up to it.
    pub(crate) const fn history(self) -> u32 {
        self.history
    }
}

/// What a rank has said of its last calls: words that its host alone writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpHashes<'w>(&'w [AtomicU64]);

impl<'w> OpHashes<'w> {
    /// Words needed: one for each remembered call, and the last again.
    pub(crate) const WORDS: usize = CALLS + 1;

    pub(crate) fn new(words: &'w [AtomicU64]) -> Self {
        assert_eq!(words.len(), Self::WORDS, "of each call, and the last");
        Self(words)
    }

    /// Says that call `epoch` is of the op with this number.
    pub(crate) fn say(self, epoch: Epoch, op: u32) {
        let said = OpHash { epoch, history: then(self.last().history, op) };
        for place in [epoch.get() as usize % CALLS, CALLS] {
            self.0[place].store(said.word(), Ordering::Release);
        }
    }

    pub(crate) fn last(self) -> OpHash {
        OpHash::from_word(self.0[CALLS].load(Ordering::Acquire))
    }

    fn of(self, epoch: Epoch) -> Option<OpHash> {
        let said = OpHash::from_word(self.0[epoch.get() as usize % CALLS].load(Ordering::Acquire));
        (said.epoch == epoch).then_some(said)
    }

    /// That `peer` says other calls than this rank, `rank`.
    pub(crate) fn against(self, rank: Rank, peer: Rank, theirs: Self) -> Option<FaultRecord> {
        let (own, last) = (self.last(), theirs.last());
        let both = if own.precedes(last.epoch) { own } else { last };
        self.against_one(rank, peer, theirs.of(both.epoch)?)
    }

    /// The same of what `peer` has said of one call.
    pub(crate) fn against_one(self, rank: Rank, peer: Rank, theirs: OpHash) -> Option<FaultRecord> {
        let own = self.of(theirs.epoch).filter(|own| own.history != theirs.history)?;
        let (code, wait, rank, peer, epoch) =
            (fault::DISAGREED, fault::CALL, rank.get(), peer.get(), own.epoch.get());
        Some(FaultRecord {
            state: 1,
            code,
            wait,
            rank,
            peer,
            epoch,
            expected: own.history,
            seen: theirs.history,
            ..FaultRecord::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const RANKS: [Rank; 2] = [Rank::new(0), Rank::new(1)];

    /// What two ranks say, who have said nothing yet of call `first`.
    fn words(first: Epoch) -> [Vec<AtomicU64>; 2] {
        [0, 1].map(|_| {
            (0..OpHashes::WORDS).map(|_| AtomicU64::new(OpHash::before(first).word())).collect()
        })
    }

    fn found(words: &[Vec<AtomicU64>; 2]) -> Option<u32> {
        let [a, b] = words.each_ref().map(|words| OpHashes::new(words));
        let records = [a.against(RANKS[0], RANKS[1], b), b.against(RANKS[1], RANKS[0], a)];
        for (record, rank) in records.iter().flatten().zip(RANKS) {
            assert_eq!(
                (record.state, record.code, record.wait, record.rank),
                (1, fault::DISAGREED, fault::CALL, rank.get())
            );
        }
        let [a, b] = records.map(|record| record.map(|record| record.epoch));
        assert_eq!(a, b, "both find it");
        a
    }

    #[test]
    fn nothing_is_made_of_what_was_not_said() {
        for first in [Epoch::new(0), Epoch::FIRST, Epoch::new(u32::MAX)] {
            let words = words(first);
            assert_eq!(found(&words), None);
            OpHashes::new(&words[0]).say(first, 7);
            assert_eq!(found(&words), None, "the peer has not come to the call");
            OpHashes::new(&words[1]).say(first, 8);
            assert_eq!(found(&words), Some(first.get()));
        }
    }

    #[test]
    fn histories_that_differ_stay_different_over_calls_that_are_the_same() {
        let histories = 1 << 18;
        let after: BTreeSet<u32> =
            (0..histories).map(|i: u32| then(i.wrapping_mul(0x9e37_79b1), 7)).collect();
        assert_eq!(after.len(), histories as usize);
    }

    #[test]
    fn what_is_said_is_never_0() {
        // Undone from 0, which the last byte of the op's number alone cannot be.
        let inverse = (0..5).fold(1_u32, |inverse, _| {
            inverse.wrapping_mul(2_u32.wrapping_sub(inverse.wrapping_mul(0x0100_0193)))
        });
        let before = 7_u32
            .to_le_bytes()
            .iter()
            .rev()
            .fold(0_u32, |hash, &byte| hash.wrapping_mul(inverse) ^ u32::from(byte));
        assert!(before != 0 && then(before, 7) == then(0, 7) && then(0, 7) != 0);
        assert_ne!(then(before, 8), then(0, 8), "histories meet nowhere else");
    }

    #[test]
    fn a_word_is_what_was_said_with_the_call_first() {
        let said = OpHash { epoch: Epoch::new(7), history: 9 };
        assert_eq!(OpHash::from_word(said.word()), said);
        assert_eq!(said.word().to_le_bytes()[..4], 7_u32.to_le_bytes());
    }

    proptest! {
        #[test]
        fn other_calls_are_found_however_late_and_the_same_never(
            ops in prop::collection::vec(1u32.., 2..20),
            at in any::<prop::sample::Index>(),
            first: u32,
            same in 0u32..5000,
            ahead in 0u32..4000,
        ) {
            let at = at.index(ops.len() - 1);
            let mut other = ops.clone();
            other.swap(at, at + 1);
            for theirs in [&ops, &other] {
                let words = words(Epoch::new(first));
                for (words, calls) in words.iter().zip([&ops, theirs]) {
                    let mut epoch = Epoch::new(first);
                    for op in calls.iter().copied().chain((0..same).map(|_| 5)) {
                        OpHashes::new(words).say(epoch, op);
                        epoch = epoch.next();
                    }
                }
                // One host is ahead of the other.
                for _ in 0..ahead {
                    let words = OpHashes::new(&words[0]);
                    words.say(words.last().epoch.next(), 6);
                }
                let last = first.wrapping_add(ops.len() as u32 + same - 1);
                prop_assert_eq!(found(&words), (*theirs != ops).then_some(last));
            }
        }

        #[test]
        fn one_call_of_a_peer_is_compared_with_the_own(
            ops in prop::collection::vec(1u32.., 1..20),
            first: u32,
            last: u32,
        ) {
            let words = words(Epoch::new(first));
            let own = OpHashes::new(&words[0]);
            let calls: Vec<OpHash> = (0..)
                .zip(&ops)
                .map(|(i, &op)| {
                    own.say(Epoch::new(first.wrapping_add(i)), op);
                    own.last()
                })
                .collect();
            for said in calls {
                prop_assert_eq!(own.against_one(RANKS[0], RANKS[1], said), None);
                let other = OpHash { history: said.history.wrapping_add(last.max(1)), ..said };
                prop_assert_eq!(
                    own.against_one(RANKS[0], RANKS[1], other).map(|record| record.epoch),
                    Some(said.epoch.get())
                );
            }
        }
    }
}
