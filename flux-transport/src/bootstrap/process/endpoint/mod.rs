//! What callers and the monitor share: the connections, and what has come of each peer.

mod group;
mod questions;

pub(super) use group::{GroupState, GroupVerdict, Outcome, Sockets};
pub(super) use questions::Questions;

use super::frame::{Header, Kind};
use crate::bootstrap::connection::Connection;
use crate::bootstrap::control::{Steps, Watcher};
use crate::bootstrap::fork::NotForked;
use crate::bootstrap::socket;
use crate::sync::{locked, wait_timeout};
use flux_core::Rank;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

/// How long notices that are being handled are waited for.
const SETTLE: Duration = Duration::from_millis(100);

/// [`SETTLE`]; in tests as much longer as their deadlines are.
fn settle() -> Duration {
    #[cfg(test)]
    return crate::lateness::scaled(SETTLE);
    #[cfg(not(test))]
    SETTLE
}

/// Most peers that are looked at for what they have sent.
const MAX_POLLED: usize = flux_core::rank::MAX_WORLD;
/// Time for a goodbye or an abort. The end of the connection says it too.
const PARTING: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(crate) struct Arrived {
    pub(crate) kind: Kind,
    pub(crate) sequence: u64,
    pub(crate) body: Vec<u8>,
    pub(crate) descriptors: Vec<OwnedFd>,
    /// Whether this process could not take all of its descriptors.
    pub(crate) cut: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PeerEnd {
    Left,
    Lost,
    /// By breaking the protocol; its connection is closed.
    Broke(String),
}

#[derive(Debug, Default)]
pub(crate) struct PeerInbox {
    pub(crate) frames: VecDeque<Arrived>,
    pub(crate) end: Option<PeerEnd>,
}

/// What came of all peers, by rank, and who wants to hear of ends.
#[derive(Default)]
pub(crate) struct Inbox {
    pub(crate) peers: Vec<PeerInbox>,
    pub(crate) watchers: Vec<Weak<Watcher>>,
    /// Whether the monitor is at work on something that it has read.
    pub(crate) busy: bool,
    pub(crate) questions: Questions,
    pub(crate) group: GroupState,
}

impl Inbox {
    /// Who watches, without those that are gone.
    pub(crate) fn watching(&mut self) -> Vec<Arc<Watcher>> {
        self.watchers.retain(|watcher| watcher.strong_count() > 0);
        self.watchers.iter().filter_map(Weak::upgrade).collect()
    }
}

/// The connections, shared by callers, who write, and the monitor, who reads.
pub(crate) struct Endpoint {
    pub(crate) rank: Rank,
    /// The process that connected. A fork's copy says nothing in its name.
    process: u32,
    // Before the links, whose descriptors they name.
    _not_forked: Vec<NotForked>,
    pub(crate) links: Vec<Option<Connection>>,
    /// Becomes readable when the monitor is to stop.
    pub(crate) stop: OwnedFd,
    inbox: Mutex<Inbox>,
    pub(crate) changed: Condvar,
    pub(crate) steps: Steps,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint").field("rank", &self.rank).finish_non_exhaustive()
    }
}

impl Endpoint {
    pub(crate) fn new(rank: Rank, links: Vec<Option<Connection>>, stop: OwnedFd) -> Self {
        let peers = links.iter().map(|_| PeerInbox::default()).collect();
        let inbox = Mutex::new(Inbox { peers, ..Inbox::default() });
        let not_forked = links.iter().flatten().map(|link| NotForked::new(link.as_fd())).collect();
        Self {
            rank,
            process: std::process::id(),
            _not_forked: not_forked,
            links,
            stop,
            inbox,
            changed: Condvar::new(),
            steps: Steps::default(),
        }
    }

    /// Whether this process connected, and is not a fork of the one that did.
    pub(crate) fn is_here(&self) -> bool {
        self.process == std::process::id()
    }

    /// No code under this lock can panic, so a poisoned lock guards whole data.
    pub(crate) fn inbox(&self) -> MutexGuard<'_, Inbox> {
        locked(&self.inbox)
    }

    pub(crate) fn peers(&self) -> impl Iterator<Item = (Rank, &Connection)> {
        (0..)
            .map(Rank::new)
            .zip(&self.links)
            .filter_map(|(rank, link)| Some((rank, link.as_ref()?)))
    }

    /// Sends one message; a peer that does not take it until the deadline does without.
    pub(crate) fn say(&self, rank: Rank, kind: Kind, body: &[u8], deadline: Instant) {
        if let Err(error) = self.send(rank, kind, body, &[], deadline) {
            tracing::debug!(%rank, %error, "did not hear the {}", kind.name());
        }
    }

    /// Sends one message that is needed.
    pub(crate) fn send(
        &self,
        rank: Rank,
        kind: Kind,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> Result<(), Errno> {
        let descriptors = u8::try_from(fds.len()).unwrap_or(u8::MAX);
        let bytes = Header { kind, descriptors, sequence: 0 }.encode(body.len());
        let link = self.links.get(rank.index()).and_then(Option::as_ref).ok_or(Errno::PIPE)?;
        link.send(&[&bytes, body], fds, deadline)
    }

    /// Ends this rank's steps of a communicator, and wakes whoever waits in one.
    pub(crate) fn abort_steps(&self, communicator: u32, by: Rank, reason: u32) {
        self.steps.abort(communicator, by, reason);
        // Under the lock: whoever has looked waits by now.
        drop(self.inbox());
        self.changed.notify_all();
    }

    /// To every peer that still takes it.
    pub(crate) fn part(&self, kind: Kind, body: &[u8]) {
        if !self.is_here() {
            return;
        }
        let deadline = Instant::now() + PARTING;
        for (rank, _) in self.peers() {
            self.say(rank, kind, body, deadline);
        }
    }

    /// Waits for a change until the deadline; then once more until all that had come is handled, or
    /// [`SETTLE`] is over; then returns `None`.
    pub(crate) fn wait<'s>(
        &'s self,
        inbox: MutexGuard<'s, Inbox>,
        deadline: Instant,
        looked: &mut bool,
    ) -> Option<MutexGuard<'s, Inbox>> {
        let left = deadline.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            return Some(wait_timeout(&self.changed, inbox, left));
        }
        drop(inbox);
        if std::mem::replace(looked, true) {
            return None;
        }
        self.settle();
        Some(self.inbox())
    }

    /// Returns when the monitor has handled everything that had come, or after [`SETTLE`].
    pub(crate) fn settle(&self) {
        self.settled(Instant::now() + settle());
    }

    /// Whether the monitor has handled everything that had come, by the deadline at the latest.
    pub(crate) fn settled(&self, deadline: Instant) -> bool {
        let mut inbox = self.inbox();
        loop {
            // In this order: what is read no longer shows, but the monitor was busy before it read.
            let waiting = self.anything_to_read(|rank| inbox.peers[rank.index()].end.is_none());
            let left = deadline.saturating_duration_since(Instant::now());
            let settled = !waiting && !inbox.busy;
            if settled || left.is_zero() {
                return settled;
            }
            let look = left.min(Duration::from_millis(1));
            inbox = wait_timeout(&self.changed, inbox, look);
        }
    }

    /// Whether a peer's message lies unread, as far as can be told. Allocates nothing.
    fn anything_to_read(&self, open: impl Fn(Rank) -> bool) -> bool {
        let mut polled: [PollFd<'_>; MAX_POLLED] =
            std::array::from_fn(|_| PollFd::new(&self.stop, PollFlags::empty()));
        let mut count = 0;
        for (_, link) in self.peers().filter(|&(rank, _)| open(rank)).take(MAX_POLLED) {
            polled[count] = socket::readable(link);
            count += 1;
        }
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut polled[..count], Some(&none)) != Ok(0)
    }
}
