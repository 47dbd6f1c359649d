//! The control plane of ranks that are processes.
//!
//! Invariant: step `s` sends one frame numbered `s` to every peer and takes one from each; another
//! kind or number means that the ranks are out of step. After a failed step this end takes no more,
//! so a late frame cannot pass for a later step's.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use flux_core::signal::Epoch;
use flux_core::{Rank, WorldSize};
use rustix::event::EventfdFlags;
use rustix::io::Errno;

use super::endpoint::{Arrived, Endpoint, PeerEnd};
use super::frame::{Header, Kind, MAX_BODY};
use super::regroup::NewGroup;
use crate::bootstrap::control::{
    Answer, Answerer, ControlError, ControlPlane, GaveUp, Given, Hosts, Launch, Notice, REGROUPING,
    Regrouped, Watcher, mask_of, ranks_of,
};
use crate::bootstrap::error::BootstrapError;
use crate::bootstrap::mesh::Mesh;
use crate::bootstrap::socket::MAX_DESCRIPTORS;

#[derive(Debug)]
pub(crate) struct ProcessControl {
    pub(crate) world: WorldSize,
    hosts: Hosts,
    pub(crate) endpoint: Arc<Endpoint>,
    said_goodbye: AtomicBool,
    monitor: Option<JoinHandle<()>>,
}

impl ProcessControl {
    /// Starts the monitor over the connections.
    pub(crate) fn start(mesh: Mesh) -> Result<Self, BootstrapError> {
        let Mesh { rank, world, hosts, links } = mesh;
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(BootstrapError::io("making the descriptor that stops the monitor"))?;
        let endpoint = Arc::new(Endpoint::new(rank, links, stop));
        let theirs = Arc::clone(&endpoint);
        let monitor = std::thread::Builder::new()
            .name("flux-control".to_owned())
            .spawn(move || theirs.monitor())
            .map_err(|source| BootstrapError::Io {
                step: "starting the monitor's thread",
                source,
            })?;
        Ok(Self {
            world,
            hosts,
            endpoint,
            said_goodbye: AtomicBool::new(false),
            monitor: Some(monitor),
        })
    }

    fn own_fault(&self, detail: String) -> ControlError {
        ControlError::Protocol { rank: self.endpoint.rank, detail }
    }

    /// One step: the peers' frames by rank, none for this rank.
    fn step(
        &self,
        kind: Kind,
        communicator: u32,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> Result<Vec<Option<Arrived>>, ControlError> {
        // Refused before anything is sent: the ranks are still in step.
        if body.len() > MAX_BODY {
            return Err(self.own_fault(format!(
                "a payload of {} bytes is too long for an exchange, the limit is {MAX_BODY}",
                body.len()
            )));
        }
        let descriptors =
            u8::try_from(fds.len()).ok().filter(|&count| usize::from(count) <= MAX_DESCRIPTORS);
        let Some(descriptors) = descriptors else {
            return Err(self.own_fault(format!(
                "{} descriptors are too many for an exchange, the limit is {MAX_DESCRIPTORS}",
                fds.len()
            )));
        };
        if self.said_goodbye.load(Ordering::Relaxed) {
            return Err(self.own_fault("it has said goodbye and takes no further steps".to_owned()));
        }
        let Endpoint { rank, steps, .. } = &*self.endpoint;
        steps.take(*rank, kind.name(), communicator, deadline, |sequence| {
            let header = Header { kind, descriptors, sequence };
            self.send_all(header, body, fds, deadline)?;
            self.collect(header, communicator, deadline)
        })
    }

    fn send_all(
        &self,
        header: Header,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> Result<(), ControlError> {
        let bytes = header.encode(body.len());
        // Descriptors stay on their host.
        let without = Header { descriptors: 0, ..header }.encode(body.len());
        // The next rank first: not all ranks write to rank 0 at once.
        let (before, after): (Vec<_>, Vec<_>) =
            self.endpoint.peers().partition(|&(rank, _)| rank < self.endpoint.rank);
        for (rank, link) in after.into_iter().chain(before) {
            let (bytes, fds) = if self.hosts.together(self.endpoint.rank, rank) {
                (&bytes, fds)
            } else {
                (&without, &[][..])
            };
            self.endpoint.steps.awaits([rank]);
            match link.send(&[bytes, body], fds, deadline) {
                Ok(()) => {}
                Err(Errno::TIMEDOUT) => return Err(timeout(header.kind, [rank])),
                // It ended without this step; how, the monitor reads now.
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(self.how_ended(rank, deadline)),
                Err(errno) => {
                    return Err(ControlError::Io {
                        step: header.kind.name(),
                        source: errno.into(),
                    });
                }
            }
        }
        Ok(())
    }

    fn how_ended(&self, rank: Rank, deadline: Instant) -> ControlError {
        let (mut inbox, mut looked) = (self.endpoint.inbox(), false);
        loop {
            if let Some(end) = &inbox.peers[rank.index()].end {
                return ended(rank, end);
            }
            let Some(changed) = self.endpoint.wait(inbox, deadline, &mut looked) else {
                return ended(rank, &PeerEnd::Lost);
            };
            inbox = changed;
        }
    }

    /// Takes one frame of every peer.
    fn collect(
        &self,
        header: Header,
        communicator: u32,
        deadline: Instant,
    ) -> Result<Vec<Option<Arrived>>, ControlError> {
        let mut frames: Vec<Option<Arrived>> = self.world.ranks().map(|_| None).collect();
        let (mut inbox, mut looked) = (self.endpoint.inbox(), false);
        loop {
            let mut missing = 0;
            for (rank, _) in self.endpoint.peers() {
                let place = &mut frames[rank.index()];
                if place.is_some() {
                    continue;
                }
                let peer = &mut inbox.peers[rank.index()];
                if let Some(frame) = peer.frames.pop_front() {
                    if (frame.kind, frame.sequence) != (header.kind, header.sequence) {
                        let [theirs, ours] =
                            [(frame.kind, frame.sequence), (header.kind, header.sequence)].map(
                                |(kind, sequence)| format!("step {sequence} ({})", kind.name()),
                            );
                        let detail =
                            format!("it is at {theirs}, rank {} is at {ours}", self.endpoint.rank);
                        return Err(ControlError::Protocol { rank, detail });
                    }
                    *place = Some(frame);
                } else if let Some(end) = &peer.end {
                    return Err(ended(rank, end));
                } else {
                    missing |= mask_of([rank]);
                }
            }
            if missing == 0 {
                return Ok(frames);
            }
            let awaited = missing | mask_of([self.endpoint.rank]);
            if let Some(aborted) = self.endpoint.steps.aborted(communicator, awaited) {
                return Err(aborted);
            }
            self.endpoint.steps.awaits(ranks_of(missing));
            let Some(changed) = self.endpoint.wait(inbox, deadline, &mut looked) else {
                return Err(timeout(header.kind, ranks_of(missing)));
            };
            inbox = changed;
        }
    }
}

fn timeout(kind: Kind, missing: impl IntoIterator<Item = Rank>) -> ControlError {
    ControlError::Timeout { step: kind.name(), missing: missing.into_iter().collect() }
}

fn ended(rank: Rank, end: &PeerEnd) -> ControlError {
    match end {
        PeerEnd::Left => ControlError::PeerLeft { rank },
        PeerEnd::Lost => ControlError::PeerLost { rank },
        PeerEnd::Broke(detail) => ControlError::Protocol { rank, detail: detail.clone() },
    }
}

impl ControlPlane for ProcessControl {
    fn rank(&self) -> Rank {
        self.endpoint.rank
    }

    fn world(&self) -> WorldSize {
        self.world
    }

    fn kind(&self) -> Launch {
        Launch::Processes
    }

    fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    fn exchange_in(
        &self,
        communicator: u32,
        payload: &[u8],
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, ControlError> {
        let frames = self.step(Kind::Exchange, communicator, payload, &[], deadline)?;
        Ok(frames
            .into_iter()
            .map(|frame| frame.map_or_else(|| payload.to_vec(), |frame| frame.body))
            .collect())
    }

    fn exchange_with_fds(
        &self,
        communicator: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> Result<Vec<Given>, ControlError> {
        let frames = self.step(Kind::Descriptors, communicator, payload, fds, deadline)?;
        let given = |frame: Option<Arrived>| match frame {
            None => Given { payload: payload.to_vec(), fds: Vec::new(), cut: false },
            Some(Arrived { body, descriptors, cut, .. }) => {
                Given { payload: body, fds: descriptors, cut }
            }
        };
        Ok(frames.into_iter().map(given).collect())
    }

    fn watch(&self, watcher: Weak<Watcher>) {
        let mut inbox = self.endpoint.inbox();
        inbox.watchers.push(Weak::clone(&watcher));
        let lost: Vec<Rank> = self
            .world
            .ranks()
            .filter(|rank| {
                inbox.peers[rank.index()].end.as_ref().is_some_and(|end| *end != PeerEnd::Left)
            })
            .collect();
        drop(inbox);
        if let Some(watcher) = watcher.upgrade() {
            for rank in lost {
                watcher(Notice::Lost(rank));
            }
        }
    }

    fn goodbye(&self) {
        if !self.said_goodbye.swap(true, Ordering::Relaxed) {
            self.endpoint.part(Kind::Goodbye, &[]);
        }
    }

    fn abort(&self, communicator: u32, reason: u32) {
        self.endpoint.abort_steps(communicator, self.endpoint.rank, reason);
        self.endpoint.part(Kind::Abort, &[communicator, reason].map(u32::to_le_bytes).concat());
    }

    fn depart(&self, communicator: u32, last: Epoch) {
        self.endpoint
            .part(Kind::Depart, &[communicator, last.get()].map(u32::to_le_bytes).concat());
    }

    fn give_up(&self, what: &GaveUp) {
        self.endpoint.part(Kind::GaveUp, &what.encode());
    }

    fn tell(&self, to: Rank, communicator: u32, words: [u32; 4]) -> bool {
        let [a, b, c, d] = words;
        let body = [communicator, a, b, c, d].map(u32::to_le_bytes).concat();
        self.endpoint.send(to, Kind::Told, &body, &[], Instant::now()).is_ok()
    }

    fn settle(&self) {
        self.endpoint.settle();
    }

    fn answer_with(&self, answerer: Weak<Answerer>) {
        self.endpoint.inbox().questions.answer_with(answerer);
    }

    fn ask(&self, communicator: u32, deadline: Instant) -> Vec<Answer> {
        self.endpoint.ask(communicator, deadline)
    }

    fn regroup(&self, without: &[Rank], deadline: Instant) -> Result<Regrouped, ControlError> {
        if let Some(peer) =
            self.world.ranks().find(|&peer| !self.hosts.together(self.endpoint.rank, peer))
        {
            return Err(ControlError::OtherHost { rank: self.endpoint.rank, peer });
        }
        let NewGroup { mesh, members } = self.endpoint.regroup(without, deadline)?;
        let io = |error: BootstrapError| ControlError::Io {
            step: REGROUPING,
            source: std::io::Error::other(error),
        };
        Ok(Regrouped {
            control: Arc::new(Self::start(mesh).map_err(io)?),
            members: ranks_of(members).collect(),
        })
    }

    fn left_out_by(&self) -> Option<Rank> {
        self.endpoint.left_out_by()
    }
}

impl Drop for ProcessControl {
    fn drop(&mut self) {
        if !self.endpoint.is_here() {
            // The monitor and the descriptor that stops it are the parent's.
            let _kept = self.monitor.take().map(|monitor| Box::leak(Box::new(monitor)));
            return;
        }
        // The counter of a fresh eventfd takes one write of one without fail.
        let _ = rustix::io::write(&self.endpoint.stop, &1_u64.to_ne_bytes());
        if let Some(monitor) = self.monitor.take()
            // A watcher can hold the last reference: then this is the monitor's own thread.
            && monitor.thread().id() != std::thread::current().id()
            && monitor.join().is_err()
        {
            tracing::error!("the monitor of the control plane panicked");
        }
    }
}

#[cfg(test)]
mod tests;
