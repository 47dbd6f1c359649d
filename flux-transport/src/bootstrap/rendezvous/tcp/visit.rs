//! Another rank's side.
//!
//! Invariant: a waiting rank holds one connection. Anything at the address
//! that is not this launch's rank 0 is passed over.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use flux_core::Rank;
use rustix::io::Errno;

use super::TcpRendezvous;
use crate::bootstrap::connection::Connection;
use crate::bootstrap::control::mask_of;
use crate::bootstrap::deadlines::WAITING_FOR_RANKS;
use crate::bootstrap::error::{BootstrapError, ranks_in};
use crate::bootstrap::rendezvous::auth::{self, Miss};
use crate::bootstrap::rendezvous::listener::PATIENCE;
use crate::bootstrap::rendezvous::roster::Roster;
use crate::bootstrap::rendezvous::verdict::{Leader, await_verdict};
use crate::bootstrap::unblock::pause_for;
use crate::bootstrap::{resolve, tcp};

const RANK_0: Leader = Leader { name: "rank 0", listening: "listening to rank 0" };

/// How long another secret may answer at rank 0's address: an earlier launch may be ending.
const DENIED: Duration = Duration::from_secs(2);

/// Who was in rank 0's place in the last round, instead of it.
#[derive(Clone, Copy, Default)]
struct Held {
    /// Somebody with another secret, in every round since then.
    denied: Option<(Instant, SocketAddr)>,
    other_launch: bool,
}

/// Remembers what was in the way last, unless rank 0 has been met.
fn note(last: &mut Option<String>, why: impl FnOnce() -> String) {
    if let Some(last) = last {
        *last = why();
    }
}

impl TcpRendezvous {
    /// Finds rank 0 and waits for its verdict.
    pub(super) fn visit(
        &self,
        payload: &[u8],
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let address = &self.place.address;
        let mut missing = mask_of([Rank::new(0)]);
        let mut held = Held::default();
        // What keeps this rank from rank 0, as far as it has not met it.
        let mut last = Some("nothing was tried".to_owned());
        let mut pause = Duration::from_millis(5);
        loop {
            let found = resolve::addresses(address, deadline)?.unwrap_or_else(|why| {
                note(&mut last, || why);
                Vec::new()
            });
            let places = address
                .ports()
                .iter()
                .flat_map(|&port| found.iter().map(move |&ip| SocketAddr::new(ip, port)));
            let (mut denied, mut other_launch) = (None, false);
            for place in places {
                match self.introduce(place, payload, deadline.min(Instant::now() + PATIENCE)) {
                    Ok(link) => {
                        // This is rank 0: who held its place before has gone.
                        (held, denied, other_launch) = (Held::default(), None, false);
                        last = None;
                        let roster = |bytes: &[u8], _: &mut _| Roster::decode(bytes, self.world);
                        let own = (self.rank, self.world);
                        if let Some(Roster { payloads }) =
                            await_verdict((&link, &RANK_0), own, deadline, &mut missing, roster)?
                        {
                            return Ok(payloads);
                        }
                    }
                    Err(Miss::Denied) => denied = denied.or(Some(place)),
                    Err(Miss::System(errno)) => {
                        return Err(BootstrapError::io("connecting to rank 0")(errno));
                    }
                    // Of ports that follow from the launch, another launch may have some by chance.
                    Err(Miss::OtherLaunch) => other_launch = address.ports().len() == 1,
                    Err(Miss::Unreached(errno)) => note(&mut last, || format!("{place}: {errno}")),
                    Err(Miss::Nobody | Miss::Stranger) => {
                        note(&mut last, || {
                            format!(
                                "{place}: the listener does not answer as a rank of this launch"
                            )
                        });
                    }
                }
            }
            let late = Instant::now() >= deadline;
            // A round that the deadline cut short heard nobody, and says nothing of who is there.
            if !late || denied.is_some() || other_launch {
                let since = held.denied.map_or_else(Instant::now, |(since, _)| since);
                held = Held { denied: denied.map(|place| (since, place)), other_launch };
            }
            if let Some((since, place)) = held.denied
                && (late || since.elapsed() >= DENIED)
            {
                return Err(BootstrapError::SecretDiffers { address: place.to_string() });
            }
            if late && held.other_launch {
                return Err(BootstrapError::OtherLaunch { rank: self.rank });
            }
            if late {
                let sought =
                    last.map(|last| format!("rank 0 was looked for at {address} ({last})"));
                return Err(BootstrapError::Timeout {
                    step: WAITING_FOR_RANKS,
                    missing: ranks_in(missing, self.world),
                    denied: 0,
                    sought,
                });
            }
            pause_for(pause).map_err(BootstrapError::io(WAITING_FOR_RANKS))?;
            pause = (pause * 2).min(Duration::from_millis(100));
        }
    }

    /// Says who this rank is and what it gives, to who proves to be this launch's rank 0.
    fn introduce(
        &self,
        place: SocketAddr,
        payload: &[u8],
        until: Instant,
    ) -> Result<Connection, Miss> {
        let socket = tcp::connect(place, until).map_err(|errno| match errno {
            Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::CANCELED => Miss::System(errno),
            errno => Miss::Unreached(errno),
        })?;
        let link = Connection::tcp(socket);
        let challenge = auth::greet(&link, self.place.launch, until)?;
        let body = [&self.hello().encode(), payload].concat();
        auth::prove(&link, &self.place.secret, &challenge, &body, until)?;
        Ok(link)
    }
}
