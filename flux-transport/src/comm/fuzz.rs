//! What a rank reads of what its peers were doing, for any bytes.

#![expect(clippy::missing_panics_doc, reason = "a panic is what these are for")]

use super::automatic::Facts;
use super::flight;
use crate::control::GaveUp;

/// A flight record, or a wait that a peer gave up: there is one reading of each.
pub fn report(bytes: &[u8]) {
    if let Some(calls) = flight::decode(bytes) {
        let again = flight::decode(&flight::encode(&calls));
        assert_eq!(again, Some(calls));
    }
    if let Some(gave_up) = GaveUp::decode(bytes) {
        assert_eq!(gave_up.encode(), bytes);
    }
}

/// What a rank says of itself when a transport is chosen: there is one reading of it.
pub fn facts(bytes: &[u8]) {
    if let Some(facts) = Facts::decode(bytes) {
        assert_eq!(facts.encode(), bytes);
    }
}
