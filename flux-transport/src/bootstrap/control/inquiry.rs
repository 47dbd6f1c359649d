//! What ranks tell each other after a failure: who is late, and what each is doing.
//!
//! Invariant: nothing here is a step, so ranks that are out of step can still talk. A question ends
//! by its deadline.

use flux_core::Rank;
use flux_core::layout::FaultRecord;

/// A wait that passed its deadline, as its rank tells the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GaveUp {
    /// Number of the communicator in its world, in the order of connecting.
    pub communicator: u32,
    /// The ranks (bits) that are late, as far as the rank could learn.
    pub late: u32,
    /// The wait.
    pub record: FaultRecord,
}

/// Reports what this rank does in a communicator; `None` if it has none of this number. Must not
/// block.
pub type Answerer = dyn Fn(u32) -> Option<Vec<u8>> + Send + Sync;

/// What came of a question to one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Its answer.
    Reply(Vec<u8>),
    /// None until the deadline: the rank is stopped, or has no such communicator.
    Silent,
    /// The rank has left in good order.
    Left,
    /// The rank is gone.
    Lost,
}

const RECORD: usize = size_of::<FaultRecord>();

pub(crate) fn record_to_bytes(record: &FaultRecord) -> [u8; RECORD] {
    let mut bytes = [0; RECORD];
    for (to, word) in
        bytes.as_chunks_mut().0.iter_mut().zip(bytemuck::cast::<_, [u32; RECORD / 4]>(*record))
    {
        *to = word.to_le_bytes();
    }
    bytes
}

pub(crate) fn record_from(bytes: &[u8; RECORD]) -> FaultRecord {
    let mut words = [0_u32; RECORD / 4];
    for (word, from) in words.iter_mut().zip(bytes.as_chunks().0) {
        *word = u32::from_le_bytes(*from);
    }
    bytemuck::cast(words)
}

impl GaveUp {
    pub(crate) const BYTES: usize = 8 + RECORD;

    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.communicator.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.late.to_le_bytes());
        bytes[8..].copy_from_slice(&record_to_bytes(&self.record));
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let (communicator, rest) = bytes.split_first_chunk()?;
        let (late, record) = rest.split_first_chunk()?;
        let [communicator, late] = [communicator, late].map(|word| u32::from_le_bytes(*word));
        Some(Self { communicator, late, record: record_from(record.try_into().ok()?) })
    }

    /// The ranks that are late.
    pub fn late(&self) -> impl Iterator<Item = Rank> {
        ranks_of(self.late)
    }
}

pub(crate) fn ranks_of(mask: u32) -> impl Iterator<Item = Rank> {
    (0..u32::BITS).filter(move |rank| mask >> rank & 1 == 1).map(Rank::new)
}

pub(crate) fn mask_of(ranks: impl IntoIterator<Item = Rank>) -> u32 {
    ranks.into_iter().fold(0, |mask, rank| mask | 1_u32.unbounded_shl(rank.get()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_message_comes_back_and_no_part_of_it_does(
            communicator: u32,
            late: u32,
            words: [u32; 16],
            cut in 0..GaveUp::BYTES,
        ) {
            let what = GaveUp { communicator, late, record: bytemuck::cast(words) };
            let bytes = what.encode();
            prop_assert_eq!(GaveUp::decode(&bytes), Some(what));
            prop_assert_eq!(GaveUp::decode(&bytes[..cut]), None);
            prop_assert_eq!(mask_of(what.late()), late);
        }
    }
}
