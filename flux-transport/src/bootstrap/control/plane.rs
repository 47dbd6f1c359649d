//! One rank's end of the control plane, as every launch gives it.

use super::error::ControlError;
use super::hosts::Hosts;
use super::inquiry::{Answer, Answerer, GaveUp};
use flux_core::signal::Epoch;
use flux_core::{Rank, WorldSize};
use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::Instant;

/// What the ranks of a world are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Launch {
    /// Threads of one process: they share its address space and devices.
    Threads,
    /// Processes, of one machine or of several: [`ControlPlane::hosts`] says.
    Processes,
}

/// What a rank hears of a peer without having asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "fields are named after what they hold")]
pub enum Notice {
    /// The peer's end is gone, and it had not said goodbye.
    Lost(Rank),
    /// The peer asks everybody to give up what they wait for in a communicator.
    Aborted { by: Rank, communicator: u32, reason: u32 },
    /// The peer has dropped a communicator that works: it makes no calls any more.
    Departed {
        by: Rank,
        communicator: u32,
        /// The last call that it has made, or the one before the first.
        last: Epoch,
    },
    /// A wait of the peer passed its deadline, or another rank told it of one that did.
    GaveUp {
        by: Rank,
        /// What it waited for, and who is late.
        what: GaveUp,
    },
    /// The peer's transport tells this rank's, in words of its own.
    Told { by: Rank, communicator: u32, words: [u32; 4] },
}

/// What a rank gave in an exchange with descriptors.
#[derive(Debug, Default)]
pub struct Given {
    /// Its bytes.
    pub payload: Vec<u8>,
    /// Duplicates of its descriptors.
    pub fds: Vec<OwnedFd>,
    /// Whether there were more, which this process may not have open.
    pub cut: bool,
}

/// A group of the ranks that were left of another one.
#[derive(Clone, Debug)]
pub struct Regrouped {
    /// This rank's end.
    pub control: Arc<dyn ControlPlane>,
    /// What numbers its ranks had in the group that they are left of, by their new ones.
    pub members: Vec<Rank>,
}

/// Is told of notices; called on whatever thread learns of them, so it does not block.
pub type Watcher = dyn Fn(Notice) + Send + Sync;

/// The number of a step that no communicator takes.
const NO_COMMUNICATOR: u32 = u32::MAX;

/// One rank's end of the control plane.
///
/// Dropping an end without [`goodbye`](Self::goodbye), or its process's death, loses the rank to
/// its peers. Only the process that connected counts, not children of its fork.
pub trait ControlPlane: Send + Sync + Debug {
    /// This end's rank.
    fn rank(&self) -> Rank;

    /// Number of ranks.
    fn world(&self) -> WorldSize;

    /// What the ranks are.
    fn kind(&self) -> Launch;

    /// Which ranks share a host.
    fn hosts(&self) -> &Hosts;

    /// Gives `payload` to every rank at a step of a communicator, and returns what each rank gave,
    /// by rank, this one included. [`abort`](Self::abort) of the communicator, by any rank, ends
    /// it.
    fn exchange_in(
        &self,
        communicator: u32,
        payload: &[u8],
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, ControlError>;

    /// As [`exchange_in`](Self::exchange_in), of no communicator.
    fn exchange(&self, payload: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, ControlError> {
        self.exchange_in(NO_COMMUNICATOR, payload, deadline)
    }

    /// As [`exchange_in`](Self::exchange_in), and passes duplicates of `fds` to every peer on this
    /// rank's [host](Self::hosts). Returns those of each peer; none at the own index and from other
    /// hosts.
    fn exchange_with_fds(
        &self,
        communicator: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> Result<Vec<Given>, ControlError>;

    /// As [`exchange_with_fds`](Self::exchange_with_fds), of descriptors alone.
    fn exchange_fds(
        &self,
        fds: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> Result<Vec<Vec<OwnedFd>>, ControlError> {
        Ok(self
            .exchange_with_fds(NO_COMMUNICATOR, &[], fds, deadline)?
            .into_iter()
            .map(|given| given.fds)
            .collect())
    }

    /// Returns when every rank has come here: an exchange of nothing.
    fn barrier(&self, deadline: Instant) -> Result<(), ControlError> {
        self.exchange(&[], deadline).map(drop)
    }

    /// Tells `watcher` of every notice from now on, and of earlier losses, until it is dropped.
    fn watch(&self, watcher: Weak<Watcher>);

    /// Says that this rank is leaving, so that its absence is no loss. It takes no further steps.
    fn goodbye(&self);

    /// Ends this rank's steps of a communicator, those in progress and later ones, and asks the
    /// peers to give up their waits in it; does not wait. `reason` is not 0.
    fn abort(&self, communicator: u32, reason: u32);

    /// Tells the peers that this rank makes no call of a communicator after `last`; does not wait.
    fn depart(&self, communicator: u32, last: Epoch);

    /// Tells the peers of a wait that passed its deadline; does not wait.
    fn give_up(&self, what: &GaveUp);

    /// Tells one peer's transport, of a communicator, unless the peer's socket is full; does not
    /// wait. Whether the words are on their way.
    fn tell(&self, to: Rank, communicator: u32, words: [u32; 4]) -> bool;

    /// Returns when every notice that has come to this rank is heard, or a moment later.
    fn settle(&self);

    /// Has `answerer` answer when a peer asks. It is forgotten once it is dropped.
    fn answer_with(&self, answerer: Weak<Answerer>);

    /// Asks every peer about a communicator; returns the answers by rank, this one's included. No
    /// step: peers answer at any time.
    fn ask(&self, communicator: u32, deadline: Instant) -> Vec<Answer>;

    /// Makes a control plane of the ranks that are neither gone nor in `without`, renumbered in
    /// order. All of them ask for it. A living rank that is left out gets no group of this plane
    /// any more.
    ///
    /// # Errors
    /// [`ControlError::Timeout`] names the ranks that did not ask, [`ControlError::Leader`] the one
    /// that could not make the group, [`ControlError::GivenUp`] one that leaves this rank out.
    fn regroup(&self, without: &[Rank], deadline: Instant) -> Result<Regrouped, ControlError>;

    /// A peer that has gone on in a group of this plane's ranks without this one, or is about to.
    fn left_out_by(&self) -> Option<Rank>;
}
