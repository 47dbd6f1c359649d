//! One rank's handle to all ranks' memory.
//!
//! Invariant: calls and changes of the workspace happen one at a time, in turns. Once there is a
//! fault, no call begins.

use super::attachments::{Attachments, CommunicatorMemory};
use super::failure::Failure;
use super::flight::Flight;
use super::health::Health;
use super::listener::NoticeListener;
use super::turn::{Turn, Turns};
use crate::backends::Transport;
use crate::bootstrap::control::{Step, agree, agree_at};
use crate::reason;
use crate::sync::locked;
use crate::{
    Capabilities, ControlError, Device, HeldBytes, Options, TransportError, TransportKind,
    WorkspaceView, World,
};
use flux_core::layout::WorkspaceSize;
use flux_core::{Nodes, Rank, WorldSize};
use flux_cuda::keep;
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// One rank's membership of a group that computes together. Clones are the same membership.
///
/// Calls are ordered, whatever their streams; for two at once make two communicators.
///
/// Only the process that connected is a member: a child of its fork leaves nothing and says
/// nothing.
///
/// Dropping the last clone leaves the group. Peers finish calls that this rank has made; later ones
/// fail at once with [`Fault::PeerLeft`](crate::Fault::PeerLeft), or at the deadline for replayed
/// graphs.
///
/// Collective steps: to connect, to build an op, [`reserve`](Self::reserve),
/// [`exchange`](Self::exchange), [`barrier`](Self::barrier) and [`rebuild`](Self::rebuild). All
/// ranks take the steps of all communicators of a world in one order; a step on which they differ
/// fails on all of them.
#[derive(Clone, Debug)]
pub struct Communicator {
    pub(super) inner: Arc<Inner>,
}

// Drop order: the transport goes after the last notice, and before the rank leaves the world.
pub(super) struct Inner {
    _listener: NoticeListener,
    pub(super) health: Arc<Health>,
    pub(super) flight: Arc<Flight>,
    pub(super) failure: OnceLock<Failure>,
    pub(super) world: World,
    pub(super) options: Options,
    pub(super) turns: Turns,
    explanation: String,
    /// What layers above say of this communicator, by name.
    notes: Mutex<BTreeMap<&'static str, String>>,
    /// Calls without rows that this rank has made: they have no number.
    pub(super) empty_calls: AtomicU32,
    /// After the transport, which ends the calls that use them.
    pub(super) attachments: Attachments,
    /// The process that connected.
    process: u32,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("health", &self.health)
            .field("world", &self.world)
            .finish_non_exhaustive()
    }
}

impl Communicator {
    pub(super) fn new(
        world: &World,
        options: &Options,
        transport: Box<dyn Transport>,
        explanation: String,
    ) -> Self {
        let number = world.communicator();
        let health = Arc::new(Health::new(world.rank(), number, transport));
        let flight = Arc::new(Flight::new());
        let listener = NoticeListener::new(number, &health, &flight, world.control());
        let world = world.share();
        let options = *options;
        let inner = Inner {
            _listener: listener,
            health,
            flight,
            failure: OnceLock::new(),
            world,
            options,
            turns: Turns::default(),
            explanation,
            notes: Mutex::default(),
            empty_calls: AtomicU32::new(0),
            attachments: Attachments::default(),
            process: std::process::id(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.inner.world.rank()
    }

    /// Number of ranks.
    pub fn world_size(&self) -> WorldSize {
        self.inner.world.size()
    }

    /// Where this rank computes.
    pub fn device(&self) -> Device {
        self.inner.health.transport().device()
    }

    /// Whether ranks may share a device ([`Options::shared_device`]).
    pub fn shares_device(&self) -> bool {
        self.inner.options.shared_device
    }

    /// The transport in use.
    pub fn transport(&self) -> TransportKind {
        self.inner.health.transport().kind()
    }

    /// What the transport can do.
    pub fn capabilities(&self) -> Capabilities {
        self.inner.health.transport().capabilities()
    }

    /// How the ranks are grouped in nodes. Each rank is its own node where grouping makes no
    /// difference.
    pub fn nodes(&self) -> Nodes {
        self.inner.health.transport().nodes().unwrap_or(Nodes::apart(self.world_size()))
    }

    /// Which transport was chosen and why, in words; then a line for each [`note`](Self::note).
    pub fn explain(&self) -> String {
        let notes = locked(&self.inner.notes);
        notes.iter().fold(self.inner.explanation.clone(), |text, (name, words)| {
            format!("{text}\n{name}: {words}")
        })
    }

    /// Adds a line to [`explain`](Self::explain), in place of one with the same name.
    #[doc(hidden)]
    pub fn note(&self, name: &'static str, words: String) {
        locked(&self.inner.notes).insert(name, words);
    }

    /// How long a wait for a peer may take.
    pub fn deadline(&self) -> Duration {
        self.inner.options.deadline
    }

    /// What the workspace holds now.
    pub fn workspace_size(&self) -> WorkspaceSize {
        self.inner.health.transport().view().size
    }

    /// The workspace as this rank reaches it, for checks between calls; growth replaces it.
    pub fn workspace(&self) -> Arc<WorkspaceView> {
        self.inner.health.transport().view()
    }

    /// Grows the workspace to at least `size`. Collective: all ranks ask for the same, between the
    /// same calls. Finishes earlier calls; captured graphs must be captured again after a growth.
    ///
    /// # Errors
    /// [`TransportError`], on every rank if on one; the workspace is then unchanged. May wait for a
    /// turn as [`begin`](Self::begin).
    pub fn reserve(&self, size: WorkspaceSize) -> Result<(), TransportError> {
        self.grow(size).map_err(|error| self.with_fault(error))
    }

    fn grow(&self, size: WorkspaceSize) -> Result<(), TransportError> {
        let turn = self.turn();
        let transport = self.inner.health.transport();
        let steps = self.inner.world.steps();
        let able = turn.and_then(|turn| {
            self.inner
                .health
                .status()
                .map(|()| turn)
                .map_err(|fault| TransportError::Broken { fault })
        });
        let answers =
            agree_at(steps, Step::Reserve, &able.as_ref().map(|_| encode(size)), self.until());
        // Peers that wait for this rank know now, so there is time to ask them.
        let _turn = able.map_err(|error| self.working().err().unwrap_or(error))?;
        let sizes: Vec<WorkspaceSize> = answers?.iter().map(|answer| decode(answer)).collect();
        if sizes.iter().any(|&other| other != size) {
            let values: Vec<String> = sizes
                .iter()
                .enumerate()
                .map(|(rank, size)| format!("rank {rank}: {size:?}"))
                .collect();
            return Err(TransportError::Disagreement {
                what: "size of the workspace",
                values: values.join("; "),
            });
        }
        let now = transport.view().size;
        let grown = now.max(size);
        if grown == now {
            return Ok(());
        }
        let drained = transport.drain();
        let answers = agree(steps, &drained.as_ref().map(|()| []), self.until());
        drained?;
        answers?;
        // A fault of theirs stays. What told of another op is gone with the old workspace.
        let _ = self.inner.health.status();
        let reserved = transport.reserve(grown, steps, self.until());
        self.inner.health.carry_over();
        if let Err(TransportError::Control(error)) = &reserved {
            // Some ranks may have the new workspace and some the old one.
            self.give_up(if let ControlError::PeerLost { rank } = error {
                reason::peer_lost(*rank)
            } else {
                reason::OUT_OF_STEP
            });
        }
        reserved
    }

    /// The world whose ranks are connected, after a rebuild the new one.
    pub fn world(&self) -> World {
        self.inner.world.share()
    }

    /// Returns when every rank has come here, on the host only.
    ///
    /// # Errors
    /// [`TransportError::Control`] at the deadline, if a rank is gone, or at another step.
    pub fn barrier(&self) -> Result<(), TransportError> {
        self.exchange_at(Step::Barrier, &[]).map(drop)
    }

    /// Gives `payload`, of at most 64 KiB, to every rank; returns what each gave, by rank.
    /// Collective.
    ///
    /// # Errors
    /// [`TransportError::Control`] at the deadline, if a rank is gone, or at another step. At once,
    /// and without the step, where `payload` is too long.
    pub fn exchange(&self, payload: &[u8]) -> Result<Vec<Vec<u8>>, TransportError> {
        self.exchange_at(Step::Exchange, payload)
    }

    /// As [`exchange`](Self::exchange), at a step of its own that errors name. No part of the API:
    /// for the other crates of this workspace.
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange).
    #[doc(hidden)]
    pub fn exchange_at(&self, step: Step, payload: &[u8]) -> Result<Vec<Vec<u8>>, TransportError> {
        let said = self.inner.world.steps().exchange_at(step, payload, self.until());
        said.map_err(|error| self.with_fault(error.into()))
    }

    /// The error of a step, in place of which the fault says more where an abort has ended it.
    fn with_fault(&self, error: TransportError) -> TransportError {
        match error {
            TransportError::Control(ControlError::Aborted { .. }) => {
                self.working().err().unwrap_or(error)
            }
            error => error,
        }
    }

    /// Whether a fault is known, without a word to anybody; [`status`](Self::status) asks.
    pub fn is_broken(&self) -> bool {
        self.inner.health.status().is_err()
    }

    /// Waits until this rank's calls have ended, failed or not, so that their resources can be
    /// freed. Not while a stream of the device is captured.
    ///
    /// # Errors
    /// [`TransportError::NotDrained`] long after every deadline: freeing would wait, too.
    /// [`TransportError::Cuda`] if the device has failed.
    pub fn drain(&self) -> Result<(), TransportError> {
        self.inner.health.transport().drain()
    }

    /// The attachment of type `T`, as the first caller has made it. It is dropped after the last
    /// call has ended, with the communicator.
    #[doc(hidden)]
    pub fn attachment<T: Any + Send + Sync>(&self, make: impl FnOnce() -> T) -> Arc<T> {
        self.inner.attachments.get_or_make(make)
    }

    /// Says what an attachment holds by this name, in place of what was said before.
    #[doc(hidden)]
    pub fn holds(&self, name: &'static str, held: HeldBytes) {
        self.inner.attachments.holds(name, held);
    }

    /// What this rank's communicator holds: the workspace, and what its ops share.
    ///
    /// ```
    /// use flux_transport::{Communicator, Select, World};
    /// let comm = Communicator::connect_blocking(&World::single(), Select::Host)?;
    /// assert!(comm.memory().to_string().starts_with("workspace: "));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn memory(&self) -> CommunicatorMemory {
        let workspace = self.inner.health.transport().held();
        CommunicatorMemory { workspace, ops: self.inner.attachments.held() }
    }

    /// Ends every wait of this communicator on all ranks, in calls and collective steps, and breaks
    /// it; from any thread. A `reason` of 0, or from
    /// [`reason::RESERVED`] on, counts as 1. An earlier fault stays.
    pub fn abort(&self, reason: u32) {
        self.give_up(if (1..reason::RESERVED).contains(&reason) { reason } else { 1 });
    }

    /// As [`abort`](Self::abort), for any reason but 0.
    pub(super) fn give_up(&self, reason: u32) {
        self.inner.health.give_up(reason, || self.abort_peers(reason));
    }

    /// Has the peers give this communicator up.
    fn abort_peers(&self, reason: u32) {
        let world = &self.inner.world;
        world.control().abort(world.communicator(), reason);
    }

    /// This thread's turn, when other threads' calls have ended.
    pub(super) fn turn(&self) -> Result<Turn<'_>, TransportError> {
        self.inner.turns.take(self.deadline())
    }

    pub(super) fn until(&self) -> Instant {
        Instant::now() + self.inner.options.deadline
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let Self { health, world, attachments, process, .. } = self;
        if *process != std::process::id() {
            // A fork's copy: calls, threads and device are the parent's, and stay as they are.
            keep(health);
            attachments.abandon();
            return;
        }
        if std::thread::panicking() {
            // the world may outlive the panic, in a thread that joins this one
            world.control().abort(world.communicator(), reason::PANICKED);
        }
        // Peers need no barrier: shared memory outlives their last write.
        match health.transport().drain() {
            Err(error) => {
                tracing::warn!(
                    %error,
                    rank = world.rank().get(),
                    "calls were under way when their communicator was dropped",
                );
                // A device that has failed runs nothing.
                if !matches!(error, TransportError::Cuda(_)) {
                    attachments.abandon();
                }
            }
            // Its calls have reached the peers. After a capture only the device knows how many
            // there were.
            Ok(()) if !std::thread::panicking() && health.status().is_ok() => {
                if let Some(next) = health.transport().epoch() {
                    let last = health.departures().begun().unwrap_or(next.before(1));
                    world.control().depart(world.communicator(), last);
                }
            }
            Ok(()) => {}
        }
    }
}

pub(crate) fn encode(size: WorkspaceSize) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&size.half_bytes.to_le_bytes());
    bytes[8..12].copy_from_slice(&size.signals.to_le_bytes());
    bytes[12..].copy_from_slice(&size.counters.to_le_bytes());
    bytes
}

pub(super) fn decode(bytes: &[u8]) -> WorkspaceSize {
    let mut words = [0u32; 4];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
        *word = u32::from_le_bytes(*bytes);
    }
    let [low, high, signals, counters] = words;
    WorkspaceSize { half_bytes: u64::from(high) << 32 | u64::from(low), signals, counters }
}

#[cfg(test)]
mod tests;
