//! Copies to node peers by copy engines: own rows, and what has come along the rail.
//!
//! Invariant: a node peer's signal gets the epoch with own rows, which are there from the start.
//! Otherwise it gets the word that came with the chunk, after the chunk: a torn chunk is passed on
//! with a word that no call awaits.
//!
//! Aborted messages may leave a torn chunk whose word has come. By then this rank's kernel has told
//! the node peers' kernels that it failed, and they look before they close the call
//! (`nccl/watchdog.rs` has the order). A whole chunk of another call is found by the hosts.

use super::workspace::Workspace;
use crate::backends::device::lane::Lane;
use crate::backends::device::peer_memory::{Addresses, by_copy_engine};
use crate::backends::error::TransportError;
use crate::backends::jobs::RowTransfers;
use flux_core::Rank;
use flux_core::program::{Forward, Round};
use flux_core::signal::Epoch;
use flux_cuda::{CudaDevice, CudaError, Event, write_value_async};

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
        Ok(Self { device, lane, at, push, epoch, rest: push.forwards })
    }

    /// Enqueues copies of the chunk of `round` to node peers, behind what `event` is recorded on.
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
