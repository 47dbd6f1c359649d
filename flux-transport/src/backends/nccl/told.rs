//! What the ranks of a rail say of their calls: the own host of its own, from where messages take
//! it, and messages of the peers', which bring it to pinned host memory too.
//!
//! Invariant: what a rank says goes ahead of all that it sends in a call, so whoever has that has
//! been told. Where messages go [alone](super::alone) the call's number in it is the device's, and
//! whoever ends the call has been told.

use crate::backends::calls::{OpHash, OpHashes};
use crate::cuda::{CudaDevice, CudaError, PinnedBlock};
use flux_core::layout::FaultRecord;
use flux_core::signal::Epoch;
use flux_core::{Nodes, Rank};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Bytes of what is said of a call.
pub(crate) const SAID: usize = size_of::<u64>();

/// For the rest of a message of which a byte has come.
const WHOLE: Duration = Duration::from_micros(100);

/// A word for each rank of the rail.
#[derive(Debug)]
pub(crate) struct Told {
    words: PinnedBlock,
    /// What the own host says of its last calls.
    own: PinnedBlock,
    /// The number of the call that the own stream is in, as the device has it: the word that goes
    /// with rows.
    number: PinnedBlock,
    rank: Rank,
    nodes: Nodes,
}

impl Told {
    /// For calls from `epoch` on.
    pub(super) fn new(device: &CudaDevice, (rank, nodes): (Rank, Nodes), epoch: Epoch) -> Result<Self, CudaError> {
        let before = OpHash::before(epoch).word();
        let block = |words: usize| PinnedBlock::new(device, SAID * words);
        let this = Self { words: block(nodes.count() as usize)?, own: block(OpHashes::WORDS)?, number: block(1)?, rank, nodes };
        this.own().iter().for_each(|word| word.store(before, Ordering::Release));
        (0..nodes.count()).for_each(|node| this.word(node).store(before, Ordering::Release));
        Ok(this)
    }

    /// Says which op this rank's call `epoch` is of, before anything of it is enqueued that reaches
    /// a peer; by whoever has the call.
    pub(super) fn say(&self, epoch: Epoch, op: u32) {
        OpHashes::new(self.own()).say(epoch, op);
    }

    /// What this rank has said last.
    pub(crate) fn last(&self) -> OpHash {
        OpHashes::new(self.own()).last()
    }

    fn own(&self) -> &[AtomicU64] {
        // SAFETY: as long, aligned as the block begins at a page, and there as long as `self`; only
        // accessed by whole words once it is in use.
        unsafe { std::slice::from_raw_parts(self.own.host().cast::<AtomicU64>(), OpHashes::WORDS) }
    }

    /// From where messages take what this rank says of call `epoch`, for the device.
    pub(super) fn own_address(&self, epoch: Epoch) -> u64 {
        self.own.address() + OpHashes::offset(epoch)
    }

    /// From where messages take the word that goes with rows, for the device.
    pub(super) fn number(&self) -> u64 {
        self.number.address()
    }

    /// Where the own stream leaves it, for the host.
    pub(super) fn number_on_host(&self) -> u64 {
        self.number.host().expose_provenance() as u64
    }

    /// Sets that word to `value`, in the stream's place: what is still sent with it then is taken
    /// for no call's.
    pub(super) fn set_number(&self, value: u32) {
        // SAFETY: aligned, as the block begins at a page; it lives as long as `self`, and is only
        // accessed by whole words.
        unsafe { AtomicU32::from_ptr(self.number.host().cast()) }.store(value, Ordering::Release);
    }

    /// Where messages bring what the rank of the rail in `node` says, for the device.
    pub(crate) fn address(&self, node: u32) -> u64 {
        self.words.address() + u64::from(node) * SAID as u64
    }

    /// A rank of the rail whose calls are of other ops than this one's.
    pub(super) fn disagreement(&self) -> Option<FaultRecord> {
        self.look()?;
        // A message may come byte by byte.
        std::thread::sleep(WHOLE);
        self.look()
    }

    fn look(&self) -> Option<FaultRecord> {
        self.others().find_map(|(peer, theirs)| OpHashes::new(self.own()).against_one(self.rank, peer, theirs))
    }

    /// A rank of the rail of whom nothing has come in call `epoch` yet, and the last call of which
    /// something has.
    pub(super) fn silent_in(&self, epoch: Epoch) -> Option<(Rank, Epoch)> {
        self.others().find(|(_, said)| said.precedes(epoch)).map(|(peer, said)| (peer, said.epoch()))
    }

    /// The other ranks of the rail, and what they said last, as far as it has come.
    fn others(&self) -> impl Iterator<Item = (Rank, OpHash)> {
        let Self { rank, nodes, .. } = *self;
        let local = nodes.local_of(rank);
        let nodes_apart = (0..nodes.count()).filter(move |&node| node != nodes.node_of(rank));
        nodes_apart.map(move |node| (nodes.rank(node, local), OpHash::of_word(self.word(node).load(Ordering::Acquire))))
    }

    fn word(&self, node: u32) -> &AtomicU64 {
        assert!(node < self.nodes.count(), "there is no node {node}");
        // SAFETY: in bounds and aligned, as the block begins at a page; it lives as long as `self`,
        // and the host only loads after it was made.
        unsafe { AtomicU64::from_ptr(self.words.host().cast::<u64>().add(node as usize)) }
    }
}
