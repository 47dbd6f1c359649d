//! The second step: every two ranks of different hosts connect, but for rank 0, which has its connections.
//!
//! Invariant: the higher rank calls, the lower one listens, and a rank calls all that it has to before it listens; so whom a rank waits for is
//! always lower, and the lowest waits for nobody.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use flux_core::Rank;
use rustix::io::Errno;

use super::TcpRendezvous;
use crate::bootstrap::auth::{self, Miss};
use crate::bootstrap::door::{Door, Guest, Key};
use crate::bootstrap::error::BootstrapError;
use crate::bootstrap::hello::{Hello, PROTOCOL};
use crate::bootstrap::link::Link;
use crate::bootstrap::roster::Roster;
use crate::bootstrap::{socket, tcp};
use crate::control::Hosts;

const STEP: &str = "connecting the ranks of different hosts";

impl TcpRendezvous {
    /// Links to the ranks of other hosts, without rank 0.
    pub(super) fn connect_pairs(
        &self,
        roster: &Roster,
        hosts: &Hosts,
        listener: OwnedFd,
        deadline: Instant,
    ) -> Result<Vec<(Rank, Link)>, BootstrapError> {
        let elsewhere = self.world.ranks().skip(1).filter(|&peer| !hosts.together(self.rank, peer));
        let (lower, mut higher): (Vec<Rank>, Vec<Rank>) = elsewhere.partition(|&peer| peer < self.rank);
        let mut links = Vec::new();
        for peer in lower {
            links.push((peer, self.call_peer(peer, roster, deadline)?));
        }
        let mut door = Door::tcp(listener, Key { secret: self.place.secret.clone(), launch: roster.meeting });
        while !higher.is_empty() {
            if Instant::now() >= deadline {
                return Err(BootstrapError::Timeout { step: STEP, missing: higher, denied: 0 });
            }
            let until = door.expire().map_or(deadline, |until| until.min(deadline));
            let mut watched: Vec<_> = door.watched().collect();
            socket::wait(&mut watched, Some(until)).map_err(BootstrapError::io(STEP))?;
            let ready: Vec<bool> = watched.iter().map(|fd| !fd.revents().is_empty()).collect();
            for Guest { link, said } in door.admit(&mut ready.into_iter()).map_err(BootstrapError::io(STEP))? {
                match Hello::decode(&said) {
                    Some((hello, []))
                        if hello.protocol == PROTOCOL && hello.nonce == roster.meeting && higher.contains(&Rank::new(hello.rank)) =>
                    {
                        let peer = Rank::new(hello.rank);
                        higher.retain(|&other| other != peer);
                        links.push((peer, link));
                    }
                    _ => tracing::warn!("dropped a connection that knows the secret and is no rank that is waited for"),
                }
            }
        }
        Ok(links)
    }

    fn call_peer(&self, peer: Rank, roster: &Roster, deadline: Instant) -> Result<Link, BootstrapError> {
        let address = roster.ranks[peer.index()].address;
        let hello = self.hello(roster.meeting).encode();
        loop {
            let called = tcp::connect(address, deadline).map(Link::tcp).and_then(|link| {
                // It may have lower ranks of its own to call first, so this waits for as long as there is time.
                let proven = auth::greet(&link, roster.meeting, deadline)
                    .and_then(|challenge| auth::prove(&link, &self.place.secret, &challenge, &hello, deadline));
                match proven {
                    Ok(()) => Ok(link),
                    // Too many strangers at its door, and this was the oldest.
                    Err(Miss::Nobody) => Err(Errno::AGAIN),
                    // Somebody else is where it was.
                    Err(Miss::Stranger | Miss::OtherLaunch | Miss::Denied) => Err(Errno::CONNREFUSED),
                    Err(Miss::System(errno)) => Err(errno),
                }
            });
            match called {
                Ok(link) => return Ok(link),
                // It listened before it was on the roster.
                Err(Errno::CONNREFUSED) => return Err(BootstrapError::Lost { rank: peer, step: STEP }),
                Err(errno @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => return Err(BootstrapError::io(STEP)(errno)),
                Err(errno) if Instant::now() >= deadline => {
                    tracing::debug!(%peer, %address, %errno, "does not answer");
                    return Err(BootstrapError::Timeout { step: STEP, missing: vec![peer], denied: 0 });
                }
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }
}
