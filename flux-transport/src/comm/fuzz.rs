//! What a rank reads of what its peers are, want and were doing, for any bytes.

#![expect(clippy::missing_panics_doc, reason = "a panic is what these are for")]

use super::automatic::Facts;
use super::communicator;
use super::failure::Said;
use crate::bootstrap::control::GaveUp;

pub use super::automatic::fuzz::verdict;

/// What a peer does, or a wait that it gave up: there is one reading of each.
pub fn report(bytes: &[u8]) -> bool {
    let (said, gave_up) = (Said::decode(bytes), GaveUp::decode(bytes));
    if let Some(said) = &said {
        assert_eq!(Said::decode(&said.encode()).as_ref(), Some(said));
    }
    if let Some(gave_up) = gave_up {
        assert_eq!(gave_up.encode(), bytes);
    }
    said.is_some() || gave_up.is_some()
}

/// What a rank says of itself when a transport is chosen: there is one reading of it.
pub fn facts(bytes: &[u8]) -> bool {
    let facts = Facts::decode(bytes);
    if let Some(facts) = &facts {
        assert_eq!(facts.encode(), bytes);
    }
    facts.is_some()
}

/// The size of the workspace that a rank wants: there is one reading of it.
pub fn size(bytes: &[u8]) -> bool {
    let again = communicator::encode(communicator::decode(bytes));
    let whole = bytes.len() == again.len();
    assert!(!whole || again == bytes, "{again:?}");
    whole
}

#[cfg(test)]
pub(crate) fn seeds() -> Vec<crate::fuzz::Seed> {
    use super::{CallRecord, CallState, Label};
    use std::time::Duration;

    let call = |epoch: Option<u32>, label, state| {
        let [begun, noted] = [1000, 2000].map(Duration::from_nanos);
        let epoch = epoch.map(flux_core::signal::Epoch::new);
        CallRecord { epoch, label, empty_calls: 0, state, begun, noted }
    };
    let label = Label::new("ag_gemm", [4096, 49152, 12288]);
    let calls =
        vec![call(Some(41), Some(label), CallState::Done), call(None, None, CallState::Begun)];
    let words: [u32; 16] = std::array::from_fn(|at| at as u32);
    let gave_up = GaveUp { communicator: 1, late: 6, record: bytemuck::cast(words) };
    let paused_in = Some(flux_core::signal::Epoch::new(41));
    let waits = Said { record: Some(gave_up.record), paused_in, calls: calls.clone() };
    let size = flux_core::layout::WorkspaceSize { half_bytes: 1 << 33, signals: 4, counters: 2 };
    let mut seeds = super::automatic::fuzz::seeds();
    seeds.extend([
        ("report", "flight", Said { calls: calls.clone(), ..Said::default() }.encode()),
        ("report", "waits", waits.encode()),
        ("report", "gave-up", gave_up.encode().to_vec()),
        ("size", "workspace", communicator::encode(size).to_vec()),
    ]);
    seeds
}
