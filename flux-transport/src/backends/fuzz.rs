//! What a rank reads of its peers' parts of a workspace, for any bytes.

#![expect(clippy::missing_panics_doc, reason = "a panic is what these are for")]

use super::offer::Offer;

/// An offer of a region: there is one reading of it.
pub fn region(bytes: &[u8]) -> bool {
    let offer = Offer::decode(bytes);
    if let Some(offer) = offer {
        assert_eq!(offer.encode(), bytes);
    }
    offer.is_some()
}

#[cfg(test)]
pub(crate) fn seeds() -> Vec<crate::fuzz::Seed> {
    let offer = Offer { key: 5, epoch: flux_core::signal::Epoch::new(9) };
    vec![("region", "offer", offer.encode().to_vec())]
}
