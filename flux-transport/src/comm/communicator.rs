//! One rank's handle to all ranks' memory.
//!
//! Invariant: calls and changes of the workspace happen one at a time, in turns. Once there is a
//! fault, no call begins.

use super::failure::Failure;
use super::flight::Flight;
use super::health::Health;
use super::listener::Listener;
use super::turn::{Turn, Turns};
use crate::backends::{Transport, reason};
use crate::bootstrap::control::{Step, agree, agree_at};
use crate::{Capabilities, Device, Options, TransportError, TransportKind, WorkspaceView, World};
use flux_core::layout::WorkspaceSize;
use flux_core::{Nodes, Rank, WorldSize};
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// One rank's membership of a group that computes together. Clones are the same membership.
///
/// Calls are ordered, whatever streams they come on; who wants two at once makes two communicators.
///
/// Who drops the last clone, and what was built on it, leaves: calls that it has made come to their
/// ends at its peers, and those that it has not made end there at once with
/// [`Fault::PeerLeft`](crate::Fault::PeerLeft), but for replays of graphs, which end by the
/// deadline.
///
/// Collective steps are those that all ranks take together on the host: to connect, to build an op,
/// [`reserve`](Self::reserve), [`exchange`](Self::exchange), [`barrier`](Self::barrier) and
/// [`rebuild`](Self::rebuild). Every rank takes those of all communicators of a world in one order.
/// Where threads of a rank have a communicator each, they take turns in that order; ranks that do
/// not keep to it are told which communicator each is at, and what they were at fails on all of
/// them.
#[derive(Clone, Debug)]
pub struct Communicator {
    pub(super) inner: Arc<Inner>,
}

// Dropped in this order: the transport when no notice uses it any more, and before the rank leaves
// the world.
pub(super) struct Inner {
    _listener: Listener,
    pub(super) health: Arc<Health>,
    pub(super) flight: Arc<Flight>,
    pub(super) failure: OnceLock<Failure>,
    /// A handle of this communicator.
    pub(super) world: World,
    pub(super) options: Options,
    pub(super) turns: Turns,
    explanation: String,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator").field("health", &self.health).field("world", &self.world).finish_non_exhaustive()
    }
}

impl Communicator {
    pub(super) fn new(world: &World, options: &Options, transport: Box<dyn Transport>, explanation: String) -> Self {
        let number = world.communicator();
        let health = Arc::new(Health::new(world.rank(), number, transport));
        let flight = Arc::new(Flight::new());
        let listener = Listener::new(number, &health, &flight, world.control());
        let world = world.share();
        let options = *options;
        let (turns, failure) = (Turns::default(), OnceLock::new());
        let inner = Inner { _listener: listener, health, flight, failure, world, options, turns, explanation };
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

    /// The transport in use.
    pub fn transport(&self) -> TransportKind {
        self.inner.health.transport().kind()
    }

    /// What the transport can do.
    pub fn capabilities(&self) -> Capabilities {
        self.inner.health.transport().capabilities()
    }

    /// How the ranks are grouped: in what crosses nodes a call's program differs from that of ranks
    /// which all reach each other. Each rank a node of its own where it makes no difference.
    pub fn nodes(&self) -> Nodes {
        self.inner.health.transport().nodes().unwrap_or(Nodes::apart(self.world_size()))
    }

    /// Which transport was chosen and why, in words.
    pub fn explain(&self) -> String {
        self.inner.explanation.clone()
    }

    /// How long a wait for a peer may take.
    pub fn deadline(&self) -> Duration {
        self.inner.options.deadline
    }

    /// What the workspace holds now.
    pub fn workspace_size(&self) -> WorkspaceSize {
        self.inner.health.transport().view().size
    }

    /// The workspace as this rank reaches it, for checks that look into it between calls; growth
    /// replaces it.
    pub fn workspace(&self) -> Arc<WorkspaceView> {
        self.inner.health.transport().view()
    }

    /// Makes the workspace hold at least `size`; it never shrinks. Collective: all ranks ask for
    /// the same, between the same calls. Calls before it are finished first. Graphs captured before
    /// a growth must be captured again.
    ///
    /// # Errors
    /// [`TransportError`], on every rank if on one; the workspace is then as it was. A thread waits
    /// for its turn as in [`begin`](Self::begin) before it takes its share, so peers that came long
    /// before it may have waited in vain.
    pub fn reserve(&self, size: WorkspaceSize) -> Result<(), TransportError> {
        let turn = self.turn();
        let transport = self.inner.health.transport();
        let steps = self.inner.world.steps();
        let able = turn.and_then(|turn| self.inner.health.status().map(|()| turn).map_err(|fault| TransportError::Broken { fault }));
        let answers = agree_at(steps, Step::Reserve, &able.as_ref().map(|_| encode(size)), self.until());
        // Peers that wait for this rank know now, so there is time to ask them.
        let _turn = able.map_err(|error| self.working().err().unwrap_or(error))?;
        let sizes: Vec<WorkspaceSize> = answers?.iter().map(|answer| decode(answer)).collect();
        if sizes.iter().any(|&other| other != size) {
            let values: Vec<String> = sizes.iter().enumerate().map(|(rank, size)| format!("rank {rank}: {size:?}")).collect();
            return Err(TransportError::Disagreement { what: "size of the workspace", values: values.join("; ") });
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
            self.give_up(if let crate::ControlError::PeerLost { rank } = error { reason::peer_lost(*rank) } else { reason::OUT_OF_STEP });
        }
        reserved
    }

    /// The world whose ranks are connected: the one that it was made from, or the one that it was
    /// rebuilt in.
    pub fn world(&self) -> World {
        self.inner.world.share()
    }

    /// Returns when every rank has come here. On the host only: calls under way on a device are not
    /// waited for.
    ///
    /// # Errors
    /// [`TransportError::Control`] when the deadline passes, a rank is gone, or a rank is at
    /// another step than this.
    pub fn barrier(&self) -> Result<(), TransportError> {
        self.exchange_at(Step::Barrier, &[]).map(drop)
    }

    /// Gives `payload` to every rank, and returns what each gave, by rank. Collective.
    ///
    /// # Errors
    /// [`TransportError::Control`] when the deadline passes, a rank is gone, or a rank is at
    /// another step than this.
    pub fn exchange(&self, payload: &[u8]) -> Result<Vec<Vec<u8>>, TransportError> {
        self.exchange_at(Step::Exchange, payload)
    }

    /// As [`exchange`](Self::exchange), at a step that no other is taken for and that errors name.
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange).
    pub fn exchange_at(&self, step: Step, payload: &[u8]) -> Result<Vec<Vec<u8>>, TransportError> {
        Ok(self.inner.world.steps().exchange_at(step, payload, self.until())?)
    }

    /// Whether a fault is known, without a word to anybody; [`status`](Self::status) asks.
    pub fn is_broken(&self) -> bool {
        self.inner.health.status().is_err()
    }

    /// Waits until this rank's calls have ended, failed or not, so that what they use can be freed.
    /// Calls that other threads begin meanwhile do not count. Not while a stream of the device is
    /// captured: the driver waits for none then.
    ///
    /// # Errors
    /// [`TransportError::NotDrained`] where the device does not come to their end, long after every
    /// deadline: freeing what they use would wait for it too, perhaps for ever.
    /// [`TransportError::Cuda`] where the device has failed; nothing runs there any more.
    pub fn drain(&self) -> Result<(), TransportError> {
        self.inner.health.transport().drain()
    }

    /// Ends every wait of this rank's calls and of its peers'; the communicator is broken from then
    /// on, on all ranks. Others of the same world go on. A `reason` of 0, or from
    /// [`reason::RESERVED`] on, counts as 1. Where it is broken already, that stays its fault, and
    /// peers hear no other: of that one when [`status`](Self::status) is asked for it.
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
        world.control().abort_peers(world.communicator(), reason);
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
        let Self { health, world, .. } = self;
        if std::thread::panicking() {
            // the world may outlive the panic, in a thread that joins this one
            world.control().abort_peers(world.communicator(), reason::PANICKED);
        }
        // Peers need no barrier: they share the memory that they write to, so it outlives their
        // last write.
        match health.transport().drain() {
            Err(error) => tracing::warn!(%error, rank = world.rank().get(), "calls were under way when their communicator was dropped"),
            // What its calls gave to peers has come. Of one that failed the peers hear otherwise.
            // Where graphs were captured nobody here knows how many calls there were.
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
