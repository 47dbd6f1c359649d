//! Where the ranks of a launch meet.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use super::address::{Address, own_address};
use super::directories::runtime_directory;
use crate::bootstrap::error::BootstrapError;
use crate::bootstrap::names::FLUX_HOST_ID;
use crate::bootstrap::secret::Secret;

/// Where the ranks of one launch meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// All ranks are on this host.
    Host(HostPlace),
    /// They may be on several.
    Network(NetworkPlace),
}

/// Where the ranks of one host meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPlace {
    /// The directory of the rendezvous socket; mode 0700 and of this user, or it is refused.
    pub directory: PathBuf,
    /// Whether the leader makes the directory and removes it; else the launcher does.
    pub made_by_leader: bool,
    /// Distinguishes launches that use one directory by mistake. Not a secret.
    pub nonce: u128,
}

impl HostPlace {
    /// In a directory that is there; `names` tell launches apart that might use it.
    pub(crate) fn at(directory: PathBuf, names: &[&[u8]]) -> Self {
        let nonce = digest(&[&[directory.as_os_str().as_encoded_bytes()], names].concat());
        Self { directory, made_by_leader: false, nonce }
    }

    /// In a directory of the user's own and of this launch.
    pub(crate) fn below(directory: &Path, nonce: u128) -> Self {
        Self {
            directory: directory.join(format!("{}{nonce:032x}", Self::prefix())),
            made_by_leader: true,
            nonce,
        }
    }

    /// How the names of such directories begin.
    fn prefix() -> String {
        format!("flux-{}-", rustix::process::getuid().as_raw())
    }

    /// Whether `name` is one that [`below`](Self::below) gives.
    pub(crate) fn is_name(name: &str) -> bool {
        name.strip_prefix(&Self::prefix())
            .is_some_and(|nonce| nonce.len() == 32 && u128::from_str_radix(nonce, 16).is_ok())
    }
}

/// Where the ranks of several hosts meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkPlace {
    /// Where rank 0 listens.
    pub address: Address,
    /// What all ranks know and nobody else does.
    pub secret: Secret,
    /// Tells this launch from others at the address. Not a secret.
    pub launch: u128,
    /// Where the ranks of one of the hosts make a private directory to meet in.
    pub directory: PathBuf,
    /// Sets ranks apart that could share a host.
    pub host_id: Option<OsString>,
    /// This host's address for the others, where it is said.
    pub own_address: Option<IpAddr>,
}

impl NetworkPlace {
    /// At rank 0's `HOST:PORT`.
    ///
    /// # Errors
    /// [`BootstrapError::Address`] for anything else.
    pub(crate) fn at(address: &str, secret: Secret) -> Result<Self, BootstrapError> {
        let launch = digest(&[address.as_bytes()]);
        let address = Address::parse(address).ok_or_else(|| BootstrapError::Address {
            address: format!("{address:?}"),
            problem: "is not of the form HOST:PORT".to_owned(),
        })?;
        let lookup = |name: &str| std::env::var_os(name);
        Ok(Self {
            address,
            secret,
            launch,
            directory: runtime_directory(&lookup),
            host_id: lookup(FLUX_HOST_ID),
            own_address: own_address(&lookup)?,
        })
    }
}

/// FNV-1a of the parts and their lengths. A name for a launch, not a defence.
pub(super) fn digest(parts: &[&[u8]]) -> u128 {
    const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let lengths = parts.iter().flat_map(|part| (part.len() as u64).to_le_bytes());
    let bytes = parts.iter().flat_map(|part| part.iter().copied());
    lengths.chain(bytes).fold(OFFSET, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME))
}
