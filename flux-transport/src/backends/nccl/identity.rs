//! What a rank says of itself before any makes a communicator, and which ranks can make one.
//!
//! Invariant: decoding accepts what [`Identity::encode`] produces, of this version, and nothing
//! else.

use super::sharing::Sharing;
use flux_core::Rank;
use flux_cuda::DeviceUuid;
use sha2::{Digest, Sha256};
use std::ffi::OsStr;

/// What NCCL takes for the name of a process's host. Two ranks of one host it refuses to have on
/// one device.
pub(super) const HOST: &str = "NCCL_HOSTID";
/// First bytes of a message, with the version.
const MAGIC: [u8; 8] = *b"fluxncl7";

/// What a rank says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) uuid: DeviceUuid,
    /// By which NCCL tells hosts apart, as far as a variable says: see [`host_digest`].
    pub(super) host: u64,
    /// NCCL's version.
    pub(super) version: u32,
    pub(super) sharing: Sharing,
    /// What its environment says of [`PIECES`](super::settings::PIECES); 0 for nothing.
    pub(super) pieces: u64,
}

impl Identity {
    pub(super) fn encode(&self) -> Vec<u8> {
        let Self { uuid, host, version, sharing, pieces } = self;
        let Sharing { lanes, asked, all, each, part_bytes } = sharing;
        let words = [version, lanes, asked, all, each].map(|word| word.to_le_bytes()).concat();
        [
            &MAGIC[..],
            &uuid.0,
            &host.to_le_bytes(),
            &words,
            &part_bytes.to_le_bytes(),
            &pieces.to_le_bytes(),
        ]
        .concat()
    }

    pub(super) fn decode(message: &[u8]) -> Option<Self> {
        let (uuid, rest) = message.strip_prefix(&MAGIC)?.split_first_chunk()?;
        let (host, mut rest) = rest.split_first_chunk()?;
        let mut words = [0; 5];
        for word in &mut words {
            let (bytes, after) = rest.split_first_chunk()?;
            (*word, rest) = (u32::from_le_bytes(*bytes), after);
        }
        let (part_bytes, rest) = rest.split_first_chunk()?;
        let [version, lanes, asked, all, each] = words;
        let sharing =
            Sharing { lanes, asked, all, each, part_bytes: u64::from_le_bytes(*part_bytes) };
        let (uuid, host, pieces) =
            (DeviceUuid(*uuid), u64::from_le_bytes(*host), u64::from_le_bytes(*rest.as_array()?));
        Some(Self { uuid, host, version, sharing, pieces })
    }
}

/// What a rank's `NCCL_HOSTID` is, in a few bytes; the same for all that have none.
pub(super) fn host_digest(variable: Option<&OsStr>) -> u64 {
    let digest = Sha256::digest(variable.unwrap_or_default().as_encoded_bytes());
    digest.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Whether NCCL refuses both in one communicator; `shared`: whether they agreed to share devices.
fn collide(one: &Identity, other: &Identity, shared: bool) -> bool {
    one.uuid == other.uuid && !(shared && one.host != other.host)
}

/// Whether all ranks can be of one communicator.
pub(super) fn are_apart(identities: &[Identity], shared: bool) -> bool {
    let is_apart = |(before, one): (usize, &Identity)| {
        identities[..before].iter().all(|other| !collide(one, other, shared))
    };
    identities.iter().enumerate().all(is_apart)
}

/// Whether ranks can join whose rail is `rail`, of all that there are; `shared`: whether they
/// agreed to share devices. Settings are to be the same on all rails: schedules follow from them,
/// and ranks of one call have one.
pub(super) fn check(
    rank: Rank,
    rail: &[Rank],
    identities: &[Identity],
    shared: bool,
) -> Result<(), String> {
    let mine = identities[rank.index()];
    let all = identities
        .iter()
        .enumerate()
        .filter_map(|(index, &other)| Some((Rank::new(u32::try_from(index).ok()?), other)));
    for (peer, other) in all.filter(|&(peer, _)| peer != rank) {
        if rail.contains(&peer) && collide(&mine, &other, shared) {
            let but = if shared {
                format!(", unless each is a process with an {HOST} of its own")
            } else {
                String::new()
            };
            return Err(format!(
                "ranks {rank} and {peer} are both on device {}: NCCL takes one rank a device{but}",
                mine.uuid
            ));
        }
        let settings = |of: Identity| {
            [
                ("NCCL", u64::from(of.version)),
                ("FLUX_NCCL_CTAS", u64::from(of.sharing.lanes)),
                ("NCCL_P2P_NET_CHUNKSIZE (0: none)", of.pieces),
            ]
        };
        for ((what, own), (_, others)) in settings(mine).into_iter().zip(settings(other)) {
            if own != others {
                return Err(format!("rank {rank} has {what} {own}, rank {peer} {others}"));
            }
        }
        if other.sharing != mine.sharing {
            let variables = |Sharing { each, all, part_bytes, .. }: Sharing| {
                format!("{each} of {all} channels for messages in parts of {part_bytes} bytes")
            };
            let (own, others) = (variables(mine.sharing), variables(other.sharing));
            return Err(format!(
                "by the variables of NCCL, rank {rank} has {own}, rank {peer} {others}: set the \
                 same on every rank"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(in crate::backends::nccl) fn identity(device: u8) -> Identity {
        let sharing = Sharing::new(4, 4, 1, 22_703, |_| None);
        Identity {
            uuid: DeviceUuid([device; 16]),
            host: host_digest(None),
            version: 22_703,
            sharing,
            pieces: 0,
        }
    }

    #[test]
    fn ranks_that_cannot_be_one_communicator_are_told_why() {
        let own = identity(0);
        // Rank 1's rail is 1 and 3; 0 and 2 are another, on the devices of the first.
        let check = |others: [Identity; 4]| {
            check(Rank::new(1), &[Rank::new(1), Rank::new(3)], &others, false)
        };
        let by_node = [own, own, identity(1), identity(1)];
        assert!(check(by_node).is_ok() && !are_apart(&by_node, true));
        assert!(are_apart(&[0, 1, 2, 3].map(identity), false));
        assert!(check([own; 4]).unwrap_err().contains("ranks 1 and 3 are both on device"));
        for (other, word) in [
            (Identity { version: 22800, ..identity(1) }, "rank 1 has NCCL 22703, rank # 22800"),
            (
                Identity { sharing: Sharing { lanes: 8, ..own.sharing }, ..identity(1) },
                "FLUX_NCCL_CTAS 4, rank # 8",
            ),
            (
                Identity { sharing: Sharing { all: 32, each: 8, ..own.sharing }, ..identity(1) },
                "has 4 of 16 channels",
            ),
            (
                Identity { pieces: 1 << 19, ..identity(1) },
                "NCCL_P2P_NET_CHUNKSIZE (0: none) 0, rank # 524288",
            ),
        ] {
            // What the ranks of another rail have counts, too.
            for rank in [0, 2, 3] {
                let mut all = [identity(2), own, identity(3), identity(1)];
                all[rank] = Identity { uuid: all[rank].uuid, ..other };
                let why = check(all).unwrap_err();
                assert!(why.contains(&word.replace('#', &rank.to_string())), "{why}");
            }
        }
    }

    #[test]
    fn ranks_share_a_device_that_agreed_to_and_are_on_different_hosts_to_nccl() {
        let named =
            |name: &str| Identity { host: host_digest(Some(OsStr::new(name))), ..identity(0) };
        let pair = |one: Identity, other: Identity, shared| {
            check(Rank::new(0), &[Rank::new(0), Rank::new(1)], &[one, other], shared)
        };
        assert!(
            pair(named("a"), named("b"), true).is_ok()
                && pair(named("a"), identity(0), true).is_ok()
        );
        assert!(
            pair(named("a"), named("b"), false)
                .unwrap_err()
                .ends_with("NCCL takes one rank a device")
        );
        for same in [identity(0), named("a")] {
            let why = pair(same, same, true).unwrap_err();
            assert!(
                why.ends_with("unless each is a process with an NCCL_HOSTID of its own"),
                "{why}"
            );
        }
    }

    proptest! {
        #[test]
        fn an_identity_survives_the_trip_and_no_part_of_it_does(
            uuid: [u8; 16],
            host: u64,
            version: u32,
            words: [u32; 4],
            part_bytes: u64,
            pieces: u64,
            cut in 0..68_usize,
        ) {
            let [lanes, asked, all, each] = words;
            let sharing = Sharing { lanes, asked, all, each, part_bytes };
            let identity = Identity { uuid: DeviceUuid(uuid), host, version, sharing, pieces };
            let mut message = identity.encode();
            prop_assert_eq!(message.len(), 68);
            prop_assert_eq!(Identity::decode(&message), Some(identity));
            prop_assert_eq!(Identity::decode(&message[..cut]), None);
            message.push(0);
            prop_assert_eq!(Identity::decode(&message), None);
        }
    }
}
