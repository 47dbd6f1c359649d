//! What a rank tells the others of its region.
//!
//! Invariant: decoding accepts what [`Offer::encode`] produces and nothing else.

use flux_core::signal::Epoch;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    /// Under which threads find its region; of a process its descriptor counts.
    pub(super) number: u64,
    pub(super) epoch: Epoch,
}

impl Offer {
    pub(super) const BYTES: usize = 12;

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.number.to_le_bytes());
        bytes[8..].copy_from_slice(&self.epoch.get().to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (number, epoch) = bytes.split_first_chunk()?;
        Some(Self {
            number: u64::from_le_bytes(*number),
            epoch: Epoch::new(u32::from_le_bytes(*epoch.as_array()?)),
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
            number: u64,
            epoch: u32,
            cut in 0..Offer::BYTES,
        ) {
            let offer = Offer { number, epoch: Epoch::new(epoch) };
            let bytes = offer.encode();
            prop_assert_eq!(Offer::decode(&bytes), Some(offer));
            prop_assert_eq!(Offer::decode(&bytes[..cut]), None);
            prop_assert_eq!(Offer::decode(&[&bytes[..], &[0]].concat()), None);
        }
    }
}
