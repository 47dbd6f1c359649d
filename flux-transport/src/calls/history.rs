//! Which ops a rank's calls were of, in order, as one number that ranks compare where none reaches another's pads.
//!
//! Invariant: what a rank says is of the last call of each half, and the number of a call covers all calls before it. So ranks that made other calls, or the same
//! in another order, say other numbers from the first such call on, whenever they are compared: nobody has to look after each call. Ranks are at most one call apart, so of
//! two that are compared there is always a call of which both have said something.

use flux_core::Rank;
use flux_core::layout::{FaultRecord, fault};
use flux_core::signal::Epoch;

/// Words that a rank says of a call.
pub(crate) const SAID_WORDS: usize = 3;
/// Bytes of what a rank says: of the last call of each half.
pub(crate) const SAID_BYTES: u64 = 2 * SAID_STRIDE;
/// Bytes from what it says of a call of one half to that of the other.
const SAID_STRIDE: u64 = 16;
/// The most looks at a peer while the own calls go on: a call takes thousands of times as long as a look.
const LOOKS: usize = 16;

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
        // FNV-1a, continued. Each step can be undone, so what differs stays different over any calls that are the same; of calls in another order it is the same once in 2^32.
        Self(op.to_le_bytes().iter().fold(self.0, |hash, &byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)))
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

/// The words that a rank says of the last call of one half. `word` loads what it says at an offset.
fn words(half: usize, word: &impl Fn(u64) -> u32) -> [u32; SAID_WORDS] {
    [0, 4, 8].map(|place| word(half as u64 * SAID_STRIDE + place))
}

/// The call of which such words say something, and its history; `None` where nothing was said, or it is changing.
fn call([epoch, history, sum]: [u32; SAID_WORDS]) -> Option<(u32, u32)> {
    (sum == check(epoch, history)).then_some((epoch, history))
}

/// The number, expected and seen history of a call of which a peer says another than the rank itself does.
///
/// Both may go on meanwhile. As long as the own last call is the same, a peer that says nothing any more of the one before it has said the last, and stays there: so
/// that one is looked at first, and all once more where the own words have changed.
fn difference(own: &impl Fn(u64) -> u32, theirs: &impl Fn(u64) -> u32) -> Option<(u32, u32, u32)> {
    let both = || [0, 1].map(|half| words(half, own));
    let mut before = both();
    for _ in 0..LOOKS {
        let calls = before.map(call);
        let differ = |half: usize| {
            let ((epoch, expected), (of, seen)) = (calls[half]?, call(words(half, theirs))?);
            (of == epoch && seen != expected).then_some((epoch, expected, seen))
        };
        let first = usize::from(matches!(calls, [Some((even, _)), Some((odd, _))] if odd.wrapping_sub(even).cast_signed() < 0));
        let found = differ(first).or_else(|| differ(1 - first));
        let now = both();
        if found.is_some() || now == before {
            return found;
        }
        before = now;
    }
    None
}

/// The first of `peers` that says other calls than `rank` itself does, as `own`: each loads a word of what its rank says, by its offset.
pub(crate) fn disagreement(
    rank: Rank,
    own: impl Fn(u64) -> u32,
    peers: impl IntoIterator<Item = (Rank, impl Fn(u64) -> u32)>,
) -> Option<FaultRecord> {
    peers.into_iter().find_map(|(peer, theirs)| {
        let (epoch, expected, seen) = difference(&own, &theirs)?;
        let (code, wait, rank, peer) = (fault::DISAGREED, fault::CALL, rank.get(), peer.get());
        Some(FaultRecord { state: 1, code, wait, rank, peer, epoch, expected, seen, ..FaultRecord::default() })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cell::{Cell, RefCell};
    use std::collections::BTreeSet;

    /// What two ranks say to each other.
    #[derive(Default)]
    struct Words([[Cell<u32>; SAID_BYTES as usize / 4]; 2]);

    impl Words {
        fn said(&self, rank: usize) -> impl Fn(u64) -> u32 {
            move |offset| self.0[rank][offset as usize / 4].get()
        }

        fn say(&self, rank: usize, history: History, epoch: Epoch, words: usize) {
            let first = said_offset(epoch) as usize / 4;
            for (word, value) in self.0[rank][first..].iter().zip(history.said(epoch)).take(words) {
                word.set(value);
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

    #[test]
    fn histories_that_differ_stay_different_over_calls_that_are_the_same() {
        let histories = 1 << 18;
        let after: BTreeSet<u32> = (0..histories).map(|i: u32| History(i.wrapping_mul(0x9e37_79b1)).then(7).0).collect();
        assert_eq!(after.len(), histories as usize);
    }

    /// Two ranks that write what they say word by word, none of a call before the other has said all of the last, while they are compared.
    struct Going<'o> {
        words: Words,
        ops: [&'o [u32]; 2],
        first: Epoch,
        /// Words that each has written.
        written: [usize; 2],
        /// Who goes on next.
        turns: &'o [bool],
    }

    impl Going<'_> {
        fn step(&mut self, rank: usize) {
            let (call, word) = (self.written[rank] / SAID_WORDS, self.written[rank] % SAID_WORDS);
            if call < self.ops[rank].len() && call * SAID_WORDS <= self.written[1 - rank] {
                let history = self.ops[rank][..=call].iter().fold(History::default(), |history, &op| history.then(op));
                let epoch = Epoch::new(self.first.get().wrapping_add(call as u32));
                self.words.0[rank][said_offset(epoch) as usize / 4 + word].set(history.said(epoch)[word]);
                self.written[rank] += 1;
            }
        }

        /// A look at a word, after some turns.
        fn load(&mut self, rank: usize, offset: u64, turns: usize) -> u32 {
            for _ in 0..turns {
                if let Some((&turn, rest)) = self.turns.split_first() {
                    self.turns = rest;
                    self.step(usize::from(turn));
                }
            }
            self.words.said(rank)(offset)
        }
    }

    proptest! {
        /// A call that has ended is not passed, whatever the ranks say meanwhile of those that follow.
        #[test]
        fn other_calls_are_found_while_the_ranks_go_on(
            calls in 3..12_usize, at in any::<prop::sample::Index>(), ended in any::<prop::sample::Index>(), first: u32,
            before in prop::collection::vec(any::<bool>(), 0..12),
            turns in prop::collection::vec(any::<bool>(), 0..30), pauses in prop::collection::vec(prop_oneof![4 => Just(0), 1 => 1..12_usize], 1..40)
        ) {
            let (ops, at) = (vec![5; calls], at.index(calls - 2));
            let mut others = ops.clone();
            others[at] = 6;
            for (theirs, differ) in [(&ops, false), (&others, true)] {
                let mut going = Going { words: Words::default(), ops: [&ops, theirs], first: Epoch::new(first), written: [0; 2], turns: &turns };
                // Call `at` at least has ended on both.
                let said = (at + 1 + ended.index(calls - at)) * SAID_WORDS;
                while going.written.iter().any(|&written| written < said) {
                    [0, 1].into_iter().filter(|&rank| going.written[rank] < said).collect::<Vec<_>>().into_iter().for_each(|rank| going.step(rank));
                }
                before.iter().for_each(|&turn| going.step(usize::from(turn)));
                let (going, looks) = (RefCell::new(going), Cell::new(0));
                let word = |rank| {
                    let (going, looks, pauses) = (&going, &looks, &pauses);
                    move |offset| {
                        looks.set(looks.get() + 1);
                        going.borrow_mut().load(rank, offset, pauses[looks.get() % pauses.len()])
                    }
                };
                prop_assert_eq!(disagreement(Rank::new(0), word(0), [(Rank::new(1), word(1))]).is_some(), differ);
            }
        }

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
