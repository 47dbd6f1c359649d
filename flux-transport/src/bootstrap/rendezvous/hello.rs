//! The messages of the rendezvous: a rank's hello and its leader's replies.
//!
//! Invariant: fixed layouts, little-endian. A hello's first 32 bytes mean the same in every
//! protocol version. Decoding never panics.

use flux_core::{Rank, WorldSize};

use crate::bootstrap::deadlines::WAITING_FOR_RANKS;
use crate::bootstrap::error::{BootstrapError, ranks_in};

/// Version of these messages and of the frames that follow.
pub(crate) const PROTOCOL: u32 = 6;
const HELLO_MAGIC: [u8; 8] = *b"fluxhelo";
const REPLY_MAGIC: [u8; 8] = *b"fluxrply";
const VERSION_BYTES: usize = 32;
/// Where the part that all versions share ends: magic, protocol, rank, world, pid, 8 bytes kept.
const PREFIX: usize = 32;
pub(crate) const HELLO_BYTES: usize = PREFIX + 16 + VERSION_BYTES;
pub(crate) const REPLY_BYTES: usize = 8 + 4 * 4 + 8 + 2 * VERSION_BYTES;

/// A library version, cut to fit.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Version([u8; VERSION_BYTES]);

impl Version {
    pub(crate) fn new(text: &str) -> Self {
        let mut bytes = [0; VERSION_BYTES];
        let length = text.len().min(VERSION_BYTES);
        bytes[..length].copy_from_slice(&text.as_bytes()[..length]);
        Self(bytes)
    }
}

impl std::fmt::Debug for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let end = self.0.iter().position(|&byte| byte == 0).unwrap_or(VERSION_BYTES);
        // What a foreign process sent goes into messages for people: printable characters only.
        for &byte in &self.0[..end] {
            f.write_fmt(format_args!(
                "{}",
                if byte.is_ascii_graphic() { char::from(byte) } else { '?' }
            ))?;
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) protocol: u32,
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) pid: u32,
    pub(crate) nonce: u128,
    pub(crate) version: Version,
}

impl Hello {
    pub(crate) fn of(rank: Rank, world: WorldSize, nonce: u128) -> Self {
        let version = Version::new(env!("CARGO_PKG_VERSION"));
        Self {
            protocol: PROTOCOL,
            rank: rank.get(),
            world: world.get(),
            pid: std::process::id(),
            nonce,
            version,
        }
    }

    pub(crate) fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&HELLO_MAGIC);
        for (at, value) in [(8, self.protocol), (12, self.rank), (16, self.world), (20, self.pid)] {
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        bytes[PREFIX..PREFIX + 16].copy_from_slice(&self.nonce.to_le_bytes());
        bytes[PREFIX + 16..].copy_from_slice(&self.version.0);
        bytes
    }

    /// The hello and what is said after it; `None` for what is no hello of any version.
    pub(crate) fn decode(bytes: &[u8]) -> Option<(Self, &[u8])> {
        if bytes.get(..8)? != HELLO_MAGIC || bytes.len() < PREFIX {
            return None;
        }
        let mut hello = Self {
            protocol: u32_at(bytes, 8)?,
            rank: u32_at(bytes, 12)?,
            world: u32_at(bytes, 16)?,
            pid: u32_at(bytes, 20)?,
            nonce: 0,
            version: Version::new("of an unknown version"),
        };
        if hello.protocol != PROTOCOL {
            return Some((hello, &bytes[PREFIX..]));
        }
        hello.nonce = u128::from_le_bytes(array_at(bytes, PREFIX)?);
        hello.version = Version(array_at(bytes, PREFIX + 16)?);
        Some((hello, &bytes[HELLO_BYTES..]))
    }
}

/// What a rank says when its deadline passes before the others have come: no group forms any more.
pub(crate) const GIVING_UP: [u8; 8] = *b"fluxgone";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// Known; these ranks (bits) have not come yet.
    Waiting {
        missing: u32,
    },
    /// All are there: a socket to every other rank comes with this, in rank order.
    Welcome {
        sockets: u32,
    },
    Refused(Refusal),
}

/// Why the group does not form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    DuplicateRank {
        rank: u32,
        first: u32,
        second: u32,
    },
    World {
        rank: u32,
        world: u32,
        expected: u32,
    },
    Version {
        rank: u32,
        protocols: [u32; 2],
        version: Version,
        expected: Version,
    },
    /// With how many connections did not prove that they hold the secret.
    Missing {
        ranks: u32,
        denied: u32,
    },
    OtherLaunch,
    /// The leader cannot connect the ranks.
    Leader {
        rank: u32,
        errno: u32,
    },
}

impl Refusal {
    /// As the error of `rank`, in a world of `world`.
    pub(crate) fn into_error(self, rank: Rank, world: WorldSize) -> BootstrapError {
        match self {
            Self::DuplicateRank { rank, first, second } => {
                BootstrapError::DuplicateRank { rank: Rank::new(rank), first, second }
            }
            Self::World { rank, world, expected } => {
                BootstrapError::WorldMismatch { rank: Rank::new(rank), world, expected }
            }
            Self::Version { rank, protocols: [theirs, ours], version, expected } => {
                BootstrapError::VersionMismatch {
                    rank: Rank::new(rank),
                    version: format!("{version} (protocol {theirs})"),
                    expected: format!("{expected} (protocol {ours})"),
                }
            }
            Self::Missing { ranks, denied } => BootstrapError::Timeout {
                step: WAITING_FOR_RANKS,
                missing: ranks_in(ranks, world),
                denied,
                sought: None,
            },
            Self::OtherLaunch => BootstrapError::OtherLaunch { rank },
            Self::Leader { rank, errno } => {
                let source = std::io::Error::from_raw_os_error(errno.cast_signed());
                BootstrapError::Leader { rank: Rank::new(rank), source }
            }
        }
    }
}

impl Reply {
    pub(crate) fn encode(&self) -> [u8; REPLY_BYTES] {
        let none = Version([0; VERSION_BYTES]);
        let (kind, numbers, mask, versions) = match *self {
            Self::Waiting { missing } => (0, [0; 3], missing, [none; 2]),
            Self::Welcome { sockets } => (1, [sockets, 0, 0], 0, [none; 2]),
            Self::Refused(Refusal::DuplicateRank { rank, first, second }) => {
                (2, [rank, first, second], 0, [none; 2])
            }
            Self::Refused(Refusal::World { rank, world, expected }) => {
                (3, [rank, world, expected], 0, [none; 2])
            }
            Self::Refused(Refusal::Version {
                rank,
                protocols: [theirs, ours],
                version,
                expected,
            }) => (4, [rank, theirs, ours], 0, [version, expected]),
            Self::Refused(Refusal::Missing { ranks, denied }) => {
                (5, [denied, 0, 0], ranks, [none; 2])
            }
            Self::Refused(Refusal::OtherLaunch) => (6, [0; 3], 0, [none; 2]),
            Self::Refused(Refusal::Leader { rank, errno }) => (7, [rank, errno, 0], 0, [none; 2]),
        };
        let mut bytes = [0; REPLY_BYTES];
        bytes[..8].copy_from_slice(&REPLY_MAGIC);
        for (at, value) in [(8, kind), (12, numbers[0]), (16, numbers[1]), (20, numbers[2])] {
            bytes[at..at + 4].copy_from_slice(&u32::to_le_bytes(value));
        }
        bytes[24..32].copy_from_slice(&u64::from(mask).to_le_bytes());
        bytes[32..64].copy_from_slice(&versions[0].0);
        bytes[64..].copy_from_slice(&versions[1].0);
        bytes
    }

    /// `None` for what is no reply of this version.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        if bytes.len() != REPLY_BYTES || bytes[..8] != REPLY_MAGIC {
            return None;
        }
        let [a, b, c] = [u32_at(bytes, 12)?, u32_at(bytes, 16)?, u32_at(bytes, 20)?];
        let mask = u32::try_from(u64::from_le_bytes(array_at(bytes, 24)?)).ok()?;
        Some(match u32_at(bytes, 8)? {
            0 => Self::Waiting { missing: mask },
            1 => Self::Welcome { sockets: a },
            2 => Self::Refused(Refusal::DuplicateRank { rank: a, first: b, second: c }),
            3 => Self::Refused(Refusal::World { rank: a, world: b, expected: c }),
            4 => {
                let (version, expected) =
                    (Version(array_at(bytes, 32)?), Version(array_at(bytes, 64)?));
                Self::Refused(Refusal::Version { rank: a, protocols: [b, c], version, expected })
            }
            5 => Self::Refused(Refusal::Missing { ranks: mask, denied: a }),
            6 => Self::Refused(Refusal::OtherLaunch),
            7 => Self::Refused(Refusal::Leader { rank: a, errno: b }),
            _ => return None,
        })
    }
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    array_at(bytes, at).map(u32::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn version() -> impl Strategy<Value = Version> {
        "[ -~]{0,40}".prop_map(|text| Version::new(&text))
    }

    fn reply() -> impl Strategy<Value = Reply> {
        let refusal = prop_oneof![
            any::<[u32; 3]>().prop_map(|[rank, first, second]| Refusal::DuplicateRank {
                rank,
                first,
                second
            }),
            any::<[u32; 3]>().prop_map(|[rank, world, expected]| Refusal::World {
                rank,
                world,
                expected
            }),
            (any::<u32>(), any::<[u32; 2]>(), version(), version()).prop_map(
                |(rank, protocols, version, expected)| Refusal::Version {
                    rank,
                    protocols,
                    version,
                    expected
                }
            ),
            any::<(u32, u32)>().prop_map(|(ranks, denied)| Refusal::Missing { ranks, denied }),
            Just(Refusal::OtherLaunch),
            any::<[u32; 2]>().prop_map(|[rank, errno]| Refusal::Leader { rank, errno }),
        ];
        prop_oneof![
            any::<u32>().prop_map(|missing| Reply::Waiting { missing }),
            any::<u32>().prop_map(|sockets| Reply::Welcome { sockets }),
            refusal.prop_map(Reply::Refused),
        ]
    }

    proptest! {
        #[test]
        fn hellos_come_back(
            rank: u32,
            world: u32,
            pid: u32,
            nonce: u128,
            version in version(),
            more in prop::collection::vec(any::<u8>(), 0..50),
        ) {
            let hello = Hello { protocol: PROTOCOL, rank, world, pid, nonce, version };
            let bytes = [&hello.encode()[..], &more].concat();
            prop_assert_eq!(Hello::decode(&bytes), Some((hello, &more[..])));
            prop_assert_eq!(Hello::decode(&bytes[..HELLO_BYTES - 1]), None);
        }

        #[test]
        fn another_protocols_hello_keeps_its_prefix(
            protocol in PROTOCOL + 1..,
            rank: u32,
            tail in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            let hello = Hello { protocol, rank, world: 4, pid: 7, nonce: 0, version: Version::new("") };
            let bytes = [&hello.encode()[..PREFIX], &tail].concat();
            let (decoded, more) = Hello::decode(&bytes).unwrap();
            prop_assert_eq!(more, &tail[..]);
            prop_assert_eq!((decoded.protocol, decoded.rank, decoded.world, decoded.pid), (protocol, rank, 4, 7));
        }

        #[test]
        fn replies_come_back(reply in reply()) {
            prop_assert_eq!(Reply::decode(&reply.encode()), Some(reply));
        }

        #[test]
        fn any_bytes_decode_without_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
            helo: bool,
        ) {
            let magic = if helo { HELLO_MAGIC } else { REPLY_MAGIC };
            for bytes in [bytes.clone(), [&magic[..], &bytes].concat()] {
                if let Some((hello, _)) = Hello::decode(&bytes) {
                    prop_assert!(hello.version.to_string().len() <= VERSION_BYTES);
                }
                if let Some(Reply::Refused(refusal)) = Reply::decode(&bytes) {
                    let text = refusal.into_error(Rank::new(1), WorldSize::new(4).unwrap()).to_string();
                    prop_assert!(text.len() < 400);
                }
            }
        }
    }
}
