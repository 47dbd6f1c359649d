//! Addresses of hosts: rank 0's, and what this one is told of its own.

use std::ffi::OsString;
use std::net::IpAddr;

use super::variables::Variables;
use crate::bootstrap::error::BootstrapError;
use crate::bootstrap::names::FLUX_ADDRESS;

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
