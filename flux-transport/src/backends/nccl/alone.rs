//! The messages of a call that go alone: on the caller's stream, before what reads what they bring,
//! while no kernel of the call computes or waits.
//!
//! Invariant: nothing awaits a signal. What comes next on the caller's stream comes after all that
//! was brought, unless the messages were aborted, or a peer sent what is not whole. So the kernel
//! that ends the call looks at the abort word, which the host sets before it ends messages, and at
//! what each peer has said of its call: the number, from the control block, where a call that fails
//! does not advance it, and which ops its calls were of, which a side stream writes beside it,
//! behind the messages of the call before. Both are one message, as each of a group takes some 4
//! us, and each write of a word by the caller's stream 2 to 3: it goes with the rows of an
//! AllGather-GEMM, and beside the tiles of a GEMM-ReduceScatter. The side stream says as well how
//! far the call is, and copies the rows that a rank keeps for itself.

use super::carry::{Ends, Memory, StepsSeen, rows_of};
use super::library::NcclError;
use super::messages::{Group, Way};
use super::progress::{Place, Step};
use super::told::SAID;
use super::watched::Watched;
use crate::backends::nvlink::{Addresses, Lane, by_copy_engine};
use crate::cuda::{CudaDevice, CudaError, WordOp, words_async};
use crate::{Exchange, Heard, Source, TransportError, WorkspaceView};
use flux_core::layout::control;
use flux_core::program::{Round, groups};
use flux_core::signal::Epoch;

const _: () = assert!(SAID == 8 && control::SAID == control::EPOCH + 4, "one message has both");

/// A call whose messages go alone.
#[derive(Clone, Copy, Debug)]
pub(super) struct Alone {
    epoch: Epoch,
    heard: Heard,
}

/// The streams and the memory of such a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Streams<'a> {
    pub(super) device: &'a CudaDevice,
    pub(super) caller: usize,
    pub(super) lane: &'a Lane,
    pub(super) watched: &'a Watched,
    pub(super) at: Memory<'a>,
}

impl Streams<'_> {
    fn write(&self, address: u64, value: u32) -> Result<(), CudaError> {
        // SAFETY: words of the control block and of pinned memory that outlive the stream's work.
        unsafe { words_async(self.device, [WordOp::Write { address, value }], self.lane.raw()) }
    }

    /// Has the side stream say that call `epoch` has come to a step.
    fn stands(&self, epoch: Epoch, step: Step) -> Result<(), CudaError> {
        self.write(self.watched.progress.address(), Place::new(epoch, step).word())
    }

    /// Adds what this rank says to the reader of a round, and what its source says, to a group.
    fn tell(&self, messages: &Group<'_>, round: &Round) -> Result<(), NcclError> {
        let outbox = self.at.outbox;
        let [to, from] = [round.sent.peer, round.received.peer].map(|peer| outbox.nodes().node_of(peer));
        // SAFETY: words of the control block and of pinned memory that outlive the stream's work.
        unsafe {
            messages.send(self.at.control + control::EPOCH, SAID, to)?;
            messages.receive(outbox.told().address(from), SAID, from)
        }
    }
}

impl Alone {
    /// Begins call `epoch`: has the side stream write which ops this rank's calls were of, and,
    /// where the executor is still to store what is sent, tell the peers beside that.
    pub(super) fn begin(on: &Streams<'_>, exchange: &Exchange<'_>, epoch: Epoch) -> Result<Self, TransportError> {
        let told = on.at.outbox.told();
        let said = told.last().history();
        on.write(on.at.control + control::SAID, said)?;
        if matches!(exchange.source, Source::Stored { .. }) {
            // Behind the call before, which advances the number.
            on.lane.fork(on.caller)?;
            on.stands(epoch, Step::Alone)?;
            let mut seen = StepsSeen::default();
            on.watched.link.group(Way::Alone, on.lane.raw(), |messages| {
                exchange.rounds.iter().filter(|round| seen.is_first(round.step)).try_for_each(|round| on.tell(messages, round))
            })?;
        }
        Ok(Self { epoch, heard: Heard { words: told.address(0), said } })
    }

    /// Where the executor of call `epoch` hears its peers, if it is that.
    pub(super) fn heard(&self, epoch: Epoch) -> Option<Heard> {
        (self.epoch == epoch).then_some(self.heard)
    }

    /// Enqueues all messages on the caller's stream, and beside them copies of the rows that this
    /// rank keeps, where `own` says: what comes next on the caller's stream comes after all of it.
    ///
    /// # Safety
    /// The exchange is the one that the call was begun with, and was checked against the workspace;
    /// what is sent is there, and the call before has ended, where the caller's stream has come;
    /// rows stay until it is past what is enqueued here.
    pub(super) unsafe fn send(&self, on: &Streams<'_>, own: &WorkspaceView, exchange: &Exchange<'_>) -> Result<(), TransportError> {
        let &Streams { device, caller, lane, watched, at } = on;
        let Self { epoch, .. } = *self;
        let tells = matches!(exchange.source, Source::Rows(_));
        let _current = device.enter()?;
        // Behind what the side stream has written and told.
        lane.join(caller)?;
        if tells {
            lane.fork(caller)?;
            on.stands(epoch, Step::Alone)?;
        }
        // SAFETY: the caller promised the rows.
        let rows = unsafe { rows_of(device, caller, &at, exchange) }?;
        let mut seen = StepsSeen::default();
        for group in groups(exchange.rounds, exchange.sending.peers()) {
            watched.link.group(Way::Alone, caller, |messages| {
                group.iter().try_for_each(|round| {
                    if tells && seen.is_first(round.step) {
                        on.tell(messages, round)?;
                    }
                    let Ends { chunk, to, place, from, bytes } = Ends::of(&at, exchange, round, rows, epoch);
                    // SAFETY: all of it is in the workspace and the outbox, or the caller's rows.
                    unsafe {
                        messages.send(chunk, bytes, to)?;
                        messages.receive(place, bytes, from)
                    }
                })
            })?;
        }
        if let Source::Rows(push) = &exchange.source
            && !push.transfers.is_empty()
        {
            let addresses = Addresses { data: &own.data, pads: &own.pads, word: at.control + control::EPOCH, size: &at.size };
            let kept = push.transfers.iter().filter(|transfer| transfer.dest == at.rank.get());
            // SAFETY: checked and forked, as above; the word is the epoch once the call before has
            // ended.
            unsafe { by_copy_engine(device, lane, push, kept, addresses, epoch) }?;
            lane.join(caller)?;
        }
        // Behind the messages.
        lane.fork(caller)?;
        Ok(on.stands(epoch, Step::Ended)?)
    }
}
