//! Where each rank is: what it tells rank 0, and what rank 0 tells all.
//!
//! Invariant: fixed layouts, little-endian. Decoding accepts exactly what encoding gives.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use flux_core::WorldSize;
use flux_core::rank::MAX_WORLD;

use crate::bootstrap::host_id::{HOST_ID_BYTES, HostId};

pub(crate) const WHEREABOUTS_BYTES: usize = HOST_ID_BYTES + 16 + 2;
const MAGIC: [u8; 8] = *b"fluxrost";
const HEADER_BYTES: usize = 8 + 16 + 4;
pub(crate) const MAX_ROSTER: usize = HEADER_BYTES + MAX_WORLD * WHEREABOUTS_BYTES;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Whereabouts {
    pub(crate) host: HostId,
    /// Where it listens to ranks of other hosts.
    pub(crate) address: SocketAddr,
}

impl Whereabouts {
    pub(crate) fn encode(&self) -> [u8; WHEREABOUTS_BYTES] {
        let mut bytes = [0; WHEREABOUTS_BYTES];
        let ip = match self.address.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        bytes[..16].copy_from_slice(&self.host.0);
        bytes[16..32].copy_from_slice(&ip.octets());
        bytes[32..].copy_from_slice(&self.address.port().to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; WHEREABOUTS_BYTES]) -> Self {
        let host = HostId(std::array::from_fn(|at| bytes[at]));
        let ip =
            Ipv6Addr::from(std::array::from_fn::<u8, 16, _>(|at| bytes[16 + at])).to_canonical();
        Self { host, address: SocketAddr::new(ip, u16::from_le_bytes([bytes[32], bytes[33]])) }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Roster {
    /// Random: names this meeting in what follows.
    pub(crate) meeting: u128,
    pub(crate) ranks: Vec<Whereabouts>,
}

impl Roster {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let count = self.ranks.len() as u32;
        let ranks = self.ranks.iter().flat_map(Whereabouts::encode);
        MAGIC
            .into_iter()
            .chain(self.meeting.to_le_bytes())
            .chain(count.to_le_bytes())
            .chain(ranks)
            .collect()
    }

    /// `None` for what is no roster of this world.
    pub(crate) fn decode(bytes: &[u8], world: WorldSize) -> Option<Self> {
        let (meeting, bytes) = bytes.strip_prefix(&MAGIC)?.split_first_chunk()?;
        let (count, bytes) = bytes.split_first_chunk()?;
        let (ranks, rest) = bytes.as_chunks::<WHEREABOUTS_BYTES>();
        if u32::from_le_bytes(*count) != world.get()
            || ranks.len() != world.index()
            || !rest.is_empty()
        {
            return None;
        }
        Some(Self {
            meeting: u128::from_le_bytes(*meeting),
            ranks: ranks.iter().map(Whereabouts::decode).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn whereabouts() -> impl Strategy<Value = Whereabouts> {
        (any::<[u8; 16]>(), any::<IpAddr>(), any::<u16>()).prop_map(|(host, ip, port)| {
            // An IPv4 address written as IPv6 is that address.
            Whereabouts { host: HostId(host), address: SocketAddr::new(ip.to_canonical(), port) }
        })
    }

    proptest! {
        #[test]
        fn rosters_come_back_and_no_part_of_them_does(
            meeting: u128,
            ranks in prop::collection::vec(whereabouts(), 1..=MAX_WORLD),
            cut: prop::sample::Index,
        ) {
            let world = WorldSize::new(ranks.len() as u32).unwrap();
            let roster = Roster { meeting, ranks };
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
        fn any_bytes_decode_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..700), world in 1..=16_u32) {
            let bytes = [&MAGIC[..], &bytes].concat();
            let _ = Roster::decode(&bytes, WorldSize::new(world).unwrap());
        }
    }
}
