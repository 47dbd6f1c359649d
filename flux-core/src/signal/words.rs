//! Access of a rank to the words of the protocol.
//!
//! Invariant: in a call one rank writes a pad word, as the tile program names it, and its owner
//! reads it. Control words, counters and fault words are private to a rank.

use super::{Epoch, Word};
use crate::Rank;
use crate::layout::{WorkspaceSize, control};

/// The control words of a rank, besides its chunk counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Control {
    /// The number of the call in progress, or of the next one between calls.
    Epoch,
    /// Workers that have left the call.
    Ticket,
    /// Non-zero after a wait of this rank has failed.
    Poison,
    /// The last epoch whose transfers the own mover has read from the caller's `x`.
    Pushed,
}

impl Control {
    /// Offset of the word in the control block.
    pub const fn offset(self) -> u64 {
        match self {
            Self::Epoch => control::EPOCH,
            Self::Ticket => control::TICKET,
            Self::Poison => control::POISON,
            Self::Pushed => control::PUSHED,
        }
    }
}

/// The words of the protocol as one rank reaches them, in the [`layout`](crate::layout).
pub trait Words {
    /// One word.
    type Word: Word;

    /// Signal `index` of `owner`'s pad, for calls that use half `half`.
    fn signal(&self, owner: Rank, index: u32, half: usize) -> &Self::Word;

    /// The words of `of` on `owner`'s pad for calls of half `half`: the call's number and its op's
    /// number.
    fn calling(&self, owner: Rank, of: Rank, half: usize) -> [&Self::Word; 2];

    /// A control word of this rank.
    fn control(&self, word: Control) -> &Self::Word;

    /// A chunk counter of this rank.
    fn counter(&self, index: u32) -> &Self::Word;

    /// Word `index` of this rank's [`FaultRecord`](crate::layout::FaultRecord), `0..16`.
    fn fault(&self, index: u32) -> &Self::Word;

    /// The abort word of this rank; non-zero ends every wait.
    fn abort(&self) -> &Self::Word;
}

/// Sets `rank`'s words for a communicator whose first call has epoch `first`.
///
/// Every rank does this before any rank begins a call. The words at
/// [`broken_offset`](crate::layout::broken_offset) and
/// [`calling_offset`](crate::layout::calling_offset) begin as 0, as fresh memory does.
pub fn initialise<S: Words>(words: &S, rank: Rank, size: WorkspaceSize, first: Epoch) {
    let before = first.before(1).get();
    for index in 0..size.signals {
        for half in 0..2 {
            words.signal(rank, index, half).store_release(before);
        }
    }
    for index in 0..size.counters {
        words.counter(index).store_release(0);
    }
    for index in 0..16 {
        words.fault(index).store_release(0);
    }
    words.abort().store_release(0);
    words.control(Control::Ticket).store_release(0);
    words.control(Control::Poison).store_release(0);
    words.control(Control::Pushed).store_release(before);
    words.control(Control::Epoch).store_release(first.get());
}
