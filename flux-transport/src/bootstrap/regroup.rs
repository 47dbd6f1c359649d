//! How the processes that are left of a group make a new one.
//!
//! Invariant: the new group's sockets are new. What a rank of the old group sends late goes to a socket that the new group does not read, and a
//! rank that was left out holds none of the new ones. The lowest rank that is left makes them and hands each member its own, as rank 0 did when
//! the ranks first met, or tells them what keeps it from that.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use flux_core::{Rank, WorldSize};
use rustix::io::Errno;

use super::frame::Kind;
use super::monitor::{End, Shared};
use super::rendezvous::Mesh;
use super::socket;
use super::unix::rows;
use crate::control::{ControlError, mask_of, ranks_of};

const STEP: &str = "regrouping";
/// For a message to a rank that waits for it.
const HANDING: Duration = Duration::from_millis(100);

/// What has come of a new group.
#[derive(Default)]
pub(super) struct Regroup {
    /// Ranks (bits) that asked this one to make it.
    joined: u32,
    verdict: Option<Verdict>,
}

struct Verdict {
    by: Rank,
    said: Said,
}

enum Said {
    /// The new group's members (bits), and a socket to each of the others.
    Group { members: u32, sockets: Vec<OwnedFd> },
    /// Ranks (bits) that did not ask.
    Absent(u32),
    /// What keeps the rank that was to make the group from it.
    Unable(std::io::Error),
}

impl Said {
    /// `None` for what belongs to no verdict.
    fn new(kind: Kind, number: u32, sockets: Vec<OwnedFd>) -> Option<Self> {
        match kind {
            Kind::Welcome => Some(Self::Group { members: number, sockets }),
            Kind::Dismissed => Some(Self::Absent(number)),
            Kind::Unable => Some(Self::Unable(std::io::Error::from_raw_os_error(number.cast_signed()))),
            _ => None,
        }
    }
}

impl Shared {
    /// Takes note of a message about a new group.
    pub(super) fn note_regroup(&self, by: Rank, kind: Kind, body: &[u8], sockets: Vec<OwnedFd>) {
        let mut inbox = self.inbox();
        if kind == Kind::Join {
            inbox.regroup.joined |= mask_of([by]);
        } else if let Some(said) = body.try_into().ok().and_then(|body| Said::new(kind, u32::from_le_bytes(body), sockets)) {
            // Of what is none no group comes; who waits for it is told by the deadline.
            inbox.regroup.verdict = Some(Verdict { by, said });
        }
        self.changed.notify_all();
    }

    /// Meets the ranks that are neither gone nor in `without`.
    pub(super) fn regroup(&self, world: WorldSize, without: &[Rank], deadline: Instant) -> Result<Mesh, ControlError> {
        let missing = |mask: u32| ControlError::Timeout { step: STEP, missing: ranks_of(mask).collect() };
        // So that those who wait for its verdict still hear it before they give up themselves.
        let own_deadline = deadline.checked_sub(deadline.saturating_duration_since(Instant::now()).min(HANDING * 20) / 10);
        let mut asked = None;
        let mut inbox = self.inbox();
        if inbox.regroup.verdict.as_ref().is_some_and(|verdict| !matches!(verdict.said, Said::Group { .. })) {
            inbox.regroup.verdict = None; // of an earlier attempt
        }
        loop {
            // First of all: who made the group may have gone on, and left the old one.
            if let Some(verdict) = inbox.regroup.verdict.take() {
                drop(inbox);
                return self.hear(verdict);
            }
            let left = |rank: &Rank| !without.contains(rank) && inbox.peers[rank.index()].end == Some(End::Left);
            if let Some(rank) = world.ranks().find(left) {
                return Err(ControlError::PeerLeft { rank });
            }
            let members = world.ranks().filter(|rank| !without.contains(rank) && inbox.peers[rank.index()].end.is_none());
            let members = mask_of(members) | mask_of([self.rank]);
            let first = Rank::new(members.trailing_zeros());
            let now = Instant::now();
            let left = if first == self.rank {
                let absent = members & !inbox.regroup.joined & !mask_of([self.rank]);
                if absent == 0 {
                    inbox.regroup.joined = 0;
                    drop(inbox);
                    return self.deal(members);
                }
                let left = own_deadline.unwrap_or(deadline).saturating_duration_since(now);
                if left.is_zero() {
                    drop(inbox);
                    for rank in ranks_of(members & !absent).filter(|&rank| rank != self.rank) {
                        self.say(rank, Kind::Dismissed, &absent.to_le_bytes(), &[], now + HANDING);
                    }
                    return Err(missing(absent));
                }
                left
            } else {
                if asked != Some(first) {
                    asked = Some(first);
                    drop(inbox);
                    self.say(first, Kind::Join, &[], &[], deadline);
                    inbox = self.inbox();
                    continue;
                }
                let left = deadline.saturating_duration_since(now);
                if left.is_zero() {
                    return Err(missing(mask_of([first])));
                }
                left
            };
            inbox = self.changed.wait_timeout(inbox, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Connects every two members, and gives each its row of sockets.
    fn deal(&self, members: u32) -> Result<Mesh, ControlError> {
        let io = |errno: Errno| ControlError::Io { step: STEP, source: errno.into() };
        let world = size(members).ok_or_else(|| io(Errno::INVAL))?;
        let mut rows = match rows(world.index()) {
            Ok(rows) => rows,
            Err(errno) => {
                // They all wait for this rank, and would take it for late.
                for rank in ranks_of(members).filter(|&rank| rank != self.rank) {
                    self.say(rank, Kind::Unable, &errno.raw_os_error().to_le_bytes(), &[], Instant::now() + HANDING);
                }
                return Err(io(errno));
            }
        };
        for (rank, row) in ranks_of(members).zip(&rows).filter(|&(rank, _)| rank != self.rank) {
            let row: Vec<_> = row.iter().map(AsFd::as_fd).collect();
            // A member that dies now is lost to the others when they first need it.
            self.say(rank, Kind::Welcome, &members.to_le_bytes(), &row, Instant::now() + HANDING);
        }
        Ok(Mesh::new(Rank::new(0), world, rows.swap_remove(0)))
    }

    /// What a rank makes of the verdict of the one that makes the group.
    fn hear(&self, verdict: Verdict) -> Result<Mesh, ControlError> {
        let Verdict { by, said } = verdict;
        let (mask, sockets) = match said {
            Said::Group { members, sockets } => (members, sockets),
            Said::Absent(ranks) => return Err(ControlError::Timeout { step: STEP, missing: ranks_of(ranks).collect() }),
            Said::Unable(source) => return Err(ControlError::Leader { rank: by, source }),
        };
        let own = ranks_of(mask).position(|rank| rank == self.rank).and_then(|place| u32::try_from(place).ok());
        match (own, size(mask)) {
            (Some(own), Some(world))
                if sockets.len() == world.peers() as usize && sockets.iter().all(|socket| socket::is_ours(socket.as_fd())) =>
            {
                Ok(Mesh::new(Rank::new(own), world, sockets))
            }
            _ => {
                let detail = format!("it made a group of the ranks {mask:#x} and gave {} sockets", sockets.len());
                Err(ControlError::Protocol { rank: by, detail })
            }
        }
    }
}

fn size(members: u32) -> Option<WorldSize> {
    WorldSize::new(members.count_ones())
}
