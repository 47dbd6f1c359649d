//! What every message of a communicator begins with, for any bytes.

#![expect(clippy::missing_panics_doc, reason = "a panic is what these are for")]

use super::step::{At, STEP_BYTES};

/// A step, and what follows: there is one reading of the first, and the second is left as it is.
pub fn step(bytes: &[u8]) -> bool {
    let at = At::decode(bytes);
    if let Some(at) = at {
        assert!(bytes.starts_with(&at.encode()));
        let payload = at.payload(flux_core::Rank::new(0), bytes.to_vec());
        assert_eq!(payload.ok().as_deref(), Some(&bytes[STEP_BYTES..]));
    }
    at.is_some()
}

#[cfg(test)]
pub(crate) fn seeds() -> Vec<crate::fuzz::Seed> {
    let at = At { step: super::Step::Reserve, communicator: 3 };
    vec![("step", "reserve", [&at.encode()[..], b"payload"].concat())]
}
