//! A rank's side of the rendezvous.
//!
//! Invariant: whoever waits here holds at most one connection and has nothing in the file system but, at rank 0, the socket's name.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use flux_core::{Rank, WorldSize};
use rustix::io::Errno;

use super::directory::{Listener, open_private, socket_path};
use super::environment::Environment;
use super::error::{BootstrapError, ranks_in};
use super::hello::{GIVING_UP, Hello, PROTOCOL, REPLY_BYTES, Reply, Version};
use super::plane::ProcessControl;
use super::socket::{self, Received};
use super::{WAITING_FOR_RANKS, lobby};
use crate::control::ControlPlane;

/// How the ranks of a launch meet.
#[async_trait]
pub trait Rendezvous: Send + Sync {
    /// Returns when every rank has come, on this thread.
    ///
    /// # Errors
    /// See [`BootstrapError`]; at the deadline, [`BootstrapError::Timeout`] names the ranks that are missing.
    fn meet_blocking(&self, deadline: Instant) -> Result<Mesh, BootstrapError>;

    /// Returns when every rank has come; the caller's thread stays free. A future dropped before leaves the attempt to end by its deadline,
    /// and then to the peers this rank is lost.
    ///
    /// # Errors
    /// As [`meet_blocking`](Self::meet_blocking).
    async fn meet(&self, deadline: Instant) -> Result<Mesh, BootstrapError>;
}

/// Connections to all ranks.
#[derive(Debug)]
pub struct Mesh {
    pub(super) rank: Rank,
    pub(super) world: WorldSize,
    /// By rank, none to itself.
    pub(super) sockets: Vec<Option<OwnedFd>>,
}

impl Mesh {
    /// Of the sockets to the other ranks, in rank order.
    pub(super) fn new(rank: Rank, world: WorldSize, sockets: Vec<OwnedFd>) -> Self {
        let mut sockets = sockets.into_iter();
        let sockets = world.ranks().map(|other| if other == rank { None } else { sockets.next() }).collect();
        Self { rank, world, sockets }
    }

    /// Keeps the connections as a control plane, watched by a thread of its own.
    ///
    /// # Errors
    /// [`BootstrapError::Io`] where the system gives no thread.
    pub fn into_control_plane(self) -> Result<Arc<dyn ControlPlane>, BootstrapError> {
        Ok(Arc::new(ProcessControl::start(self)?))
    }
}

/// The ranks of one host, over a Unix socket in a private directory.
#[derive(Clone, Debug)]
pub struct UnixRendezvous {
    environment: Environment,
}

impl UnixRendezvous {
    /// For the rank and place that the environment says.
    pub fn new(environment: Environment) -> Self {
        Self { environment }
    }

    fn hello(&self) -> Hello {
        Hello {
            protocol: PROTOCOL,
            rank: self.environment.rank.get(),
            world: self.environment.world.get(),
            pid: std::process::id(),
            nonce: self.environment.place.nonce,
            version: Version::new(env!("CARGO_PKG_VERSION")),
        }
    }

    /// Finds rank 0 and waits for its verdict.
    fn visit(&self, deadline: Instant) -> Result<Mesh, BootstrapError> {
        let place = &self.environment.place;
        let path = socket_path(place)?;
        let mut missing = 1;
        let mut pause = Duration::from_millis(1);
        loop {
            if open_private(&place.directory)?.is_some() {
                match socket::connect(&path) {
                    Ok(socket) => {
                        if let Some(mesh) = self.listen_to_rank_zero(&socket, deadline, &mut missing)? {
                            return Ok(mesh);
                        }
                    }
                    // No name yet, a stale one, a full queue, or the end of what was there.
                    Err(Errno::NOENT | Errno::CONNREFUSED | Errno::WOULDBLOCK | Errno::CONNRESET | Errno::PIPE) => {}
                    Err(errno) => return Err(BootstrapError::io("connecting to rank 0")(errno)),
                }
            } else if !place.made_by_rank_zero {
                let problem = "does not exist; its launcher makes it".to_owned();
                return Err(BootstrapError::Directory { path: place.directory.clone(), problem });
            }
            if Instant::now() >= deadline {
                return Err(BootstrapError::Timeout { step: WAITING_FOR_RANKS, missing: ranks_in(missing, self.environment.world) });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }

    /// Says hello and listens; `None` where the connection ended without a verdict: rank 0 had too many strangers at its door, or died.
    fn listen_to_rank_zero(&self, socket: &OwnedFd, deadline: Instant, missing: &mut u64) -> Result<Option<Mesh>, BootstrapError> {
        let (rank, world) = (self.environment.rank, self.environment.world);
        if !socket::same_user(socket.as_fd()).map_err(BootstrapError::io("asking for rank 0's user"))? {
            return Err(BootstrapError::Protocol("the process that listens in rank 0's place runs as another user".to_owned()));
        }
        match socket::send(socket.as_fd(), &[&self.hello().encode()], &[], deadline) {
            Ok(()) => {}
            Err(Errno::PIPE | Errno::CONNRESET | Errno::TIMEDOUT) => return Ok(None),
            Err(errno) => return Err(BootstrapError::io("saying hello to rank 0")(errno)),
        }
        let mut buffer = [0; REPLY_BYTES];
        loop {
            let io = BootstrapError::io("listening to rank 0");
            if socket::wait(&mut [socket::readable(socket)], Some(deadline)).map_err(BootstrapError::io("listening to rank 0"))? == 0 {
                // So that all ranks hear now who is missing; if rank 0 is gone itself, there is nobody to tell.
                let _ = socket::send(socket.as_fd(), &[&GIVING_UP], &[], deadline);
                return Ok(None);
            }
            let message = match socket::receive(socket.as_fd(), &mut buffer).map_err(io)? {
                Received::Message(message) => message,
                Received::Nothing => continue,
                Received::End => return Ok(None),
                Received::Oversized => return Err(BootstrapError::Protocol("an answer of rank 0 is too long".to_owned())),
            };
            match Reply::decode(&buffer[..message.length]) {
                Some(Reply::Waiting { missing: now }) if message.descriptors.is_empty() => *missing = now,
                Some(Reply::Refused(refusal)) if message.descriptors.is_empty() => return Err(refusal.into_error(rank, world)),
                Some(Reply::Welcome { sockets })
                    if sockets == world.peers()
                        && message.descriptors.len() == sockets as usize
                        && message.descriptors.iter().all(|socket| socket::is_ours(socket.as_fd())) =>
                {
                    return Ok(Some(Mesh::new(rank, world, message.descriptors)));
                }
                reply => {
                    let count = message.descriptors.len();
                    return Err(BootstrapError::Protocol(format!("rank 0 answered {reply:?} with {count} descriptors")));
                }
            }
        }
    }
}

#[async_trait]
impl Rendezvous for UnixRendezvous {
    fn meet_blocking(&self, deadline: Instant) -> Result<Mesh, BootstrapError> {
        let Environment { rank, world, ref place, .. } = self.environment;
        if world.peers() == 0 {
            return Ok(Mesh::new(rank, world, Vec::new()));
        }
        if rank == Rank::new(0)
            && let Some(listener) = Listener::bind(place, deadline)?
        {
            let sockets = lobby::gather(self.hello(), world, &listener, deadline)?;
            return Ok(Mesh::new(rank, world, sockets));
        }
        // A second rank 0 knocks like any other, so that the first tells everybody.
        self.visit(deadline)
    }

    async fn meet(&self, deadline: Instant) -> Result<Mesh, BootstrapError> {
        #[derive(Default)]
        struct Handover {
            result: Option<Result<Mesh, BootstrapError>>,
            waker: Option<Waker>,
        }
        let handover = Arc::new(Mutex::new(Handover::default()));
        let (rendezvous, theirs) = (self.clone(), Arc::clone(&handover));
        let meet = move || {
            let result = rendezvous.meet_blocking(deadline);
            let mut handover = theirs.lock().unwrap_or_else(PoisonError::into_inner);
            handover.result = Some(result);
            if let Some(waker) = handover.waker.take() {
                waker.wake();
            }
        };
        std::thread::Builder::new()
            .name("flux-rendezvous".to_owned())
            .spawn(meet)
            .map_err(|source| BootstrapError::Io { step: "starting the thread of the rendezvous", source })?;
        std::future::poll_fn(|context| {
            let mut handover = handover.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(result) = handover.result.take() {
                return Poll::Ready(result);
            }
            handover.waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }
}
