//! What a rank tells the others of its part of a new workspace.
//!
//! Invariant: decoding accepts what [`Offer::encode`] produces and nothing else.

use super::error::TransportError;
use flux_core::Rank;
use flux_core::signal::Epoch;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    /// Under which ranks of its process find its memory. Of another process a descriptor counts.
    pub(crate) key: u64,
    /// The number of its next call.
    pub(crate) epoch: Epoch,
}

impl Offer {
    pub(crate) const BYTES: usize = 12;

    pub(crate) fn encode(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.key.to_le_bytes());
        bytes[8..].copy_from_slice(&self.epoch.get().to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (key, epoch) = bytes.split_first_chunk()?;
        Some(Self {
            key: u64::from_le_bytes(*key),
            epoch: Epoch::new(u32::from_le_bytes(*epoch.as_array()?)),
        })
    }
}

/// The keys that the ranks have offered, by rank, if they all stand at the same call.
pub(crate) fn keys_at_one_epoch(answers: &[Vec<u8>]) -> Result<Vec<u64>, TransportError> {
    let offer = |(rank, answer): (u32, &Vec<u8>)| {
        Offer::decode(answer).ok_or_else(|| TransportError::PeerFailed {
            rank: Rank::new(rank),
            reason: format!(
                "it offered its memory in {} bytes, not {}",
                answer.len(),
                Offer::BYTES
            ),
        })
    };
    let offers: Vec<Offer> = (0..).zip(answers).map(offer).collect::<Result<_, _>>()?;
    if offers.windows(2).all(|pair| pair[0].epoch == pair[1].epoch) {
        return Ok(offers.iter().map(|offer| offer.key).collect());
    }
    let values: Vec<String> = (0..)
        .zip(&offers)
        .map(|(rank, Offer { epoch, .. }): (u32, _)| format!("{epoch} on rank {rank}"))
        .collect();
    Err(TransportError::Disagreement { what: "number of the next call", values: values.join(", ") })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_offer_survives_the_trip_and_no_part_of_it_does(
            key: u64,
            epoch: u32,
            cut in 0..Offer::BYTES,
        ) {
            let offer = Offer { key, epoch: Epoch::new(epoch) };
            let bytes = offer.encode();
            prop_assert_eq!(Offer::decode(&bytes), Some(offer));
            prop_assert_eq!(Offer::decode(&bytes[..cut]), None);
            prop_assert_eq!(Offer::decode(&[&bytes[..], &[0]].concat()), None);
        }
    }

    #[test]
    fn ranks_at_different_calls_are_told_all_and_one_that_offers_nothing_is_named() {
        let offered = |key, epoch| Offer { key, epoch: Epoch::new(epoch) }.encode().to_vec();
        let first = offered(3, 256);
        let keys = |last: Vec<u8>| keys_at_one_epoch(&[first.clone(), last]);
        assert_eq!(keys(offered(5, 256)).ok(), Some(vec![3, 5]));
        let error = keys(offered(5, 7)).unwrap_err().to_string();
        assert!(error.ends_with("256 on rank 0, 7 on rank 1"), "{error}");
        for garbage in [&[][..], &[1, 2, 3, 4], &[0; 13]] {
            assert!(
                matches!(keys(garbage.to_vec()), Err(TransportError::PeerFailed { rank, .. })
                    if rank.get() == 1),
                "{garbage:?}"
            );
        }
    }
}
