//! The workspace as executors see it.

use super::TransportError;
use flux_core::layout::{WorkspaceSize, pad_bytes};
use std::time::Duration;

/// A communicator's workspace as this rank's executor addresses it ([`flux_core::layout`]).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkspaceView {
    /// Data regions, by rank, the own one included.
    pub data: Vec<u64>,
    /// Pads, by rank.
    pub pads: Vec<u64>,
    /// Where peers' scattered rows arrive, if not in the data region
    /// ([`PeerStores::Rows`](crate::PeerStores::Rows)).
    pub scattered: Option<u64>,
    /// The own control block.
    pub control: u64,
    /// The own fault block.
    pub fault: u64,
    /// What it holds.
    pub size: WorkspaceSize,
    /// How long a wait may take.
    pub deadline_ns: u64,
}

/// A deadline as executors take it; one that is too long for that is the longest.
pub(crate) fn nanoseconds(deadline: Duration) -> u64 {
    u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX)
}

/// Bytes of a data region, and of that with the pad; an error on overflow.
pub(crate) fn checked_bytes(size: &WorkspaceSize) -> Result<(u64, u64), TransportError> {
    let stride = size.half_bytes.checked_next_multiple_of(WorkspaceSize::ALIGN);
    let data = stride.and_then(|stride| stride.checked_mul(2));
    let both = data.and_then(|data| Some((data, data.checked_add(pad_bytes(size.signals))?)));
    both.ok_or(TransportError::OutOfMemory { what: "workspace", bytes: u64::MAX })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workspace_is_as_large_as_it_says_or_refused() {
        let size = |half_bytes, signals| WorkspaceSize { half_bytes, signals, counters: 0 };
        for half_bytes in [0, 1, WorkspaceSize::ALIGN, 1 << 40] {
            let data = size(half_bytes, 9).data_bytes();
            assert_eq!(checked_bytes(&size(half_bytes, 9)).unwrap(), (data, data + pad_bytes(9)));
        }
        // Twice the first is 0 in 64 bits, the second is rounded up to it, the third to nothing;
        // the last leaves no room for the pad.
        let half = 1 << 63;
        for (half_bytes, signals) in [
            (half, 0),
            (half - WorkspaceSize::ALIGN + 1, 0),
            (u64::MAX, 0),
            (half - WorkspaceSize::ALIGN, u32::MAX),
        ] {
            let refused = checked_bytes(&size(half_bytes, signals));
            assert!(
                matches!(refused, Err(TransportError::OutOfMemory { what: "workspace", .. })),
                "{half_bytes}"
            );
        }
    }
}
