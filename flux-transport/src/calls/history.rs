//! Which ops a rank's calls were of, in order, as one number that ranks compare where none reaches another's pads.
//!
//! Invariant: what a rank says is of the last call of each half, and the number of a call covers all calls before it. So ranks that made other calls, or the same
//! in another order, say other numbers from the first such call on, whenever they are compared: nobody has to look after each call. Ranks are at most one call apart, so of
//! two that are compared there is always a call of which both have said something.

use flux_core::Rank;
use flux_core::layout::{FaultRecord, fault};
use flux_core::signal::Epoch;
use std::sync::atomic::{AtomicU32, Ordering};

/// Words that a rank says of a call.
pub(crate) const SAID_WORDS: usize = 3;
/// Bytes of what a rank says: of the last call of each half.
pub(crate) const SAID_BYTES: u64 = 2 * SAID_STRIDE;
/// Bytes from what it says of a call of one half to that of the other.
const SAID_STRIDE: u64 = 16;

/// The offset of what is said of call `epoch`, from the first of those bytes.
pub(crate) const fn said_offset(epoch: Epoch) -> u64 {
    epoch.half() as u64 * SAID_STRIDE
}

/// The calls that a rank has made over one workspace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct History(u32);

impl History {
    /// After one more call, of the op with this number.
    #[must_use]
    pub(crate) fn then(self, op: u32) -> Self {
        // FNV-1a of the bytes of both. Two sequences of calls have the same number once in 2^32.
        let bytes = [self.0, op].map(u32::to_le_bytes);
        Self(bytes.as_flattened().iter().fold(0x811c_9dc5, |hash, &byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)))
    }

    /// What a rank with these calls says of the last, `epoch`. The third word is of the others: words that are read while they change do not fit each other.
    pub(crate) const fn said(self, epoch: Epoch) -> [u32; SAID_WORDS] {
        [epoch.get(), self.0, check(epoch.get(), self.0)]
    }
}

/// Never 0 of words that are: memory that nobody has written says nothing.
const fn check(epoch: u32, history: u32) -> u32 {
    !(epoch ^ history.rotate_left(16))
}

/// The words by which a rank says what its last calls were, by half.
pub(crate) type Said<'w> = [[&'w AtomicU32; SAID_WORDS]; 2];

/// Those words, each of which `word` finds at its offset from the first.
pub(crate) fn said<'w>(word: impl Fn(u64) -> &'w AtomicU32) -> Said<'w> {
    [0, 1].map(|half| [0, 1, 2].map(|place| word(half * SAID_STRIDE + 4 * place)))
}

/// The call of which the words say something, and its history; `None` where nothing was said, or it is changing.
fn read(words: [&AtomicU32; SAID_WORDS]) -> Option<(u32, u32)> {
    let [epoch, history, sum] = words.map(|word| word.load(Ordering::Acquire));
    (sum == check(epoch, history)).then_some((epoch, history))
}

/// The first of `peers` that says other calls than `rank` itself does, as `own`.
pub(crate) fn disagreement<'w>(rank: Rank, own: Said<'w>, peers: impl IntoIterator<Item = (Rank, Said<'w>)>) -> Option<FaultRecord> {
    let differ = |(own, theirs): ([&AtomicU32; SAID_WORDS], [&AtomicU32; SAID_WORDS])| {
        let ((epoch, expected), (of, seen)) = (read(own)?, read(theirs)?);
        (of == epoch && seen != expected).then_some((epoch, expected, seen))
    };
    peers.into_iter().find_map(|(peer, theirs)| {
        let (epoch, expected, seen) = own.into_iter().zip(theirs).find_map(differ)?;
        let (code, wait, rank, peer) = (fault::DISAGREED, fault::CALL, rank.get(), peer.get());
        Some(FaultRecord { state: 1, code, wait, rank, peer, epoch, expected, seen, ..FaultRecord::default() })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What two ranks say to each other.
    #[derive(Default)]
    struct Words([[AtomicU32; SAID_BYTES as usize / 4]; 2]);

    impl Words {
        fn said(&self, rank: usize) -> Said<'_> {
            said(|offset| &self.0[rank][offset as usize / 4])
        }

        fn say(&self, rank: usize, history: History, epoch: Epoch, words: usize) {
            let first = said_offset(epoch) as usize / 4;
            for (word, value) in self.0[rank][first..].iter().zip(history.said(epoch)).take(words) {
                word.store(value, Ordering::Relaxed);
            }
        }

        fn disagreement(&self) -> Option<(u32, u32)> {
            let record = disagreement(Rank::new(0), self.said(0), [(Rank::new(1), self.said(1))])?;
            assert_eq!((record.state, record.code, record.wait, record.rank), (1, fault::DISAGREED, fault::CALL, 0));
            Some((record.peer, record.epoch))
        }
    }

    #[test]
    fn nothing_is_made_of_what_was_not_said() {
        let words = Words::default();
        assert_eq!(words.disagreement(), None);
        words.say(0, History::default().then(7), Epoch::new(0), SAID_WORDS);
        assert_eq!(words.disagreement(), None, "the peer has not come to the call");
        words.say(1, History::default().then(8), Epoch::new(2), SAID_WORDS);
        assert_eq!(words.disagreement(), None, "it is in another call");
        words.say(1, History::default().then(8), Epoch::new(0), SAID_WORDS);
        assert_eq!(words.disagreement(), Some((1, 0)));
    }

    proptest! {
        #[test]
        fn other_calls_are_found_however_late_and_the_same_never(
            ops in prop::collection::vec(1u32.., 2..20), at in any::<prop::sample::Index>(), ahead in 0usize..2, first: u32, torn in 0usize..=SAID_WORDS
        ) {
            let at = at.index(ops.len() - 1);
            let mut other = ops.clone();
            other.swap(at, at + 1);
            for (theirs, differ) in [(&ops, false), (&other, ops != other)] {
                let words = Words::default();
                let say = |rank, calls: &[u32], torn| {
                    let (mut history, mut epoch) = (History::default(), Epoch::new(first));
                    for (i, op) in calls.iter().enumerate() {
                        history = history.then(*op);
                        words.say(rank, history, epoch, if i + 1 == calls.len() { torn } else { SAID_WORDS });
                        epoch = epoch.next();
                    }
                };
                say(0, &ops, SAID_WORDS);
                // As far as the ranks can be apart; of the last call only some words may be there.
                say(1, &theirs[..theirs.len() - ahead], torn);
                let found = words.disagreement().is_some();
                prop_assert!(differ || !found, "they made the same calls");
                prop_assert!(found || !differ || torn < SAID_WORDS || at + ahead >= ops.len());
            }
        }
    }
}
