//! Every two ranks of different hosts connect over TCP.
//!
//! Invariant: a rank calls all lower ranks before it listens for higher ones, so no two wait for
//! each other.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use flux_core::{Rank, WorldSize};
use rustix::io::Errno;

use crate::bootstrap::connection::Connection;
use crate::bootstrap::control::Hosts;
use crate::bootstrap::error::BootstrapError;
use crate::bootstrap::rendezvous::auth::{self, Miss};
use crate::bootstrap::rendezvous::hello::{Hello, PROTOCOL};
use crate::bootstrap::rendezvous::{self, LaunchKey, Listener};
use crate::bootstrap::unblock::pause_for;
use crate::bootstrap::{socket, tcp};

const STEP: &str = "connecting the ranks of different hosts";

/// One rank that calls others and is called.
pub(super) struct Caller {
    pub(super) rank: Rank,
    pub(super) world: WorldSize,
    /// Where each rank listens.
    pub(super) addresses: Vec<SocketAddr>,
    /// What all ranks of the mesh know.
    pub(super) key: LaunchKey,
}

impl Caller {
    /// Links to the ranks of other hosts.
    pub(super) fn connect(
        &self,
        hosts: &Hosts,
        listener: OwnedFd,
        deadline: Instant,
    ) -> Result<Vec<(Rank, Connection)>, BootstrapError> {
        let elsewhere = self.world.ranks().filter(|&peer| !hosts.together(self.rank, peer));
        let (lower, mut higher): (Vec<Rank>, Vec<Rank>) =
            elsewhere.partition(|&peer| peer < self.rank);
        let mut links = Vec::new();
        for peer in lower {
            links.push((peer, self.call(peer, deadline)?));
        }
        let mut listener = Listener::tcp(listener, self.key.clone());
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
            for rendezvous::Caller { link, said } in
                listener.admit(&mut ready.into_iter()).map_err(BootstrapError::io(STEP))?
            {
                match Hello::decode(&said) {
                    Some((hello, []))
                        if hello.protocol == PROTOCOL
                            && hello.nonce == self.key.launch
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

    fn call(&self, peer: Rank, deadline: Instant) -> Result<Connection, BootstrapError> {
        let LaunchKey { secret, launch } = &self.key;
        let address = self.addresses[peer.index()];
        let hello = Hello::of(self.rank, self.world, *launch).encode();
        loop {
            let called = tcp::connect(address, deadline).map(Connection::tcp).and_then(|link| {
                // The peer may have lower ranks to call first.
                let proven = auth::greet(&link, *launch, deadline)
                    .and_then(|challenge| auth::prove(&link, secret, &challenge, &hello, deadline));
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
                // It listened before it said where.
                Err(Errno::CONNREFUSED) => {
                    return Err(BootstrapError::Lost { rank: peer, step: STEP });
                }
                Err(errno @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::CANCELED)) => {
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
                Err(_) => {
                    pause_for(Duration::from_millis(5)).map_err(BootstrapError::io(STEP))?;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::bootstrap::Secret;
    use crate::lateness::scaled;

    #[test]
    fn who_did_not_know_the_secret_is_counted_beside_who_is_missing() {
        let secret = |text: &str| Secret::new(text.repeat(32)).unwrap();
        let world = WorldSize::new(2).unwrap();
        let listener = tcp::listen(([127, 0, 0, 1], 0).into()).unwrap();
        let address = tcp::local(listener.as_fd()).unwrap();
        let key = LaunchKey { secret: secret("a"), launch: 7 };
        let one = Caller { rank: Rank::new(0), world, addresses: vec![address; 2], key };
        let hosts = Hosts::group(&[0, 1]);
        let deadline = Instant::now() + scaled(Duration::from_secs(2));
        std::thread::scope(|scope| {
            // Rank 1, with another secret.
            scope.spawn(|| {
                let link = Connection::tcp(tcp::connect(address, deadline).unwrap());
                let challenge = auth::greet(&link, 7, deadline).unwrap();
                let hello = Hello::of(Rank::new(1), world, 7).encode();
                assert!(matches!(
                    auth::prove(&link, &secret("b"), &challenge, &hello, deadline),
                    Err(Miss::Denied)
                ));
            });
            let error = one.connect(&hosts, listener, deadline).unwrap_err();
            assert!(
                matches!(&error, BootstrapError::Timeout { missing, denied: 1, .. }
                    if *missing == [Rank::new(1)]),
                "{error}"
            );
        });
    }
}
