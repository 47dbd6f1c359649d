//! What a rank reads of its peers' memory, and what must hold of it for any bytes.

#![expect(clippy::missing_panics_doc, reason = "a panic is what these are for")]

use super::offer::{Introduction, Offer};

/// An introduction or an offer of memory: there is one reading of it, and an offer that is too
/// small is seen as such.
pub fn offer(bytes: &[u8]) -> bool {
    let (introduction, offer) = (Introduction::decode(bytes), Offer::decode(bytes));
    if let Some(introduction) = &introduction {
        assert_eq!(introduction.encode(), bytes);
    }
    if let Some(offer) = offer {
        assert_eq!(offer.encode(), bytes);
        if offer.holds() == Some(true) {
            assert!(u128::from(offer.bytes) >= 2 * u128::from(offer.size.half_bytes));
        }
    }
    introduction.is_some() || offer.is_some()
}

#[cfg(test)]
pub(crate) fn seeds() -> Vec<crate::fuzz::Seed> {
    let (process, uuid) = (std::array::from_fn(|at| at as u8), flux_cuda::DeviceUuid([1; 16]));
    let identity = super::offer::DeviceIdentity {
        process,
        uuid,
        ordinal: 3,
        posix_handles: true,
        shared_device: false,
        instance: true,
    };
    let introduction = Introduction { identity, visible: "3,1,0,2".to_owned() };
    let size = flux_core::layout::WorkspaceSize { half_bytes: 1 << 21, signals: 4, counters: 2 };
    // Room for both halves and the signals.
    let offer = Offer { key: 5, bytes: 5 << 20, size, epoch: 9, captured: true };
    vec![("offer", "identity", introduction.encode()), ("offer", "offer", offer.encode())]
}
