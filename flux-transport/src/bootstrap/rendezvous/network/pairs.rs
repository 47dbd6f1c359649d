//! The second step: every two ranks of different hosts connect; rank 0 is connected already.
//!
//! Invariant: a rank calls all lower ranks before it listens for higher ones, so no two wait for
//! each other.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use flux_core::Rank;
use rustix::io::Errno;

use super::TcpRendezvous;
use crate::bootstrap::control::Hosts;
use crate::bootstrap::error::BootstrapError;
use crate::bootstrap::link::Link;
use crate::bootstrap::rendezvous::auth::{self, Miss};
use crate::bootstrap::rendezvous::hello::{Hello, PROTOCOL};
use crate::bootstrap::rendezvous::listener::{Caller, LaunchKey, Listener};
use crate::bootstrap::rendezvous::roster::Roster;
use crate::bootstrap::{socket, tcp};

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
        let (lower, mut higher): (Vec<Rank>, Vec<Rank>) =
            elsewhere.partition(|&peer| peer < self.rank);
        let mut links = Vec::new();
        for peer in lower {
            links.push((peer, self.call_peer(peer, roster, deadline)?));
        }
        let mut listener = Listener::tcp(
            listener,
            LaunchKey { secret: self.place.secret.clone(), launch: roster.meeting },
        );
        while !higher.is_empty() {
            if Instant::now() >= deadline {
                return Err(BootstrapError::Timeout {
                    step: STEP,
                    missing: higher,
                    denied: listener.denied(),
                    sought: None,
                });
            }
            let until = listener.expire().map_or(deadline, |until| until.min(deadline));
            let mut watched: Vec<_> = listener.watched().collect();
            socket::wait(&mut watched, Some(until)).map_err(BootstrapError::io(STEP))?;
            let ready: Vec<bool> = watched.iter().map(|fd| !fd.revents().is_empty()).collect();
            for Caller { link, said } in
                listener.admit(&mut ready.into_iter()).map_err(BootstrapError::io(STEP))?
            {
                match Hello::decode(&said) {
                    Some((hello, []))
                        if hello.protocol == PROTOCOL
                            && hello.nonce == roster.meeting
                            && higher.contains(&Rank::new(hello.rank)) =>
                    {
                        let peer = Rank::new(hello.rank);
                        higher.retain(|&other| other != peer);
                        links.push((peer, link));
                    }
                    _ => tracing::warn!(
                        "dropped a connection that knows the secret and is no rank that is waited \
                         for"
                    ),
                }
            }
        }
        Ok(links)
    }

    fn call_peer(
        &self,
        peer: Rank,
        roster: &Roster,
        deadline: Instant,
    ) -> Result<Link, BootstrapError> {
        let address = roster.ranks[peer.index()].address;
        let hello = self.hello(roster.meeting).encode();
        loop {
            let called = tcp::connect(address, deadline).map(Link::tcp).and_then(|link| {
                // The peer may have lower ranks to call first.
                let proven = auth::greet(&link, roster.meeting, deadline).and_then(|challenge| {
                    auth::prove(&link, &self.place.secret, &challenge, &hello, deadline)
                });
                match proven {
                    Ok(()) => Ok(link),
                    // Too many strangers at its listener, and this was the oldest.
                    Err(Miss::Nobody) => Err(Errno::AGAIN),
                    // Somebody else is where it was.
                    Err(Miss::Stranger | Miss::OtherLaunch | Miss::Denied) => {
                        Err(Errno::CONNREFUSED)
                    }
                    Err(Miss::Unreached(errno) | Miss::System(errno)) => Err(errno),
                }
            });
            match called {
                Ok(link) => return Ok(link),
                // It listened before it was on the roster.
                Err(Errno::CONNREFUSED) => {
                    return Err(BootstrapError::Lost { rank: peer, step: STEP });
                }
                Err(errno @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => {
                    return Err(BootstrapError::io(STEP)(errno));
                }
                Err(errno) if Instant::now() >= deadline => {
                    tracing::debug!(%peer, %address, %errno, "does not answer");
                    return Err(BootstrapError::Timeout {
                        step: STEP,
                        missing: vec![peer],
                        denied: 0,
                        sought: None,
                    });
                }
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use flux_core::WorldSize;

    use super::*;
    use crate::bootstrap::Secret;
    use crate::bootstrap::environment::NetworkPlace;
    use crate::bootstrap::host_id::{HOST_ID_BYTES, HostId};
    use crate::bootstrap::rendezvous::roster::Whereabouts;
    use crate::lateness::scaled;

    #[test]
    fn who_did_not_know_the_secret_is_counted_beside_who_is_missing() {
        let secret = |text: &str| Secret::new(text.repeat(32)).unwrap();
        let world = WorldSize::new(3).unwrap();
        let listener = tcp::listen(([127, 0, 0, 1], 0).into()).unwrap();
        let address = tcp::local(listener.as_fd()).unwrap();
        let place = NetworkPlace::at(&address.to_string(), secret("a")).unwrap();
        let one = TcpRendezvous { rank: Rank::new(1), world, place };
        let ranks =
            [0, 1, 2].map(|host| Whereabouts { host: HostId([host; HOST_ID_BYTES]), address });
        let roster = Roster { meeting: 7, ranks: ranks.into() };
        let hosts = Hosts::group(&[0, 1, 2]);
        let deadline = Instant::now() + scaled(Duration::from_secs(2));
        std::thread::scope(|scope| {
            // Rank 2, with another secret.
            scope.spawn(|| {
                let link = Link::tcp(tcp::connect(address, deadline).unwrap());
                let challenge = auth::greet(&link, roster.meeting, deadline).unwrap();
                let hello = Hello::of(Rank::new(2), world, roster.meeting).encode();
                assert!(matches!(
                    auth::prove(&link, &secret("b"), &challenge, &hello, deadline),
                    Err(Miss::Denied)
                ));
            });
            let error = one.connect_pairs(&roster, &hosts, listener, deadline).unwrap_err();
            assert!(
                matches!(&error, BootstrapError::Timeout { missing, denied: 1, .. } if *missing == [Rank::new(2)]),
                "{error}"
            );
        });
    }
}
