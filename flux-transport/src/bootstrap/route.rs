//! The address by which other hosts reach this one.
//!
//! Invariant: nothing is sent. The kernel names the address from which it would send.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::time::{Duration, Instant};

use super::environment::Address;
use super::error::BootstrapError;
use super::resolve;
use super::unblock::pause_for;

/// Addresses of no host, for documentation: the way to them is the default route.
const OUTSIDE: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
];

/// This host's address on the way to `peer`.
pub(super) fn towards(peer: IpAddr) -> Option<IpAddr> {
    let any: IpAddr = match peer {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect((peer, 9)).ok()?;
    Some(socket.local_addr().ok()?.ip().to_canonical()).filter(|own| !own.is_unspecified())
}

/// This host's address on the default route; `None` without one.
pub(super) fn outward() -> Option<IpAddr> {
    OUTSIDE.into_iter().find_map(towards)
}

/// This host's address for ranks of others: on the way to `peer`, once its name is known, else on
/// the default route, else the loopback device's.
pub(super) fn own(peer: Option<&Address>, deadline: Instant) -> Result<IpAddr, BootstrapError> {
    while let Some(peer) = peer {
        let found = resolve::addresses(peer, deadline)?.unwrap_or_default();
        if !resolve::only_loopback(peer.host(), &found)
            && let Some(own) = found.into_iter().find_map(towards)
        {
            return Ok(own);
        }
        if Instant::now() >= deadline || outward().is_some() {
            break;
        }
        pause_for(Duration::from_millis(50))
            .map_err(BootstrapError::io("looking for this host's address"))?;
    }
    Ok(outward().unwrap_or(Ipv4Addr::LOCALHOST.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lateness::AMPLE;

    #[test]
    fn the_way_to_the_loopback_device_begins_there() {
        assert_eq!(towards(Ipv4Addr::LOCALHOST.into()), Some(Ipv4Addr::LOCALHOST.into()));
        let peer = Address::parse("127.0.0.1:9").unwrap();
        assert_eq!(own(Some(&peer), Instant::now() + AMPLE).unwrap(), Ipv4Addr::LOCALHOST);
    }

    #[test]
    fn a_host_has_an_address_for_others_whatever_its_name_means() {
        let own = own(None, Instant::now()).unwrap();
        assert!(!own.is_unspecified());
        assert_eq!(own.is_loopback(), outward().is_none());
    }
}
