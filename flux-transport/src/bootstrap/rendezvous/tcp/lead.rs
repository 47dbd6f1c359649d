//! Rank 0's side.
//!
//! Invariant: rank 0 listens on one address only, never on all of the host's.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::TcpRendezvous;
use crate::bootstrap::connection::Connection;
use crate::bootstrap::environment::NetworkPlace;
use crate::bootstrap::error::BootstrapError;
use crate::bootstrap::names::FLUX_ADDRESS;
use crate::bootstrap::rendezvous::auth;
use crate::bootstrap::rendezvous::gather::{self, RankGroup};
use crate::bootstrap::rendezvous::listener::{LaunchKey, Listener, PATIENCE};
use crate::bootstrap::rendezvous::roster::MAX_PAYLOAD;
use crate::bootstrap::unblock::pause_for;
use crate::bootstrap::{resolve, route, tcp};

/// How long a port may stay taken: the program of an earlier launch may be about to end.
const TAKEN: Duration = Duration::from_secs(5);

impl TcpRendezvous {
    /// Listens at the launch's address; `None` where another process of the launch does.
    pub(super) fn take_address(
        &self,
        deadline: Instant,
    ) -> Result<Option<OwnedFd>, BootstrapError> {
        let address = &self.place.address;
        let problem =
            |problem: String| BootstrapError::Address { address: address.to_string(), problem };
        let end = deadline.min(Instant::now() + TAKEN);
        loop {
            let found = self.listens_at(deadline)?;
            let mut taken = false;
            let places = address
                .ports()
                .iter()
                .flat_map(|&port| found.iter().map(move |&ip| SocketAddr::new(ip, port)));
            for place in places.clone() {
                match tcp::listen(place) {
                    Ok(listener) => {
                        tracing::debug!(%place, "rank 0 listens");
                        return Ok(Some(listener));
                    }
                    Err(Errno::ADDRINUSE) if self.is_taken_by_us(place, deadline) => {
                        return Ok(None);
                    }
                    Err(Errno::ADDRINUSE) => taken = true,
                    Err(Errno::ADDRNOTAVAIL | Errno::AFNOSUPPORT) => {}
                    Err(errno) => {
                        return Err(problem(format!("rank 0 cannot listen there: {errno}")));
                    }
                }
            }
            if Instant::now() < end && (taken || found.is_empty()) {
                pause_for(Duration::from_millis(50))
                    .map_err(BootstrapError::io("waiting for rank 0's address"))?;
                continue;
            }
            return match (taken, found.is_empty()) {
                (true, _) => Err(problem(
                    "is taken by another program on rank 0's host: give another port".to_owned(),
                )),
                (false, true) => Err(problem("the name is not known on rank 0's host".to_owned())),
                // Rank 0 was started twice, here not where it should be.
                (false, false)
                    if places.clone().any(|place| self.is_taken_by_us(place, deadline)) =>
                {
                    Ok(None)
                }
                (false, false) => {
                    Err(problem("is no address of the host that rank 0 runs on".to_owned()))
                }
            };
        }
    }

    /// The addresses of rank 0's host that others reach. Where its own name is that of the loopback
    /// device or unknown, as the other hosts know better, the address of its way to them.
    fn listens_at(&self, deadline: Instant) -> Result<Vec<IpAddr>, BootstrapError> {
        let NetworkPlace { address, own_address, .. } = &self.place;
        if let Some(own) = own_address {
            return Ok(vec![*own]);
        }
        let found = resolve::addresses(address, deadline)?.unwrap_or_default();
        if found.is_empty() {
            return Ok(route::outward().into_iter().collect());
        }
        if !resolve::only_loopback(address.host(), &found) {
            return Ok(found);
        }
        route::outward().map(|own| vec![own]).ok_or_else(|| BootstrapError::Address {
            address: address.to_string(),
            problem: format!(
                "is {} on rank 0's host, which other hosts cannot reach: name its address in \
                 {FLUX_ADDRESS}",
                found[0]
            ),
        })
    }

    /// Whether a process of this launch listens there.
    fn is_taken_by_us(&self, place: SocketAddr, deadline: Instant) -> bool {
        let until = deadline.min(Instant::now() + PATIENCE);
        tcp::connect(place, until).is_ok_and(|socket| {
            auth::greet(&Connection::tcp(socket), self.place.launch, until).is_ok()
        })
    }

    /// Waits for all ranks and tells each what all have given.
    pub(super) fn lead(
        &self,
        listener: OwnedFd,
        payload: Vec<u8>,
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let key = LaunchKey { secret: self.place.secret.clone(), launch: self.place.launch };
        let (own, ranks) = (self.hello(), self.world.ranks().collect());
        let group = RankGroup { own, world: self.world, ranks, most: MAX_PAYLOAD };
        let members = gather::gather(group, Listener::tcp(listener, key), deadline)?;
        Ok(gather::tell_all(payload, members))
    }
}
