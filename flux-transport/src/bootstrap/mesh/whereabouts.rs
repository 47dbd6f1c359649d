//! What a rank gives the others, so that they connect: where it is, or why it cannot be met.
//!
//! Invariant: fixed layouts, little-endian. Decoding accepts exactly what encoding gives.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use flux_core::Rank;
use sha2::{Digest, Sha256};

use crate::bootstrap::control::shortened;
use crate::bootstrap::error::BootstrapError;
use crate::bootstrap::host_id::{HOST_ID_BYTES, HostId};
use crate::bootstrap::rendezvous::roster::MAX_PAYLOAD;
use crate::bootstrap::secret::Secret;

const HERE: &[u8; 8] = b"fluxhere";
const UNABLE: &[u8; 8] = b"fluxcant";
const RANDOM: usize = 32;
const BYTES: usize = HOST_ID_BYTES + 16 + 2 + RANDOM;

/// Where a rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Whereabouts {
    pub(crate) host: HostId,
    /// Where it listens to ranks of other hosts; of no meaning where there are none.
    pub(crate) address: SocketAddr,
    /// Its part of what names and guards the mesh.
    pub(crate) random: [u8; RANDOM],
}

impl Whereabouts {
    fn encode(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        let ip = match self.address.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        bytes[..16].copy_from_slice(&self.host.0);
        bytes[16..32].copy_from_slice(&ip.octets());
        bytes[32..34].copy_from_slice(&self.address.port().to_le_bytes());
        bytes[34..].copy_from_slice(&self.random);
        bytes
    }

    fn decode(bytes: &[u8; BYTES]) -> Self {
        let ip =
            Ipv6Addr::from(std::array::from_fn::<u8, 16, _>(|at| bytes[16 + at])).to_canonical();
        Self {
            host: HostId(std::array::from_fn(|at| bytes[at])),
            address: SocketAddr::new(ip, u16::from_le_bytes([bytes[32], bytes[33]])),
            random: std::array::from_fn(|at| bytes[34 + at]),
        }
    }
}

/// What a rank gives: where it is, or the error that keeps it from the others.
pub(super) fn offer(own: Result<&Whereabouts, &BootstrapError>) -> Vec<u8> {
    match own {
        Ok(own) => [&HERE[..], &own.encode()].concat(),
        Err(error) => {
            let mut words = shortened(error.to_string());
            words.truncate(words.floor_char_boundary(MAX_PAYLOAD - UNABLE.len()));
            [UNABLE, words.as_bytes()].concat()
        }
    }
}

/// Where all ranks are.
///
/// # Errors
/// [`BootstrapError::Peer`] with the words of the first that cannot be met;
/// [`BootstrapError::Protocol`] for what is no offer.
pub(crate) fn all(given: &[Vec<u8>]) -> Result<Vec<Whereabouts>, BootstrapError> {
    let one = |(rank, given): (Rank, &Vec<u8>)| {
        if let Some(words) = given.strip_prefix(UNABLE) {
            let reason = String::from_utf8_lossy(words).into_owned();
            return Err(BootstrapError::Peer { rank, reason });
        }
        let bytes = given.strip_prefix(HERE).and_then(|bytes| bytes.try_into().ok());
        bytes.map(Whereabouts::decode).ok_or_else(|| {
            BootstrapError::Protocol(format!("rank {rank} gave what is no place to meet it"))
        })
    };
    (0..).map(Rank::new).zip(given).map(one).collect()
}

/// A number for the mesh of these ranks, and the secret of its connections: from what all gave, and
/// the launch's own secret where the exchange could be overheard.
pub(super) fn name_and_secret(
    all: &[Whereabouts],
    launch: Option<&Secret>,
) -> Result<(u128, Secret), BootstrapError> {
    let digest = |purpose: &[u8], secret: &[u8]| -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update(purpose);
        for rank in all {
            hash.update(rank.encode());
        }
        hash.update(secret);
        hash.finalize().into()
    };
    let name = digest(b"flux mesh name  ", &[]);
    let secret = digest(b"flux mesh secret", launch.map_or(&[], Secret::bytes));
    Ok((u128::from_le_bytes(std::array::from_fn(|at| name[at])), Secret::new(secret)?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn whereabouts() -> impl Strategy<Value = Whereabouts> {
        (any::<[u8; 16]>(), any::<IpAddr>(), any::<u16>(), any::<[u8; 32]>()).prop_map(
            |(host, ip, port, random)| {
                // An IPv4 address written as IPv6 is that address.
                let address = SocketAddr::new(ip.to_canonical(), port);
                Whereabouts { host: HostId(host), address, random }
            },
        )
    }

    proptest! {
        #[test]
        fn where_ranks_are_comes_back(ranks in prop::collection::vec(whereabouts(), 1..=16)) {
            let given: Vec<_> = ranks.iter().map(|rank| offer(Ok(rank))).collect();
            prop_assert_eq!(all(&given).unwrap(), ranks.clone());
            let launch = Secret::new([7; 32]).unwrap();
            let made = [None, Some(&launch)].map(|launch| name_and_secret(&ranks, launch).unwrap());
            prop_assert_eq!(made[0].0, made[1].0);
            prop_assert_ne!(&made[0].1, &made[1].1);
        }

        #[test]
        fn any_bytes_decode_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            for magic in [&HERE[..], UNABLE, &[]] {
                let _ = all(&[[magic, &bytes].concat()]);
            }
        }
    }

    #[test]
    fn a_rank_that_cannot_be_met_says_why_in_no_more_than_a_payload() {
        let own = offer(Err(&BootstrapError::Protocol("é".repeat(MAX_PAYLOAD))));
        assert!(own.len() <= MAX_PAYLOAD);
        let error = all(&[own]).unwrap_err().to_string();
        assert!(error.starts_with("rank 0 cannot be met: protocol error: éé"), "{error}");
    }
}
