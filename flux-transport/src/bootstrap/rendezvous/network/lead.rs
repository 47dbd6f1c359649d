//! Rank 0's side of the first step.
//!
//! Invariant: rank 0 listens on the given address only, never on all of the host's.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::{Met, TcpRendezvous, resolve};
use crate::bootstrap::deadlines::ANSWER;
use crate::bootstrap::error::BootstrapError;
use crate::bootstrap::link::Link;
use crate::bootstrap::random::random;
use crate::bootstrap::rendezvous::auth;
use crate::bootstrap::rendezvous::gather::{self, RankGroup};
use crate::bootstrap::rendezvous::listener::{LaunchKey, Listener, PATIENCE};
use crate::bootstrap::rendezvous::roster::{Roster, WHEREABOUTS_BYTES, Whereabouts};
use crate::bootstrap::tcp;

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
            let found = resolve::addresses(address, deadline)?.unwrap_or_default();
            if resolve::only_loopback(address.host(), &found) {
                let text = format!(
                    "is {} on rank 0's host, which other hosts cannot reach: give an address \
                     instead of the name",
                    found[0]
                );
                return Err(problem(text));
            }
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
                std::thread::sleep(Duration::from_millis(50));
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

    /// Whether a process of this launch listens there.
    fn is_taken_by_us(&self, place: SocketAddr, deadline: Instant) -> bool {
        let until = deadline.min(Instant::now() + PATIENCE);
        tcp::connect(place, until)
            .is_ok_and(|socket| auth::greet(&Link::tcp(socket), self.place.launch, until).is_ok())
    }

    /// Waits for all ranks and tells each where the others are.
    pub(super) fn lead(&self, listener: OwnedFd, deadline: Instant) -> Result<Met, BootstrapError> {
        let address = tcp::local(listener.as_fd())
            .map_err(BootstrapError::io("looking at rank 0's own address"))?;
        let meeting = u128::from_le_bytes(
            random().map_err(BootstrapError::io("drawing the meeting's number"))?,
        );
        let key = LaunchKey { secret: self.place.secret.clone(), launch: self.place.launch };
        let own = self.hello(self.place.launch);
        let group = RankGroup {
            own,
            world: self.world,
            ranks: self.world.ranks().collect(),
            more: WHEREABOUTS_BYTES,
        };
        let members = gather::gather(group, Listener::tcp(listener, key), deadline)?;
        let mut ranks = vec![Whereabouts { host: self.host(), address }];
        for member in &members {
            let said = member
                .said
                .first_chunk()
                .ok_or_else(|| BootstrapError::Protocol("a hello without an address".to_owned()))?;
            ranks.push(Whereabouts::decode(said));
        }
        let roster = Roster { meeting, ranks };
        let bytes = roster.encode();
        for member in &members {
            if let Err(error) = member.link.send(&[&bytes], &[], Instant::now() + ANSWER) {
                tracing::debug!(rank = %member.rank, %error, "a rank left while the group formed");
            }
        }
        let links = members.into_iter().map(|member| (member.rank, member.link)).collect();
        Ok(Met { roster, links, listener: None })
    }
}
