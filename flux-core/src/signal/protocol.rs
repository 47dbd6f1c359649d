//! One worker's part in one call.
//!
//! Invariant: when call `e + 1` begins on a rank, every peer has begun call `e`. So each has ended
//! call `e - 1`, the last reader of the half that call `e + 1` uses, and may be written to at once.
//!
//! It holds because each result of a call needs data of every peer. A peer publishes it after it
//! has begun the call, and the last worker to leave has seen all of it.

use super::fault::poison;
use super::{Control, Epoch, Poisoned, Word, Words};
use crate::layout::{FaultRecord, fault};
use crate::program::{NONE, WorkItem};
use crate::{Rank, WorldSize};
use std::ops::ControlFlow;

/// A worker's side of the call in progress, on `rank`.
#[derive(Debug)]
pub struct Protocol<'w, S> {
    words: &'w S,
    rank: Rank,
    epoch: Epoch,
    op: Option<Op>,
}

/// The op of a call, and its world.
#[derive(Clone, Copy, Debug)]
struct Op {
    number: u32,
    world: WorldSize,
}

impl<S> Clone for Protocol<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<S> Copy for Protocol<'_, S> {}

/// How a worker left a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use]
pub enum Left {
    /// Other workers are still in the call.
    Early,
    /// It was the last worker and has closed the call.
    Closed,
}

/// The awaited word, for the fault record.
#[derive(Clone, Copy)]
struct Awaited {
    wait: u32,
    peer: Rank,
    signal: u32,
}

impl<'w, S: Words> Protocol<'w, S> {
    /// Joins the call in progress, or the next one between calls.
    ///
    /// A worker opens before it leaves the call; a mover, before all workers of its rank can have
    /// left.
    pub fn open(words: &'w S, rank: Rank) -> Self {
        let epoch = Epoch::new(words.control(Control::Epoch).load_acquire());
        Self { words, rank, epoch, op: None }
    }

    /// The same call with its op's `number`, which ranks compare; 0 compares nothing. If the
    /// numbers differ, the call fails on all ranks.
    ///
    /// Signals alone do not detect this: ranks in different ops may raise all signals that the
    /// others await.
    #[must_use]
    pub fn of(self, number: u32, world: WorldSize) -> Self {
        Self { op: (number != 0).then_some(Op { number, world }), ..self }
    }

    /// Publishes the op of this call on the pads of all peers. One worker does so before it leaves.
    pub fn announce(&self) {
        for (op, peer) in self.peers() {
            let [call, number] = self.words.calling(peer, self.rank, self.half());
            number.store_release(op.number);
            call.store_release(self.epoch.get());
        }
    }

    fn peers(&self) -> impl Iterator<Item = (Op, Rank)> + use<S> {
        let rank = self.rank;
        self.op.into_iter().flat_map(move |op| {
            op.world.ranks().filter(move |&peer| peer != rank).map(move |peer| (op, peer))
        })
    }

    /// The number of the call.
    pub const fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The half of every rank's data region that the call uses, 0 or 1.
    pub const fn half(&self) -> usize {
        self.epoch.half()
    }

    /// Whether a wait of this rank has failed.
    pub fn poisoned(&self) -> bool {
        self.words.control(Control::Poison).load_acquire() != 0
    }

    /// Publishes the data behind `signal` of `owner`'s pad. This thread wrote the data, or one that
    /// it joined or acquired from.
    pub fn publish(&self, owner: Rank, signal: u32) {
        self.words.signal(owner, signal, self.half()).store_release(self.epoch.get());
    }

    /// Waits until `peer` has published `signal` of the own pad for this call; then its data may be
    /// read.
    ///
    /// Between looks at the word, `pause` is called with the number of looks so far, from 1. It
    /// delays the thread, and breaks when the deadline has passed. Each look also checks the abort
    /// word and the poison.
    ///
    /// # Errors
    /// [`Poisoned`] when the deadline has passed, the abort word is set, or another wait of this
    /// rank has failed. The worker then must not read the data or write for peers.
    pub fn wait(
        &self,
        signal: u32,
        peer: Rank,
        pause: impl FnMut(u64) -> ControlFlow<()>,
    ) -> Result<(), Poisoned> {
        let awaited = Awaited { wait: fault::SIGNAL, peer, signal };
        self.await_epoch(self.words.signal(self.rank, signal, self.half()), awaited, pause)
    }

    /// Completes `item`, whose result is stored: its chunk's last item raises the signal on the
    /// pads of `owners`, the
    /// [`TileProgram::signalled_ranks`](crate::program::TileProgram::signalled_ranks).
    ///
    /// # Errors
    /// [`Poisoned`] when a wait of this rank has failed; nothing is raised then.
    pub fn complete(
        &self,
        item: &WorkItem,
        owners: impl IntoIterator<Item = Rank>,
    ) -> Result<(), Poisoned> {
        if item.raise == NONE {
            return Ok(());
        }
        if self.poisoned() {
            return Err(Poisoned);
        }
        if item.counter == NONE || self.count(item.counter, item.raise_after) {
            owners.into_iter().for_each(|owner| self.publish(owner, item.raise));
        }
        Ok(())
    }

    /// Counts a finished item of a chunk of `items`; whether it was the last. The last one resets
    /// the counter and has acquired the writes of the others, so its publication covers them.
    fn count(&self, counter: u32, items: u32) -> bool {
        let word = self.words.counter(counter);
        let last = word.increment().wrapping_add(1) == items;
        if last {
            // The ticket and the epoch release this store to the next call's workers.
            word.store_release(0);
        }
        last
    }

    /// Publishes, for a mover, that it has read the caller's `x` of this call.
    pub fn pushed(&self) {
        self.words.control(Control::Pushed).store_release(self.epoch.get());
    }

    /// Leaves the call after the worker's last read of the half. `workers` is the number of this
    /// rank's workers.
    ///
    /// The last worker closes the call: it awaits the own mover with `await_pushed`, compares the
    /// peers' ops if they are announced, and advances the epoch.
    ///
    /// Every worker leaves once, unless a wait of it has failed. `pause` as for
    /// [`wait`](Self::wait).
    ///
    /// # Errors
    /// [`Poisoned`], as for [`wait`](Self::wait); the epoch then stays.
    pub fn leave(
        self,
        workers: u32,
        await_pushed: bool,
        mut pause: impl FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Left, Poisoned> {
        let ticket = self.words.control(Control::Ticket);
        if ticket.increment().wrapping_add(1) != workers {
            return Ok(Left::Early);
        }
        ticket.store_release(0);
        if self.poisoned() {
            return Err(Poisoned);
        }
        if await_pushed {
            let awaited = Awaited { wait: fault::PUSHED, peer: self.rank, signal: 0 };
            self.await_epoch(self.words.control(Control::Pushed), awaited, &mut pause)?;
        }
        self.peers().try_for_each(|(op, peer)| self.same_op(op, peer, &mut pause))?;
        // Releases all workers' reads and waits, acquired through the ticket, to the next call and
        // to the peers that it publishes to.
        self.words.control(Control::Epoch).store_release(self.epoch.next().get());
        Ok(Left::Closed)
    }

    /// The peer's op, if the peer is in this call.
    fn op_of(&self, peer: Rank) -> Option<u32> {
        let [call, number] = self.words.calling(self.rank, peer, self.half());
        // On an unwritten pad both are 0, which may be the call's number.
        let says = (call.load_acquire(), number.load_acquire());
        (says.0 == self.epoch.get() && says.1 != 0).then_some(says.1)
    }

    /// Waits until the peer has announced the same op as this call's.
    fn same_op(
        &self,
        op: Op,
        peer: Rank,
        pause: impl FnMut(u64) -> ControlFlow<()>,
    ) -> Result<(), Poisoned> {
        let look = || match self.op_of(peer) {
            Some(other) if other == op.number => Ok(()),
            _ => Err(self.words.calling(self.rank, peer, self.half())[0].load_acquire()),
        };
        self.poll(look, Awaited { wait: fault::CALL, peer, signal: 0 }, pause)
    }

    fn await_epoch(
        &self,
        word: &S::Word,
        awaited: Awaited,
        pause: impl FnMut(u64) -> ControlFlow<()>,
    ) -> Result<(), Poisoned> {
        let look = || {
            let seen = word.load_acquire();
            if seen == self.epoch.get() { Ok(()) } else { Err(seen) }
        };
        self.poll(look, awaited, pause)
    }

    /// Waits until `look` succeeds; its error is the value seen instead.
    fn poll(
        &self,
        look: impl Fn() -> Result<(), u32>,
        awaited: Awaited,
        mut pause: impl FnMut(u64) -> ControlFlow<()>,
    ) -> Result<(), Poisoned> {
        let mut looks = 0;
        loop {
            let Err(seen) = look() else { return Ok(()) };
            if self.poisoned() {
                return Err(Poisoned);
            }
            // The awaited signal may belong to another op.
            let other = self
                .op
                .filter(|_| awaited.peer != self.rank)
                .and_then(|op| Some((op, self.op_of(awaited.peer)?)));
            if let Some((op, other)) = other.filter(|(op, other)| op.number != *other) {
                return Err(self.disagree(op, awaited, other));
            }
            let abort = self.words.abort().load_acquire();
            looks += 1;
            if abort != 0 {
                return Err(self.fail(awaited, seen, abort));
            }
            if pause(looks).is_break() {
                // A process that was stopped may find both its deadline passed and its signal
                // raised.
                return look().map_err(|seen| self.fail(awaited, seen, 0));
            }
        }
    }

    fn fail(&self, awaited: Awaited, seen: u32, abort: u32) -> Poisoned {
        let code = if abort == 0 { fault::TIMEOUT } else { fault::ABORTED };
        poison(
            self.words,
            FaultRecord { code, expected: self.epoch.get(), seen, abort, ..self.record(awaited) },
        )
    }

    fn disagree(&self, op: Op, awaited: Awaited, other: u32) -> Poisoned {
        poison(
            self.words,
            FaultRecord {
                code: fault::DISAGREED,
                expected: op.number,
                seen: other,
                ..self.record(awaited)
            },
        )
    }

    fn record(&self, awaited: Awaited) -> FaultRecord {
        let Awaited { wait, peer, signal } = awaited;
        FaultRecord {
            wait,
            rank: self.rank.get(),
            peer: peer.get(),
            signal,
            epoch: self.epoch.get(),
            ..FaultRecord::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{FAULT_BYTES, WorkspaceSize, control, pad_bytes};
    use crate::signal::{SharedMemory, Words, initialise, read_fault};

    fn address(block: &mut Vec<u64>) -> u64 {
        block.as_mut_ptr().expose_provenance() as u64
    }

    /// Runs `body` with the words of rank 0 of two.
    fn with_words(body: impl FnOnce(&SharedMemory, Protocol<'_, SharedMemory>)) {
        const SIZE: WorkspaceSize = WorkspaceSize { half_bytes: 0, signals: 1, counters: 0 };
        let block = |bytes: u64| vec![0_u64; bytes as usize / 8 + 1];
        let mut blocks = [pad_bytes(1), pad_bytes(1), control::bytes(0), FAULT_BYTES].map(block);
        let [a, b, control, fault] = blocks.each_mut().map(address);
        // SAFETY: the blocks have the sizes that `SIZE` asks for, outlive the words, and are
        // accessed through them alone.
        let words = unsafe { SharedMemory::new(vec![a, b], control, fault, SIZE) };
        initialise(&words, Rank::new(0), SIZE, Epoch::FIRST);
        body(&words, Protocol::open(&words, Rank::new(0)));
    }

    #[test]
    fn what_has_come_when_the_deadline_is_over_is_taken() {
        with_words(|words, call| {
            let stopped = |_| {
                words
                    .signal(Rank::new(0), 0, Epoch::FIRST.half())
                    .store_release(Epoch::FIRST.get());
                ControlFlow::Break(())
            };
            assert_eq!(call.wait(0, Rank::new(1), stopped), Ok(()));
            assert!(!call.poisoned());
        });
    }

    #[test]
    fn what_has_not_come_when_the_deadline_is_over_fails_the_call() {
        with_words(|words, call| {
            assert_eq!(call.wait(0, Rank::new(1), |_| ControlFlow::Break(())), Err(Poisoned));
            let record = read_fault(words).expect("a record");
            assert_eq!(
                (record.code, record.peer, record.expected, record.seen),
                (fault::TIMEOUT, 1, 1, 0)
            );
        });
    }

    /// Rank 2 raises signal 0 of rank 0 in the first call, rank 1 in the second, as in ops of
    /// different shapes. Rank 2 has sent to rank 1 but not yet to rank 0, so rank 1 can be a call
    /// ahead.
    #[test]
    fn a_rank_that_is_a_call_ahead_is_not_taken_for_the_one_that_is_awaited() {
        const SIZE: WorkspaceSize = WorkspaceSize { half_bytes: 0, signals: 1, counters: 0 };
        let block = |bytes: u64| vec![0_u64; bytes as usize / 8 + 1];
        let mut pads = [pad_bytes(1); 3].map(block);
        let mut private =
            [control::bytes(0), FAULT_BYTES, control::bytes(0), FAULT_BYTES].map(block);
        let pads = pads.each_mut().map(address);
        let [control_0, fault_0, control_1, fault_1] = private.each_mut().map(address);
        // SAFETY: the blocks have the sizes that `SIZE` asks for, outlive the words, and are
        // accessed through them alone.
        let ranks = unsafe {
            [
                SharedMemory::new(pads, control_0, fault_0, SIZE),
                SharedMemory::new(pads, control_1, fault_1, SIZE),
            ]
        };
        for (rank, words) in (0..).map(Rank::new).zip(&ranks) {
            initialise(words, rank, SIZE, Epoch::FIRST);
        }
        let slow = Protocol::open(&ranks[0], Rank::new(0));
        let fast = Protocol::open(&ranks[1], Rank::new(1));
        assert_eq!(
            fast.leave(1, false, |_| ControlFlow::Break(())),
            Ok(Left::Closed),
            "the rank has heard from both"
        );
        let ahead = Protocol::open(&ranks[1], Rank::new(1));
        assert_eq!(ahead.epoch(), Epoch::FIRST.next());
        ahead.publish(Rank::new(0), 0);
        assert_eq!(
            slow.wait(0, Rank::new(2), |_| ControlFlow::Break(())),
            Err(Poisoned),
            "rank 2 has raised nothing"
        );
    }
}
