//! One call, event by event.
//!
//! Invariant: what an event changes is of its own moment; whatever it causes is planned for that
//! moment or a later one.

use super::clock::Clock;
use super::links::{Left, Links, Message, Then};
use super::phases::Phase;
use super::state::{RankState, rows_of};
use super::worker::Worker;
use super::{Machine, Mover, RankTotals, SimulateError};
use crate::Rank;
use crate::layout::slot_bytes;
use crate::program::{NONE, TileProgram, Transfer, sink};
use std::time::Duration;

#[derive(Debug)]
enum Event {
    /// A worker has finished a phase, or what it waited for is there.
    Goes(Rank, usize),
    /// The link out of a rank is free.
    LinkFree(Rank),
    /// A message is at its reader.
    Come(Message),
    /// Workers of a rank see a signal.
    Raised(Rank, u32),
    /// A rank's mover begins a transfer.
    Moves(Rank, usize),
}

#[derive(Debug)]
pub(super) struct Call<'a> {
    machine: &'a Machine,
    clock: Clock<Event>,
    links: Links,
    seats: Vec<RankState<'a>>,
}

impl<'a> Call<'a> {
    pub(super) fn new(programs: &'a [TileProgram], machine: &'a Machine, mover: Mover) -> Self {
        let seats = programs.iter().map(|program| RankState::new(program, machine, mover));
        Self { machine, clock: Clock::new(), links: Links::new(programs.len(), machine), seats: seats.collect() }
    }

    /// Goes through all events.
    pub(super) fn run(mut self) -> Result<Vec<RankTotals>, SimulateError> {
        for (rank, state) in (0..).map(Rank::new).zip(&self.seats) {
            for worker in 0..state.workers.len() {
                self.clock.at(Duration::from_nanos(self.machine.begin_ns), Event::Goes(rank, worker));
            }
            // A copy engine asks for the next transfer when the last is there, but through memory
            // of the host.
            if self.machine.through_host || state.copied {
                let asked = if self.machine.through_host { state.program.transfers.len() } else { state.program.transfers.len().min(1) };
                for index in 0..asked {
                    self.clock.at(Duration::from_nanos(self.machine.copy_begins_ns), Event::Moves(rank, index));
                }
            } else {
                for (at, index) in pushed(state.program, self.machine).into_iter().zip(0..) {
                    self.clock.at(at, Event::Moves(rank, index));
                }
            }
        }
        while let Some(event) = self.clock.next() {
            match event {
                Event::Goes(rank, worker) => self.go(rank, worker),
                Event::LinkFree(rank) => {
                    if let Some(left) = self.links.free(rank, self.clock.now()) {
                        self.leave(left);
                    }
                }
                Event::Come(message) => self.come(&message),
                Event::Raised(rank, signal) => {
                    for worker in self.seats[rank.index()].pad.raise(signal) {
                        self.go(rank, worker);
                    }
                }
                Event::Moves(rank, index) => self.transfer(rank, index),
            }
        }
        self.all_done()?;
        Ok(self.seats.into_iter().map(|state| state.totals).collect())
    }

    fn all_done(&self) -> Result<(), SimulateError> {
        for (rank, state) in (0..).map(Rank::new).zip(&self.seats) {
            if let Some(worker) = state.pad.first_waiting(&state.workers)
                && let Some(what) = worker.waits_for()
            {
                return Err(SimulateError::Stuck { rank, item: worker.item(), signal: what.signal, peer: Rank::new(what.peer) });
            }
        }
        Ok(())
    }

    /// A worker goes on until something takes time.
    fn go(&mut self, rank: Rank, index: usize) {
        let now = self.clock.now();
        let state = &mut self.seats[rank.index()];
        let waited = state.workers[index].waited(now);
        state.totals.waiting = state.totals.waiting.saturating_add(waited);
        loop {
            let state = &mut self.seats[rank.index()];
            let worker = &mut state.workers[index];
            let totals = &mut state.totals;
            let takes = match worker.next_phase() {
                Some(Phase::Await(what)) => {
                    if state.pad.is_raised(what.signal) {
                        continue;
                    }
                    worker.wait(what, now);
                    state.pad.wait(what.signal, index);
                    return;
                }
                Some(Phase::Multiply(time)) => {
                    totals.multiplying = totals.multiplying.saturating_add(time);
                    totals.multiplied = totals.multiplied.max(now.saturating_add(time));
                    time
                }
                Some(Phase::Add(time)) => {
                    totals.adding = totals.adding.saturating_add(time);
                    time
                }
                Some(Phase::Finish(time)) => time,
                None => {
                    totals.done = totals.done.max(now);
                    let item = worker.item();
                    let next = item + state.workers.len();
                    let of_next = (next < state.program.items.len()).then(|| state.phases(next, self.machine));
                    self.finished(rank, item);
                    let Some(phases) = of_next else { return };
                    self.seats[rank.index()].workers[index] = Worker::new(next, phases);
                    continue;
                }
            };
            self.clock.after(takes, Event::Goes(rank, index));
            return;
        }
    }

    /// What a finished item gives to others.
    fn finished(&mut self, rank: Rank, index: usize) {
        let program = self.seats[rank.index()].program;
        let item = &program.items[index];
        match item.sink {
            sink::PARTIAL => self.clock.after(Duration::ZERO, Event::Raised(rank, item.raise)),
            sink::SEND => {
                let (to, bytes) = (Rank::new(item.dest), slot_bytes(&program.problem, program.tile));
                if !self.machine.through_host || item.counter == NONE {
                    self.send(Message { from: rank, to, bytes, again: false, then: Then::Tile(index) });
                } else if self.seats[rank.index()].completes(item, to) {
                    // A copy engine takes a chunk when it is whole.
                    let bytes = bytes * u64::from(item.raise_after);
                    self.send(Message { from: rank, to, bytes, again: false, then: Then::Chunk(index) });
                }
            }
            sink::SCATTER => {
                for owner in program.signalled_ranks(item) {
                    let rows = rows_of(program, item, owner) * u64::from(item.cols);
                    let bytes = rows * program.problem.dtype().bytes() as u64;
                    self.send(Message { from: rank, to: owner, bytes, again: false, then: Then::Tile(index) });
                }
            }
            _ => {}
        }
    }

    /// A mover begins a transfer.
    fn transfer(&mut self, rank: Rank, index: usize) {
        let program = self.seats[rank.index()].program;
        let transfer = &program.transfers[index];
        let bytes = u64::from(transfer.rows) * u64::from(transfer.cols) * program.problem.dtype().bytes() as u64;
        let same =
            |other: &Transfer| (other.row, other.rows, other.col, other.cols) == (transfer.row, transfer.rows, transfer.col, transfer.cols);
        let left = || program.transfers[..index].iter().any(|other| other.dest != rank.get() && same(other));
        let again = self.machine.through_host && left();
        self.send(Message { from: rank, to: Rank::new(transfer.dest), bytes, again, then: Then::Transfer(index) });
    }

    /// Bytes that a rank gives to one. What is for the own rank is there at once: memory is an
    /// order faster than a link.
    fn send(&mut self, message: Message) {
        let Message { from, to, bytes, .. } = message;
        if from == to {
            self.clock.after(Duration::ZERO, Event::Come(message));
            return;
        }
        self.seats[from.index()].totals.sent += bytes;
        self.seats[to.index()].totals.received += bytes;
        if let Some(left) = self.links.send(message, self.clock.now()) {
            self.leave(left);
        }
    }

    /// A message has begun to leave.
    fn leave(&mut self, Left { message, out, come }: Left) {
        self.clock.at(out, Event::LinkFree(message.from));
        self.clock.at(come, Event::Come(message));
    }

    /// A message is there: it may complete what a signal announces, and a copy engine goes on.
    fn come(&mut self, message: &Message) {
        let now = self.clock.now();
        let state = &mut self.seats[message.from.index()];
        state.totals.done = state.totals.done.max(now);
        let signal = match message.then {
            Then::Tile(index) => {
                let item = &state.program.items[index];
                (item.raise != NONE && state.completes(item, message.to)).then_some(item.raise)
            }
            Then::Chunk(index) => Some(state.program.items[index].raise),
            Then::Transfer(index) => {
                if state.copied && !self.machine.through_host && index + 1 < state.program.transfers.len() {
                    self.clock.after(Duration::from_nanos(self.machine.copy_ns), Event::Moves(message.from, index + 1));
                }
                Some(state.program.transfers[index].raise)
            }
        };
        if let Some(signal) = signal {
            let way = if message.from == message.to { Duration::ZERO } else { Duration::from_nanos(self.machine.signal_ns) };
            self.clock.after(way, Event::Raised(message.to, signal));
        }
    }
}

/// When a kernel's CTAs have stored each transfer, but for its way: those of the same rows to
/// several ranks together, one such group after another.
fn pushed(program: &TileProgram, machine: &Machine) -> Vec<Duration> {
    let same = |a: &Transfer, b: &Transfer| (a.row, a.rows, a.col, a.cols) == (b.row, b.rows, b.col, b.cols);
    let mut at = Duration::from_nanos(machine.push_begins_ns);
    let mut all = Vec::with_capacity(program.transfers.len());
    for group in program.transfers.chunk_by(same) {
        let (rows, row_bytes) = (u64::from(group[0].rows), u64::from(group[0].cols) * program.problem.dtype().bytes() as u64);
        let ranks = group.iter().filter(|transfer| transfer.dest != program.rank.get()).count() as u64;
        at = at.saturating_add(machine.pushing((rows, row_bytes), group.len() as u64));
        all.resize(all.len() + group.len(), at);
        at = at.saturating_add(machine.carrying(ranks * rows * row_bytes));
    }
    all
}
