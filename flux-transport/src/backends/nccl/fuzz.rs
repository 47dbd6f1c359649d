//! What a rank reads of its peers before they make a communicator, for any bytes.

#![expect(clippy::missing_panics_doc, reason = "a panic is what these are for")]

use super::identity::Identity;

/// What a rank says of itself: there is one reading of it.
pub fn member(bytes: &[u8]) -> bool {
    let identity = Identity::decode(bytes);
    if let Some(identity) = identity {
        assert_eq!(identity.encode(), bytes);
    }
    identity.is_some()
}

#[cfg(test)]
pub(crate) fn seeds() -> Vec<crate::fuzz::Seed> {
    vec![("member", "identity", super::identity::tests::identity(1).encode())]
}
