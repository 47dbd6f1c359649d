//! What a rank tells the others of its region.
//!
//! Invariant: decoding accepts what [`Offer::encode`] produces and nothing else.

use flux_core::layout::WorkspaceSize;
use flux_core::signal::Epoch;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    /// Under which ranks of its process find its region; of another its descriptor counts.
    pub(super) key: u64,
    /// What the region was made for.
    pub(super) size: WorkspaceSize,
    pub(super) epoch: Epoch,
}

impl Offer {
    pub(super) const BYTES: usize = 28;

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        let Self { key, size: WorkspaceSize { half_bytes, signals, counters }, epoch } = *self;
        let mut bytes = [0; Self::BYTES];
        bytes[..16].copy_from_slice(&[key, half_bytes].map(u64::to_le_bytes).concat());
        bytes[16..]
            .copy_from_slice(&[signals, counters, epoch.get()].map(u32::to_le_bytes).concat());
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (key, rest) = bytes.split_first_chunk()?;
        let (half_bytes, rest) = rest.split_first_chunk()?;
        let (signals, rest) = rest.split_first_chunk()?;
        let (counters, epoch) = rest.split_first_chunk()?;
        let [key, half_bytes] = [key, half_bytes].map(|bytes| u64::from_le_bytes(*bytes));
        let [signals, counters, epoch] =
            [signals, counters, epoch.as_array()?].map(|bytes| u32::from_le_bytes(*bytes));
        Some(Self {
            key,
            size: WorkspaceSize { half_bytes, signals, counters },
            epoch: Epoch::new(epoch),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_offer_survives_the_trip_and_no_part_of_it_does(
            key: u64, half_bytes: u64, signals: u32, counters: u32, epoch: u32, cut in 0..Offer::BYTES
        ) {
            let offer = Offer { key, size: WorkspaceSize { half_bytes, signals, counters }, epoch: Epoch::new(epoch) };
            let bytes = offer.encode();
            prop_assert_eq!(Offer::decode(&bytes), Some(offer));
            prop_assert_eq!(Offer::decode(&bytes[..cut]), None);
            prop_assert_eq!(Offer::decode(&[&bytes[..], &[0]].concat()), None);
        }
    }
}
