//! How the processes that are left of a group make a new one.
//!
//! Invariant: the new group has new sockets, of which a rank that is left out holds none.
//!
//! ```text
//! every rank that is left                    the lowest of them
//! tells all that it waits       join    ->    as all others
//! knows who waits                             once all wait: tells the ranks that it leaves out
//! takes its sockets                     <-    deals a socket pair per two ranks, or says why not
//! tells all that it stopped     stopped ->    as all others
//! ```
//!
//! No two groups of living ranks go on side by side:
//!
//! - Only its leader makes a group, and a rank is in one at a time. Two groups that go on would
//!   have leaders that left out each other.
//! - A leader tells whom it leaves out, and then looks for the same ([`Endpoint::leave_out`]),
//!   before it deals. So of two leaders at least one finds that it was left out.
//! - Messages of a peer are read before its end is seen. A peer that is cut off is told so.
//! - A rank that no message reaches cannot be left out: [`ControlError::Timeout`] names it again.
//! - A rank that fails to connect in its group tells the group first (`comm/rebuild.rs`).
//!
//! [`ControlError::Timeout`] names only ranks that never waited during an attempt. If all came and
//! there is no group, `comm/rebuild.rs` asks who was stopped meanwhile.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use flux_core::{Rank, WorldSize};
use rustix::io::Errno;

use super::endpoint::{Endpoint, GroupState, GroupVerdict, Inbox, Outcome, Sockets};
use super::frame::Kind;
use crate::bootstrap::control::{ControlError, REGROUPING, came_and_went, mask_of, ranks_of};
use crate::bootstrap::mesh::{Mesh, socket_rows};
use crate::bootstrap::socket;

/// For a message to a rank that waits for it.
const HANDING: Duration = Duration::from_millis(100);

/// A rank's part of a new group.
#[derive(Debug)]
pub(crate) struct NewGroup {
    pub(crate) mesh: Mesh,
    /// Old ranks (bits) of the new group.
    pub(crate) members: u32,
}

impl Endpoint {
    /// Takes note of a message about a new group.
    pub(crate) fn note_regroup(&self, by: Rank, kind: Kind, body: &[u8], sockets: Sockets) {
        let mut inbox = self.inbox();
        let GroupState { waiting, came, waits, verdict, given_up_by } = &mut inbox.group;
        match kind {
            Kind::Join => {
                *waiting |= mask_of([by]);
                *came |= mask_of([by]);
            }
            Kind::Stopped => *waiting &= !mask_of([by]),
            Kind::LeftOut => *given_up_by = given_up_by.or(Some(by)),
            _ if *waits && verdict.is_none() => {
                // Of what is none no group comes; who waits for it is told by the deadline.
                let outcome = body
                    .try_into()
                    .ok()
                    .and_then(|body| Outcome::new(kind, u32::from_le_bytes(body), sockets));
                *verdict = outcome.map(|outcome| GroupVerdict { by, outcome });
            }
            // The sockets close here, so the abandoned group learns of it at once.
            _ => {}
        }
        self.changed.notify_all();
    }

    /// Meets the ranks that are neither gone nor in `without`.
    pub(crate) fn regroup(
        &self,
        without: &[Rank],
        deadline: Instant,
    ) -> Result<NewGroup, ControlError> {
        let without = mask_of(without.iter().copied()) & !mask_of([self.rank]);
        // Who has stopped waiting by now does not wait.
        self.settle();
        self.inbox().group.begin();
        self.say_to_all(without, Kind::Join);
        let part = self.gather(without, deadline);
        self.inbox().group.stop();
        self.say_to_all(0, Kind::Stopped);
        part
    }

    /// A peer that makes a group without this rank, as far as has been said by now.
    pub(crate) fn left_out_by(&self) -> Option<Rank> {
        self.settle();
        self.inbox().group.given_up_by
    }

    /// To every peer that is neither gone nor in `without`.
    fn say_to_all(&self, without: u32, kind: Kind) {
        let told = self.here(&self.inbox()) & !without & !mask_of([self.rank]);
        for rank in ranks_of(told) {
            self.say(rank, kind, &[], Instant::now() + HANDING);
        }
    }

    /// The ranks (bits) that are not gone, this one among them.
    fn here(&self, inbox: &Inbox) -> u32 {
        mask_of(
            self.peers()
                .map(|(rank, _)| rank)
                .filter(|rank| inbox.peers[rank.index()].end.is_none()),
        ) | mask_of([self.rank])
    }

    /// Waits until there is a group.
    fn gather(&self, without: u32, deadline: Instant) -> Result<NewGroup, ControlError> {
        let own = mask_of([self.rank]);
        // Ranks that wait for a leader's verdict must hear it before their own deadline.
        let leaders_deadline = deadline
            .checked_sub(deadline.saturating_duration_since(Instant::now()).min(HANDING * 20) / 10);
        let (mut told, mut looked) = (0, false);
        let mut inbox = self.inbox();
        loop {
            // First of all: who made the group may have gone on, and left the old one.
            if let Some(verdict) = inbox.group.verdict.take() {
                drop(inbox);
                return self.hear(verdict);
            }
            if let Some(by) = inbox.group.given_up_by {
                return Err(ControlError::GivenUp { by });
            }
            let here = self.here(&inbox);
            let members = here & !without;
            let leader = Rank::new(members.trailing_zeros());
            let until = if leader == self.rank {
                if members & !own & !inbox.group.waiting == 0 {
                    let untold = here & without & !told;
                    if untold == 0 {
                        inbox.group.waiting &= !members;
                        drop(inbox);
                        return self.deal(members);
                    }
                    drop(inbox);
                    self.leave_out(untold, deadline)?;
                    told |= untold;
                    inbox = self.inbox();
                    continue;
                }
                leaders_deadline.unwrap_or(deadline)
            } else {
                deadline
            };
            let missing = members & !own & !inbox.group.came;
            let Some(changed) = self.wait(inbox, until, &mut looked) else {
                return Err(if missing == 0 { came_and_went(leader) } else { late(missing) });
            };
            inbox = changed;
        }
    }

    /// Tells live ranks that a group is made without them. Returns once everything they sent before
    /// is handled.
    fn leave_out(&self, ranks: u32, deadline: Instant) -> Result<(), ControlError> {
        for rank in ranks_of(ranks) {
            match self.send(rank, Kind::LeftOut, &[], &[], deadline) {
                // What it said before its end is looked for below.
                Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => {}
                Err(errno) => return Err(not_told(rank, errno)),
            }
        }
        // All may have come by the last look, when the deadline is over.
        if self.settled(deadline.max(Instant::now() + HANDING)) {
            Ok(())
        } else {
            Err(io(Errno::TIMEDOUT))
        }
    }

    /// Connects every two members, and gives each its row of sockets.
    fn deal(&self, members: u32) -> Result<NewGroup, ControlError> {
        let world = size(members).ok_or_else(|| io(Errno::INVAL))?;
        let unable = |errno: Errno| {
            // They all wait for this rank, and would take it for late.
            for rank in ranks_of(members).filter(|&rank| rank != self.rank) {
                self.say(
                    rank,
                    Kind::Unable,
                    &errno.raw_os_error().to_le_bytes(),
                    Instant::now() + HANDING,
                );
            }
            errno
        };
        let mut rows = socket_rows(world.index()).map_err(|errno| io(unable(errno)))?;
        for (rank, row) in ranks_of(members).zip(&rows).filter(|&(rank, _)| rank != self.rank) {
            let row: Vec<_> = row.iter().map(AsFd::as_fd).collect();
            match self.send(
                rank,
                Kind::Welcome,
                &members.to_le_bytes(),
                &row,
                Instant::now() + HANDING,
            ) {
                // A member that dies now is lost to the others when they first need it.
                Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => {}
                // Those who have their rows lose this rank, whose own closes here.
                Err(errno) => return Err(not_told(rank, unable(errno))),
            }
        }
        Ok(NewGroup { mesh: Mesh::new(Rank::new(0), world, rows.swap_remove(0)), members })
    }

    /// What a rank makes of the verdict of the one that makes the group.
    fn hear(&self, verdict: GroupVerdict) -> Result<NewGroup, ControlError> {
        let GroupVerdict { by, outcome } = verdict;
        let (mask, sockets) = match outcome {
            Outcome::Group { members, sockets } => (members, sockets),
            // The others find the ends closed that were for this rank, and come back to this plane.
            Outcome::TooMany => return Err(io(Errno::MFILE)),
            Outcome::Unable(source) => return Err(ControlError::Leader { rank: by, source }),
        };
        let own = ranks_of(mask)
            .position(|rank| rank == self.rank)
            .and_then(|place| u32::try_from(place).ok());
        match (own, size(mask)) {
            (Some(own), Some(world))
                if sockets.len() == world.peers() as usize
                    && sockets.iter().all(|socket| socket::is_ours(socket.as_fd())) =>
            {
                Ok(NewGroup { mesh: Mesh::new(Rank::new(own), world, sockets), members: mask })
            }
            _ => {
                let detail = format!(
                    "it made a group of the ranks {mask:#x} and gave {} sockets",
                    sockets.len()
                );
                Err(ControlError::Protocol { rank: by, detail })
            }
        }
    }
}

fn late(ranks: u32) -> ControlError {
    ControlError::Timeout { step: REGROUPING, missing: ranks_of(ranks).collect() }
}

/// Of a message that is needed and was not taken.
fn not_told(rank: Rank, errno: Errno) -> ControlError {
    if errno == Errno::TIMEDOUT { late(mask_of([rank])) } else { io(errno) }
}

fn io(errno: Errno) -> ControlError {
    ControlError::Io { step: REGROUPING, source: errno.into() }
}

fn size(members: u32) -> Option<WorldSize> {
    WorldSize::new(members.count_ones())
}

#[cfg(test)]
mod tests;
