//! What a rank reads of its peers' pinned memory, for any bytes.

#![expect(clippy::missing_panics_doc, reason = "a panic is what these are for")]

use super::layout::Layout;
use super::offer::Offer;

/// An offer of a region: there is one reading of it, and what follows from its size is in bounds or
/// refused.
pub fn pinned(bytes: &[u8]) -> bool {
    let offer = Offer::decode(bytes);
    if let Some(offer) = offer {
        assert_eq!(offer.encode(), bytes);
        let layout = Layout::new(2, &offer.size);
        if let Some(bytes) = layout.bytes() {
            assert!(u128::from(bytes) >= 2 * u128::from(offer.size.half_bytes));
        }
    }
    offer.is_some()
}

#[cfg(test)]
pub(crate) fn seeds() -> Vec<crate::fuzz::Seed> {
    let size = flux_core::layout::WorkspaceSize { half_bytes: 1 << 21, signals: 4, counters: 2 };
    let offer = Offer { key: 5, size, epoch: flux_core::signal::Epoch::new(9) };
    vec![("pinned", "offer", offer.encode().to_vec())]
}
