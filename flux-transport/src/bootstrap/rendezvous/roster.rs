//! What every rank gave, as the one that gathers it tells all.
//!
//! Invariant: fixed layouts, little-endian. Decoding accepts exactly what encoding gives.

use flux_core::WorldSize;
use flux_core::rank::MAX_WORLD;

/// Most bytes of one rank's payload.
pub(crate) const MAX_PAYLOAD: usize = 4 << 10;
const MAGIC: [u8; 8] = *b"fluxrost";
const HEADER_BYTES: usize = 8 + 4;
pub(crate) const MAX_ROSTER: usize = HEADER_BYTES + MAX_WORLD * (4 + MAX_PAYLOAD);

/// The ranks' payloads, by rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Roster {
    pub(crate) payloads: Vec<Vec<u8>>,
}

impl Roster {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend((self.payloads.len() as u32).to_le_bytes());
        for payload in &self.payloads {
            bytes.extend((payload.len() as u32).to_le_bytes());
            bytes.extend(payload);
        }
        bytes
    }

    /// `None` for what is no roster of this world.
    pub(crate) fn decode(bytes: &[u8], world: WorldSize) -> Option<Self> {
        let (count, mut rest) = bytes.strip_prefix(&MAGIC)?.split_first_chunk()?;
        if u32::from_le_bytes(*count) != world.get() {
            return None;
        }
        let mut payloads = Vec::with_capacity(world.index());
        for _ in world.ranks() {
            let (length, tail) = rest.split_first_chunk()?;
            let length = u32::from_le_bytes(*length) as usize;
            let payload;
            (payload, rest) = tail.split_at_checked(length).filter(|_| length <= MAX_PAYLOAD)?;
            payloads.push(payload.to_vec());
        }
        rest.is_empty().then_some(Self { payloads })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn payload() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(any::<u8>(), 0..100)
    }

    proptest! {
        #[test]
        fn rosters_come_back_and_no_part_of_them_does(
            payloads in prop::collection::vec(payload(), 1..=MAX_WORLD),
            cut: prop::sample::Index,
        ) {
            let world = WorldSize::new(payloads.len() as u32).unwrap();
            let roster = Roster { payloads };
            let bytes = roster.encode();
            prop_assert!(bytes.len() <= MAX_ROSTER);
            prop_assert_eq!(Roster::decode(&bytes[..cut.index(bytes.len())], world), None);
            prop_assert_eq!(Roster::decode(&[&bytes[..], &[0]].concat(), world), None);
            if let Some(other) = WorldSize::new(world.get() + 1) {
                prop_assert_eq!(Roster::decode(&bytes, other), None);
            }
            prop_assert_eq!(Roster::decode(&bytes, world), Some(roster));
        }

        #[test]
        fn any_bytes_decode_without_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..700),
            world in 1..=16_u32,
        ) {
            let bytes = [&MAGIC[..], &bytes].concat();
            let _ = Roster::decode(&bytes, WorldSize::new(world).unwrap());
        }
    }
}
