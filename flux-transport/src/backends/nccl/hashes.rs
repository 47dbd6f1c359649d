//! The op-sequence hashes of calls: the own host's, from where messages take them, and the peers',
//! which messages and collectives bring to pinned host memory.
//!
//! Invariant: a rank's hash of a call goes ahead of all that it sends in it, or in one group with
//! it. So whoever has data of a call has the sender's hash.

use crate::backends::calls::{OpHash, OpHashes};
use crate::cuda::{CudaDevice, CudaError, PinnedBlock};
use flux_core::layout::{FaultRecord, control, fault};
use flux_core::signal::Epoch;
use flux_core::{Nodes, Rank};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Bytes that a rank sends of itself, from its poison on.
pub(super) const CALL_BYTES: usize = 16;
const _: () =
    assert!(control::CALL + 8 == control::POISON + CALL_BYTES as u64, "one range has both");

/// Bytes of a call's hash and number.
pub(crate) const HASH_BYTES: usize = size_of::<u64>();

/// For the rest of a message of which a byte has come.
const WHOLE: Duration = Duration::from_micros(100);

/// Hashes of this rank and of the ranks of its rail.
#[derive(Debug)]
pub(crate) struct CallHashes {
    /// What messages bring, by node.
    words: PinnedBlock,
    /// What sequential calls bring, by node: the poison, and behind it the hash.
    gathered: PinnedBlock,
    /// Those of the own host's last calls.
    own: PinnedBlock,
    /// The number of the call that the side stream is in, as the device has it: the word that goes
    /// with rows.
    number: PinnedBlock,
    rank: Rank,
    nodes: Nodes,
}

impl CallHashes {
    /// Bytes of pinned host memory.
    pub(super) fn bytes(&self) -> usize {
        let Self { words, gathered, own, number, .. } = self;
        [words, gathered, own, number].map(PinnedBlock::bytes).iter().sum()
    }

    /// For calls from `epoch` on.
    pub(super) fn new(
        device: &CudaDevice,
        (rank, nodes): (Rank, Nodes),
        epoch: Epoch,
    ) -> Result<Self, CudaError> {
        let before = OpHash::before(epoch).word();
        let block = |bytes: usize| PinnedBlock::new(device, bytes);
        let count = nodes.count() as usize;
        let this = Self {
            words: block(HASH_BYTES * count)?,
            gathered: block(CALL_BYTES * count)?,
            own: block(HASH_BYTES * OpHashes::WORDS)?,
            number: block(HASH_BYTES)?,
            rank,
            nodes,
        };
        this.own().iter().for_each(|word| word.store(before, Ordering::Release));
        for node in 0..nodes.count() {
            let (poison, gathered) = this.gathered_of(node);
            poison.store(0, Ordering::Release);
            this.word(node).store(before, Ordering::Release);
            gathered.store(before, Ordering::Release);
        }
        Ok(this)
    }

    /// Notes which op this rank's call `epoch` is of, before anything of it is enqueued that
    /// reaches a peer; by whoever has the call.
    pub(super) fn say(&self, epoch: Epoch, op: u32) {
        OpHashes::new(self.own()).say(epoch, op);
    }

    /// That of this rank's last call.
    pub(crate) fn last(&self) -> OpHash {
        OpHashes::new(self.own()).last()
    }

    fn own(&self) -> &[AtomicU64] {
        // SAFETY: as long, aligned as the block begins at a page, and there as long as `self`; only
        // accessed by whole words once it is in use.
        unsafe { std::slice::from_raw_parts(self.own.host().cast::<AtomicU64>(), OpHashes::WORDS) }
    }

    /// From where messages take that of this rank's call `epoch`, for the device.
    pub(super) fn own_address(&self, epoch: Epoch) -> u64 {
        self.own.address() + OpHashes::offset(epoch)
    }

    /// From where messages take the word that goes with rows, for the device.
    pub(super) fn number(&self) -> u64 {
        self.number.address()
    }

    /// Where the side stream leaves it, for the host.
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

    /// Where messages bring that of the rail's rank in `node`, for the device.
    pub(crate) fn address(&self, node: u32) -> u64 {
        self.words.address() + u64::from(node) * HASH_BYTES as u64
    }

    /// Where a sequential call brings that of the rank in `node`, for the device.
    pub(super) fn gathered(&self, node: u32) -> u64 {
        self.gathered.address() + u64::from(node) * CALL_BYTES as u64
    }

    /// Numbers of the other ranks in the communicator.
    pub(super) fn nodes_of_others(&self) -> impl Iterator<Item = u32> {
        self.others().map(|(_, node)| node)
    }

    /// A fault that the peers' words show: calls of other ops than this rank's, or a sequential
    /// call of a rank whose calls have failed.
    pub(super) fn fault(&self) -> Option<FaultRecord> {
        self.look()?;
        // A message may come byte by byte.
        std::thread::sleep(WHOLE);
        self.look()
    }

    fn look(&self) -> Option<FaultRecord> {
        let against = |peer, theirs: &AtomicU64| {
            let theirs = OpHash::of_word(theirs.load(Ordering::Acquire));
            OpHashes::new(self.own()).against_one(self.rank, peer, theirs)
        };
        self.others().find_map(|(peer, node)| {
            let (poison, gathered) = self.gathered_of(node);
            let disagrees = against(peer, self.word(node)).or_else(|| against(peer, gathered));
            let poisoned = || {
                (poison.load(Ordering::Acquire) != 0).then(|| poisoned(peer, self.last().epoch()))
            };
            disagrees.or_else(poisoned)
        })
    }

    /// A rank of whose sequential call `epoch` nothing has come, and the last of which something
    /// has.
    pub(super) fn silent_in(&self, epoch: Epoch) -> Option<(Rank, Epoch)> {
        let last = |node| OpHash::of_word(self.gathered_of(node).1.load(Ordering::Acquire));
        self.others()
            .map(|(peer, node)| (peer, last(node)))
            .find(|(_, said)| said.precedes(epoch))
            .map(|(peer, said)| (peer, said.epoch()))
    }

    /// The other ranks of the rail, each with its node.
    fn others(&self) -> impl Iterator<Item = (Rank, u32)> {
        let Self { rank, nodes, .. } = *self;
        let local = nodes.local_of(rank);
        (0..nodes.count())
            .filter(move |&node| node != nodes.node_of(rank))
            .map(move |node| (nodes.rank(node, local), node))
    }

    fn word(&self, node: u32) -> &AtomicU64 {
        assert!(node < self.nodes.count(), "there is no node {node}");
        // SAFETY: in bounds and aligned, as the block begins at a page; it lives as long as `self`,
        // and is only accessed by whole words.
        unsafe { AtomicU64::from_ptr(self.words.host().cast::<u64>().add(node as usize)) }
    }

    fn gathered_of(&self, node: u32) -> (&AtomicU32, &AtomicU64) {
        assert!(node < self.nodes.count(), "there is no node {node}");
        // SAFETY: as in `word`.
        unsafe {
            let first = self.gathered.host().add(CALL_BYTES * node as usize);
            (AtomicU32::from_ptr(first.cast()), AtomicU64::from_ptr(first.add(HASH_BYTES).cast()))
        }
    }
}

/// That a call of `peer` before its call `epoch` has failed on its device.
fn poisoned(peer: Rank, epoch: Epoch) -> FaultRecord {
    let (rank, epoch) = (peer.get(), epoch.get());
    let (code, abort) = (fault::ABORTED, fault::TIMED_OUT);
    FaultRecord {
        state: 1,
        code,
        wait: fault::CALL,
        rank,
        peer: rank,
        epoch,
        expected: epoch,
        abort,
        ..FaultRecord::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Fault;
    use crate::backends::reason;

    #[test]
    fn a_poisoned_peer_is_named_with_its_reason() {
        let fault = Fault::from_record(&poisoned(Rank::new(3), Epoch::new(9)), Vec::new());
        assert_eq!(fault, Fault::Aborted { rank: Rank::new(3), reason: reason::TIMED_OUT });
    }
}
