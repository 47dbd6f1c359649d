//! A leader's side of a rendezvous: present ranks, unidentified connections and the verdict.
//!
//! Invariant: a rank is present only while its connection stands. After the verdict every newcomer
//! hears it.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use flux_core::{Rank, WorldSize};
use rustix::io::Errno;

use super::hello::{GIVING_UP, Hello, PROTOCOL, Refusal, Reply};
use super::listener::{Caller, Listener};
use super::roster::Roster;
use crate::bootstrap::connection::Connection;
use crate::bootstrap::control::mask_of;
use crate::bootstrap::deadlines::ANSWER;
use crate::bootstrap::error::BootstrapError;
use crate::bootstrap::socket::{self, Received};

/// How long ranks that have not come yet can still hear that the group does not form.
const LINGER: Duration = Duration::from_secs(5);

/// The ranks that are to meet, and what their leader says of itself.
#[derive(Clone, Debug)]
pub(crate) struct RankGroup {
    /// The leader's; its rank is the first of the group.
    pub(crate) own: Hello,
    pub(crate) world: WorldSize,
    pub(crate) ranks: Vec<Rank>,
    /// Most bytes that a rank says after its hello.
    pub(crate) most: usize,
}

#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) rank: Rank,
    pub(crate) link: Connection,
    pub(crate) said: Vec<u8>,
    pid: u32,
}

struct Gathering<L> {
    group: RankGroup,
    listener: Listener<L>,
    members: Vec<Member>,
    verdict: Option<Refusal>,
    /// Ranks (bits) that have heard the verdict.
    informed: u32,
}

/// Waits for all ranks of the group: the leader's connections to the others, in rank order.
pub(crate) fn gather<L: AsFd>(
    group: RankGroup,
    listener: Listener<L>,
    deadline: Instant,
) -> Result<Vec<Member>, BootstrapError> {
    let mut gathering =
        Gathering { group, listener, members: Vec::new(), verdict: None, informed: 0 };
    let mut end = deadline;
    loop {
        gathering.sweep();
        if gathering.verdict.is_none() && gathering.missing() == 0 {
            gathering.members.sort_by_key(|member| member.rank);
            return Ok(gathering.members);
        }
        if gathering.verdict.is_none() && Instant::now() >= deadline {
            gathering.give_up(&[]);
        }
        if let Some(refusal) = gathering.verdict {
            end = end.min(Instant::now() + LINGER);
            // Time is up for the missing, so nobody waits to tell them.
            if matches!(refusal, Refusal::Missing { .. })
                || gathering.informed == mask_of(gathering.group.ranks.iter().copied())
                || Instant::now() >= end
            {
                return Err(refusal.into_error(gathering.leader(), gathering.group.world));
            }
        }
        gathering.round(end)?;
    }
}

/// Tells every member what keeps their leader from connecting them.
pub(crate) fn dismiss(leader: Rank, members: &[Member], errno: Errno) {
    let reply = Reply::Refused(refusal_of(leader, errno));
    for member in members {
        answer(&member.link, reply);
    }
}

/// Tells every member what all ranks of the world have given, the leader first, and returns it.
pub(crate) fn tell_all(own: Vec<u8>, members: Vec<Member>) -> Vec<Vec<u8>> {
    let (links, said): (Vec<_>, Vec<_>) =
        members.into_iter().map(|member| (member.link, member.said)).unzip();
    let roster = Roster { payloads: [vec![own], said].concat() };
    let bytes = roster.encode();
    for link in links {
        if let Err(error) = link.send(&[&bytes], &[], Instant::now() + ANSWER) {
            tracing::debug!(%error, "a rank left while the group formed");
        }
    }
    roster.payloads
}

fn refusal_of(leader: Rank, errno: Errno) -> Refusal {
    Refusal::Leader { rank: leader.get(), errno: errno.raw_os_error().cast_unsigned() }
}

impl<L: AsFd> Gathering<L> {
    fn leader(&self) -> Rank {
        Rank::new(self.group.own.rank)
    }

    /// Ranks (bits) that are not here.
    fn missing(&self) -> u32 {
        let here = self.members.iter().map(|member| member.rank).chain([self.leader()]);
        mask_of(self.group.ranks.iter().copied()) & !mask_of(here)
    }

    /// Waits for something to happen, and handles it.
    fn round(&mut self, end: Instant) -> Result<(), BootstrapError> {
        let until = self.listener.expire().map_or(end, |until| until.min(end));
        let mut watched: Vec<_> = self.listener.watched().collect();
        // Members only so that their end wakes this up: the sweep finds it.
        watched.extend(self.members.iter().map(|member| socket::readable(&member.link)));
        let waited = socket::wait(&mut watched, Some(until));
        let ready: Vec<bool> = watched.iter().map(|fd| !fd.revents().is_empty()).collect();
        if waited == Err(Errno::CANCELED) && self.verdict.is_none() {
            self.refuse(refusal_of(self.leader(), Errno::CANCELED));
        }
        waited.map_err(BootstrapError::io("waiting for ranks"))?;
        match self.listener.admit(&mut ready.into_iter()) {
            Ok(callers) => callers.into_iter().for_each(|caller| self.judge(caller)),
            // Without its members it may have what it takes to tell those who are still to come.
            Err(errno) if self.verdict.is_none() => self.refuse(refusal_of(self.leader(), errno)),
            Err(errno) => return Err(BootstrapError::io("accepting a rank's connection")(errno)),
        }
        Ok(())
    }

    /// Drops members whose connection has ended. Runs before every decision, as a rank that died
    /// may come again.
    fn sweep(&mut self) {
        let before = self.members.len();
        let mut impatient = Vec::new();
        self.members.retain(|member| {
            let mut buffer = [0; GIVING_UP.len()];
            match member.link.receive(&mut buffer) {
                Ok(Received::Nothing) => true,
                Ok(Received::Message(_)) if buffer == GIVING_UP => {
                    impatient.push(member.rank);
                    true
                }
                // It died, or it is no rank of ours: they have nothing else to say.
                _ => false,
            }
        });
        if !impatient.is_empty() {
            self.give_up(&impatient);
        } else if self.members.len() != before {
            self.tell_missing();
        }
    }

    /// Names the missing ranks; if all have come, those that gave up waiting.
    fn give_up(&mut self, impatient: &[Rank]) {
        let missing = self.missing();
        let ranks = if missing == 0 { mask_of(impatient.iter().copied()) } else { missing };
        self.refuse(Refusal::Missing { ranks, denied: self.listener.denied() });
    }

    fn judge(&mut self, caller: Caller) {
        let Caller { link, said } = caller;
        let Some((hello, said)) = Hello::decode(&said)
            .filter(|(hello, said)| hello.protocol != PROTOCOL || said.len() <= self.group.most)
        else {
            tracing::warn!("dropped a connection to the rendezvous that did not say hello");
            return;
        };
        let Hello { protocol, rank, world, pid, nonce, version } = hello;
        self.sweep();
        if let Some(refusal) = self.verdict {
            answer(&link, Reply::Refused(refusal));
            self.mark_informed(rank);
            return;
        }
        let own = self.group.own;
        let refusal = if protocol != PROTOCOL || version != own.version {
            Refusal::Version {
                rank,
                protocols: [protocol, PROTOCOL],
                version,
                expected: own.version,
            }
        } else if nonce != own.nonce {
            // Not of this launch: its own affair.
            answer(&link, Reply::Refused(Refusal::OtherLaunch));
            return;
        } else if world != own.world {
            Refusal::World { rank, world, expected: own.world }
        } else if !self.group.ranks.contains(&Rank::new(rank)) {
            // No launcher makes this of a world of our size.
            return;
        } else if let Some(first) = self.pid_of(rank) {
            Refusal::DuplicateRank { rank, first, second: pid }
        } else {
            self.members.push(Member { rank: Rank::new(rank), link, said: said.to_vec(), pid });
            self.tell_missing();
            return;
        };
        answer(&link, Reply::Refused(refusal));
        self.mark_informed(rank);
        self.refuse(refusal);
    }

    fn pid_of(&self, rank: u32) -> Option<u32> {
        if rank == self.group.own.rank {
            return Some(self.group.own.pid);
        }
        self.members.iter().find(|member| member.rank.get() == rank).map(|member| member.pid)
    }

    /// The verdict, for all who are here and for all who come.
    fn refuse(&mut self, refusal: Refusal) {
        self.verdict = Some(refusal);
        self.mark_informed(self.group.own.rank);
        for member in std::mem::take(&mut self.members) {
            answer(&member.link, Reply::Refused(refusal));
            self.mark_informed(member.rank.get());
        }
    }

    fn mark_informed(&mut self, rank: u32) {
        if self.group.ranks.contains(&Rank::new(rank)) {
            self.informed |= mask_of([Rank::new(rank)]);
        }
    }

    fn tell_missing(&self) {
        let missing = self.missing();
        if missing != 0 {
            for member in &self.members {
                answer(&member.link, Reply::Waiting { missing });
            }
        }
    }
}

/// Answers who may be gone by now: then its connection says so at the next round.
fn answer(link: &Connection, reply: Reply) {
    if let Err(error) = link.send(&[&reply.encode()], &[], Instant::now() + ANSWER) {
        tracing::debug!(%error, "a rank did not hear its answer");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_gave_up_just_before_the_last_rank_came_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = socket::listen(&path).unwrap();
        let world = WorldSize::new(3).unwrap();
        let hello = |rank| Hello::of(Rank::new(rank), world, 7);
        // All that they say is there before the leader looks: rank 1 has no more time, and rank 2
        // has come since.
        let comes = |rank: u32, gives_up: bool| {
            let link = Connection::Unix(socket::connect(&path).unwrap());
            link.send(&[&hello(rank).encode()], &[], Instant::now()).unwrap();
            if gives_up {
                link.send(&[&GIVING_UP], &[], Instant::now()).unwrap();
            }
            link
        };
        let _links = [comes(1, true), comes(2, false)];
        let mut gathering = Gathering {
            group: RankGroup { own: hello(0), world, ranks: world.ranks().collect(), most: 0 },
            listener: Listener::unix(listener),
            members: Vec::new(),
            verdict: None,
            informed: 0,
        };
        // Rank 2 first, so that rank 1 is the last to be let in, and is heard after that.
        for caller in gathering.listener.admit(&mut [true].into_iter()).unwrap().into_iter().rev() {
            gathering.judge(caller);
        }
        assert!(gathering.verdict.is_none() && gathering.missing() == 0);
        gathering.sweep();
        assert_eq!(gathering.verdict, Some(Refusal::Missing { ranks: 1 << 1, denied: 0 }));
    }
}
