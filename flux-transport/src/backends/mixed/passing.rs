//! Copies to node peers by copy engines: own rows, and what has come along the rail.
//!
//! Invariant: a node peer's signal gets the epoch with own rows, which are there from the start.
//! Otherwise it gets the word that came with the chunk, after the chunk: a torn chunk is passed on
//! with a word that no call awaits.
//!
//! Aborted messages may leave a torn chunk whose word has come. By then this rank's kernel has told
//! the node peers' kernels that it failed, and they look before they close the call
//! (`nccl/guard.rs` has the order). A whole chunk of another call is found by its sender's
//! op-sequence hash, which is passed on too.

use super::workspace::Workspace;
use crate::backends::nccl::{HASH_BYTES, StepsSeen};
use crate::backends::nvlink::{Addresses, Lane, by_copy_engine};
use crate::cuda::{CudaDevice, CudaError, Event, copy_async, write_value_async};
use crate::{RowTransfers, TransportError};
use flux_core::Rank;
use flux_core::layout::calling_offset;
use flux_core::program::{Forward, Round};
use flux_core::signal::Epoch;

/// The rows of one call on their way to node peers.
#[derive(Debug)]
pub(super) struct Passing<'a> {
    device: &'a CudaDevice,
    lane: &'a Lane,
    at: &'a Workspace,
    push: &'a RowTransfers<'a>,
    epoch: Epoch,
    /// What is still to come.
    rest: &'a [Forward],
    /// Of whom something has come.
    heard: StepsSeen,
}

impl<'a> Passing<'a> {
    /// Enqueues the own rows on `lane`.
    ///
    /// # Safety
    /// The push was checked against the workspace, its forwards follow the rounds; `lane` is
    /// ordered after the call before and after the rows, which stay until it is past what is
    /// enqueued here and by [`arrived`](Self::arrived).
    pub(super) unsafe fn begin(
        device: &'a CudaDevice,
        lane: &'a Lane,
        at: &'a Workspace,
        push: &'a RowTransfers<'a>,
        epoch: Epoch,
    ) -> Result<Self, CudaError> {
        let word = at.outbox.own_word();
        let nodes = at.outbox.nodes();
        let rank = at.memory().rank;
        let _current = device.enter()?;
        // SAFETY: a word of the outbox.
        unsafe { write_value_async(device, word, epoch.get(), lane.raw()) }?;
        let to_node_peer = |dest: Rank| dest != rank && nodes.together(rank, dest);
        let own = push.transfers.iter().filter(|transfer| to_node_peer(Rank::new(transfer.dest)));
        // SAFETY: the caller's promise.
        unsafe { by_copy_engine(device, lane, push, own, addresses(at, word), epoch) }?;
        Ok(Self { device, lane, at, push, epoch, rest: push.forwards, heard: StepsSeen::default() })
    }

    /// Enqueues copies of the chunk of `round` to node peers, behind what `event` is recorded on.
    /// With the first chunk of a rank goes its op-sequence hash.
    pub(super) fn arrived(
        &mut self,
        round: &Round,
        rail: &Lane,
        event: &Event,
    ) -> Result<(), TransportError> {
        let (now, later) = self.rest.split_at(of_round(self.rest, round));
        self.rest = later;
        event.record(rail.raw())?;
        event.make_wait(self.lane.raw())?;
        if self.heard.is_first(round.step) {
            self.pass_on_what_is_said_by(round.received.peer)?;
        }
        let Self { device, lane, at, push, epoch, .. } = *self;
        let memory = at.memory();
        let half = memory.data + epoch.half() as u64 * memory.size.half_stride();
        for Forward { from, awaits, to } in now {
            // From a place, whose rows are dense.
            let rows =
                RowTransfers { x: half + push.place(*from), row_stride: push.row_bytes, ..*push };
            let word = at.outbox.word(awaits.signal);
            // SAFETY: checked as `begin`'s caller promised; the rows are in the own gather buffer,
            // where the stream's next call is the first to overwrite them.
            unsafe {
                by_copy_engine(device, lane, &rows, std::iter::once(to), addresses(at, word), epoch)
            }?;
        }
        Ok(())
    }

    /// Rows that node peers take from this rank's hand are those of a rank whom they do not hear
    /// themselves.
    fn pass_on_what_is_said_by(&self, far: Rank) -> Result<(), CudaError> {
        let Self { device, lane, at, epoch, .. } = self;
        let nodes = at.outbox.nodes();
        let said = at.outbox.hashes().address(nodes.node_of(far));
        let node_peers = nodes.world().ranks().filter(|&node_peer| {
            node_peer != at.memory().rank && nodes.together(at.memory().rank, node_peer)
        });
        for node_peer in node_peers {
            let to =
                at.node_peers.pads()[node_peer.index()] + calling_offset(far.get(), epoch.half());
            // SAFETY: a word of the node peer's pad and one of pinned memory, which the next
            // call's messages are the first to overwrite, behind this call.
            unsafe { copy_async(device, to, said, HASH_BYTES, lane.raw()) }?;
        }
        Ok(())
    }
}

fn addresses(at: &Workspace, word: u64) -> Addresses<'_> {
    Addresses {
        data: at.node_peers.data(),
        pads: at.node_peers.pads(),
        word,
        size: at.node_peers.size(),
    }
}

/// How many of the next forwards are of what `round` brings.
pub(super) fn of_round(forwards: &[Forward], round: &Round) -> usize {
    forwards.iter().take_while(|forward| forward.awaits.signal == round.received.signal).count()
}
