//! What a rank reads of its peers' memory, and what must hold of it for any bytes.

#![expect(clippy::missing_panics_doc, reason = "a panic is what these are for")]

use super::offer::{Identity, Offer};

/// An identity or an offer of memory: there is one reading of it, and an offer that is too small is seen as such.
pub fn offer(bytes: &[u8]) {
    if let Some(identity) = Identity::decode(bytes) {
        assert_eq!(identity.encode(), bytes);
    }
    if let Some(offer) = Offer::decode(bytes) {
        assert_eq!(offer.encode(), bytes);
        if offer.holds() == Some(true) {
            assert!(u128::from(offer.bytes) >= 2 * u128::from(offer.size.half_bytes));
        }
    }
}
