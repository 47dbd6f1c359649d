//! Where the ranks of a launch meet.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use super::variables::Variables;
use crate::bootstrap::error::BootstrapError;
use crate::bootstrap::names::{FLUX_ADDRESS, FLUX_HOST_ID, FLUX_RENDEZVOUS};
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

/// An address or a name of rank 0's host, and ports of which it takes the first that is free.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    host: String,
    ports: Vec<u16>,
}

/// Ports that follow from a launch's name: below those that systems give to outgoing connections.
const DERIVED: std::ops::Range<u16> = 20_000..32_000;
const TRIES: u16 = 8;

impl Address {
    /// `HOST:PORT`; an IPv6 address in brackets.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let port: u16 = port.parse().ok().filter(|&port| port != 0)?;
        let host = match host.strip_prefix('[') {
            Some(host) => host.strip_suffix(']')?.parse::<std::net::Ipv6Addr>().ok()?.to_string(),
            None if host.is_empty() || host.contains([':', '/', '@', ' ']) => return None,
            None => host.to_owned(),
        };
        Some(Self { host, ports: vec![port] })
    }

    /// Ports of the launch's own, without one that is `taken`.
    pub(crate) fn derived(host: String, launch: u128, taken: Option<u16>) -> Self {
        let places = u128::from((DERIVED.end - DERIVED.start) / TRIES);
        let first = DERIVED.start + (launch % places) as u16 * TRIES;
        Self { host, ports: (first..first + TRIES).filter(|&port| Some(port) != taken).collect() }
    }

    /// The address or name.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The ports, in the order in which they are tried.
    pub fn ports(&self) -> &[u16] {
        &self.ports
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.ports[..] {
            [port] => write!(f, "{} port {port}", self.host),
            [first, .., last] => write!(f, "{} ports {first} to {last}", self.host),
            [] => f.write_str(&self.host),
        }
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

/// What `FLUX_ADDRESS` says; an IPv6 address may be in brackets.
pub(crate) fn own_address(
    lookup: &dyn Fn(&str) -> Option<OsString>,
) -> Result<Option<IpAddr>, BootstrapError> {
    let vars = Variables { lookup };
    let Some(value) = vars.get(FLUX_ADDRESS).filter(|value| !value.is_empty()) else {
        return Ok(None);
    };
    let text = value.to_str().unwrap_or_default();
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let wanted = "an IP address of this host";
    bare.parse().map(Some).map_err(|_| vars.wrong(FLUX_ADDRESS, wanted))
}

/// Where private run-time directories are made: `XDG_RUNTIME_DIR` if it is a directory, else
/// `TMPDIR`, else `/tmp`.
pub(crate) fn runtime_directory(lookup: &dyn Fn(&str) -> Option<OsString>) -> PathBuf {
    named_runtime_directory(lookup).map_or_else(|| PathBuf::from("/tmp"), |(_, path)| path)
}

/// The directory with the variable that names it.
fn named_runtime_directory(
    lookup: &dyn Fn(&str) -> Option<OsString>,
) -> Option<(&'static str, PathBuf)> {
    let said =
        |name| Some((name, lookup(name).map(PathBuf::from).filter(|path| path.is_absolute())?));
    said("XDG_RUNTIME_DIR").filter(|(_, path)| path.is_dir()).or_else(|| said("TMPDIR"))
}

/// The variable by which a rendezvous directory has its place; `None` where the caller chose it. A
/// launcher makes the directory that it names in `FLUX_RENDEZVOUS` in a run-time directory, too.
pub(crate) fn variable_of(
    directory: &Path,
    lookup: &dyn Fn(&str) -> Option<OsString>,
) -> Option<&'static str> {
    let within = named_runtime_directory(lookup)
        .filter(|(_, path)| directory.starts_with(path))
        .map(|(name, _)| name);
    within.or_else(|| {
        lookup(FLUX_RENDEZVOUS)
            .filter(|value| directory == Path::new(value))
            .map(|_| FLUX_RENDEZVOUS)
    })
}
