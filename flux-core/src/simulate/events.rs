//! One call, event by event.
//!
//! Invariant: an event changes state of its own moment only, and plans others for then or later.

use super::clock::Clock;
use super::links::{Departure, Effect, LinkQueues, Message};
use super::phases::Phase;
use super::result::{RankTotals, SimulateError};
use super::state::{RankState, rows_of};
use super::worker::Worker;
use crate::Rank;
use crate::layout::slot_bytes;
use crate::machine::Machine;
use crate::plan::Mover;
use crate::program::{NONE, Sink, TileProgram, Transfer};
use crate::timeline::{Phase as Spent, Track};
use std::time::Duration;

#[derive(Debug)]
enum Event {
    /// A worker has finished a phase, or its awaited signal is raised.
    WorkerReady(Rank, usize),
    /// The link out of a rank is free.
    LinkFree(Rank),
    /// A message has arrived at its reader.
    Arrived(Message),
    /// Workers of a rank see a signal.
    Raised(Rank, u32),
    /// A rank's mover begins a transfer.
    TransferBegins(Rank, usize),
}

#[derive(Debug)]
pub(super) struct Simulation<'a> {
    machine: &'a Machine,
    clock: Clock<Event>,
    links: LinkQueues,
    ranks: Vec<RankState<'a>>,
}

impl<'a> Simulation<'a> {
    pub(super) fn new(programs: &'a [TileProgram], machine: &'a Machine, mover: Mover) -> Self {
        let ranks = programs.iter().map(|program| RankState::new(program, machine, mover));
        Self {
            machine,
            clock: Clock::new(),
            links: LinkQueues::new(programs.len(), machine),
            ranks: ranks.collect(),
        }
    }

    /// Runs until no event is left.
    pub(super) fn run(mut self) -> Result<Vec<(RankTotals, Vec<Track>)>, SimulateError> {
        for (rank, state) in (0..).map(Rank::new).zip(&self.ranks) {
            for worker in 0..state.workers.len() {
                self.clock.at(
                    Duration::from_nanos(self.machine.begin_ns),
                    Event::WorkerReady(rank, worker),
                );
            }
            // Over peer memory a copy engine begins the next transfer when the last has arrived.
            if self.machine.host_staged || state.copied {
                let begun = if self.machine.host_staged {
                    state.program.transfers.len()
                } else {
                    state.program.transfers.len().min(1)
                };
                for index in 0..begun {
                    self.clock.at(
                        Duration::from_nanos(self.machine.copy_begins_ns),
                        Event::TransferBegins(rank, index),
                    );
                }
            } else {
                for (at, index) in push_times(state.program, self.machine).into_iter().zip(0..) {
                    self.clock.at(at, Event::TransferBegins(rank, index));
                }
            }
        }
        while let Some(event) = self.clock.next() {
            match event {
                Event::WorkerReady(rank, worker) => self.advance(rank, worker),
                Event::LinkFree(rank) => {
                    if let Some(departure) = self.links.free(rank, self.clock.now()) {
                        self.depart(departure);
                    }
                }
                Event::Arrived(message) => self.arrive(&message),
                Event::Raised(rank, signal) => {
                    for worker in self.ranks[rank.index()].pad.raise(signal) {
                        self.advance(rank, worker);
                    }
                }
                Event::TransferBegins(rank, index) => self.transfer(rank, index),
            }
        }
        self.all_done()?;
        Ok(self.ranks.into_iter().map(|state| (state.summed(), state.tracks)).collect())
    }

    fn all_done(&self) -> Result<(), SimulateError> {
        for (rank, state) in (0..).map(Rank::new).zip(&self.ranks) {
            if let Some(worker) = state.pad.first_waiting(&state.workers)
                && let Some(what) = worker.awaited()
            {
                return Err(SimulateError::Stuck {
                    rank,
                    item: worker.item(),
                    signal: what.signal,
                    peer: Rank::new(what.peer),
                });
            }
        }
        Ok(())
    }

    /// A worker advances until a phase takes time or a signal is missing.
    fn advance(&mut self, rank: Rank, index: usize) {
        let now = self.clock.now();
        let state = &mut self.ranks[rank.index()];
        state.workers[index].resume();
        state.tracks[index].until(Spent::Wait, now);
        loop {
            let state = &mut self.ranks[rank.index()];
            let worker = &mut state.workers[index];
            let totals = &mut state.totals;
            let (spent, takes) = match worker.next_phase() {
                Some(Phase::Await(what)) => {
                    if state.pad.is_raised(what.signal) {
                        continue;
                    }
                    worker.wait(what);
                    state.pad.wait(what.signal, index);
                    return;
                }
                Some(Phase::Multiply(time)) => {
                    totals.multiplied = totals.multiplied.max(now.saturating_add(time));
                    (Spent::Multiply, time)
                }
                Some(Phase::Add(time)) => (Spent::Add, time),
                Some(Phase::Finish(time)) => (Spent::Send, time),
                None => {
                    totals.done = totals.done.max(now);
                    let item = worker.item();
                    let next = item + state.workers.len();
                    let of_next = (next < state.program.items.len())
                        .then(|| state.phases(next, self.machine));
                    self.finished(rank, item);
                    let Some(phases) = of_next else { return };
                    self.ranks[rank.index()].workers[index] = Worker::new(next, phases);
                    continue;
                }
            };
            state.tracks[index].until(spent, now.saturating_add(takes));
            self.clock.after(takes, Event::WorkerReady(rank, index));
            return;
        }
    }

    /// Sends the result of a finished item.
    fn finished(&mut self, rank: Rank, index: usize) {
        let program = self.ranks[rank.index()].program;
        let item = &program.items[index];
        match item.sink {
            Sink::Partial => self.clock.after(Duration::ZERO, Event::Raised(rank, item.raise)),
            Sink::Send => {
                let (to, bytes) =
                    (Rank::new(item.dest), slot_bytes(&program.problem, program.tile));
                if !self.machine.host_staged || item.counter == NONE {
                    self.send(Message {
                        from: rank,
                        to,
                        bytes,
                        again: false,
                        effect: Effect::Tile(index),
                    });
                } else if self.ranks[rank.index()].completes(item, to) {
                    // A copy engine takes whole chunks.
                    let bytes = bytes * u64::from(item.raise_after);
                    self.send(Message {
                        from: rank,
                        to,
                        bytes,
                        again: false,
                        effect: Effect::Chunk(index),
                    });
                }
            }
            Sink::Scatter => {
                for owner in program.signalled_ranks(item) {
                    let rows = rows_of(program, item, owner) * u64::from(item.cols);
                    let bytes = rows * program.problem.numerics().partial_bytes() as u64;
                    self.send(Message {
                        from: rank,
                        to: owner,
                        bytes,
                        again: false,
                        effect: Effect::Tile(index),
                    });
                }
            }
            Sink::Reduce | Sink::ReduceRows if item.raise != NONE => self.share(rank, index),
            Sink::Store | Sink::Reduce | Sink::ReduceRows | Sink::Copy => {}
        }
    }

    /// Sends a finished result to all peers. A copy engine takes whole chunks, each of which leaves
    /// once.
    fn share(&mut self, rank: Rank, index: usize) {
        let program = self.ranks[rank.index()].program;
        let item = &program.items[index];
        let staged = self.machine.host_staged && item.counter != NONE;
        let state = &mut self.ranks[rank.index()];
        let readers: Vec<_> = program
            .signalled_ranks(item)
            .filter(|&to| !staged || state.completes(item, to))
            .collect();
        if readers.is_empty() {
            return;
        }
        let tiles = program.items.iter().enumerate().filter(|&(other, tile)| {
            other == index || staged && (tile.sink, tile.raise) == (item.sink, item.raise)
        });
        let elements: u64 =
            tiles.map(|(_, tile)| u64::from(tile.rows) * u64::from(tile.cols)).sum();
        let bytes = elements * program.problem.numerics().output.bytes() as u64;
        let effect = if staged { Effect::Chunk(index) } else { Effect::Tile(index) };
        for (number, to) in readers.into_iter().enumerate() {
            let again = self.machine.host_staged && number > 0;
            self.send(Message { from: rank, to, bytes, again, effect });
        }
    }

    /// A mover begins a transfer.
    fn transfer(&mut self, rank: Rank, index: usize) {
        let program = self.ranks[rank.index()].program;
        let transfer = &program.transfers[index];
        let bytes = u64::from(transfer.rows)
            * u64::from(transfer.cols)
            * program.problem.numerics().operand.bytes() as u64;
        let same = |other: &Transfer| {
            (other.row, other.rows, other.col, other.cols)
                == (transfer.row, transfer.rows, transfer.col, transfer.cols)
        };
        let has_left = || {
            program.transfers[..index].iter().any(|other| other.dest != rank.get() && same(other))
        };
        let again = self.machine.host_staged && has_left();
        self.send(Message {
            from: rank,
            to: Rank::new(transfer.dest),
            bytes,
            again,
            effect: Effect::Transfer(index),
        });
    }

    /// Sends a message. One to the own rank arrives at once: memory is an order faster than a link.
    fn send(&mut self, message: Message) {
        let Message { from, to, bytes, .. } = message;
        if from == to {
            self.clock.after(Duration::ZERO, Event::Arrived(message));
            return;
        }
        self.ranks[from.index()].totals.sent += bytes;
        self.ranks[to.index()].totals.received += bytes;
        if let Some(departure) = self.links.send(message, self.clock.now()) {
            self.depart(departure);
        }
    }

    /// A message has begun to leave.
    fn depart(&mut self, Departure { message, out, arrives }: Departure) {
        self.clock.at(out, Event::LinkFree(message.from));
        self.clock.at(arrives, Event::Arrived(message));
    }

    /// A message has arrived: it may complete a chunk, and a copy engine begins its next transfer.
    fn arrive(&mut self, message: &Message) {
        let now = self.clock.now();
        let state = &mut self.ranks[message.from.index()];
        state.totals.done = state.totals.done.max(now);
        let signal = match message.effect {
            Effect::Tile(index) => {
                let item = &state.program.items[index];
                (item.raise != NONE && state.completes(item, message.to)).then_some(item.raise)
            }
            Effect::Chunk(index) => Some(state.program.items[index].raise),
            Effect::Transfer(index) => {
                if state.copied
                    && !self.machine.host_staged
                    && index + 1 < state.program.transfers.len()
                {
                    self.clock.after(
                        Duration::from_nanos(self.machine.copy_ns),
                        Event::TransferBegins(message.from, index + 1),
                    );
                }
                Some(state.program.transfers[index].raise)
            }
        };
        if let Some(signal) = signal {
            let way = if message.from == message.to {
                Duration::ZERO
            } else {
                Duration::from_nanos(self.machine.signal_ns)
            };
            self.clock.after(way, Event::Raised(message.to, signal));
        }
    }
}

/// Moments at which a kernel's CTAs have stored each transfer, without its time on the link.
/// Transfers of the same rows to several ranks are stored together.
fn push_times(program: &TileProgram, machine: &Machine) -> Vec<Duration> {
    let same = |a: &Transfer, b: &Transfer| {
        (a.row, a.rows, a.col, a.cols) == (b.row, b.rows, b.col, b.cols)
    };
    let mut at = Duration::from_nanos(machine.push_begins_ns);
    let mut all = Vec::with_capacity(program.transfers.len());
    for group in program.transfers.chunk_by(same) {
        let (rows, row_bytes) = (
            u64::from(group[0].rows),
            u64::from(group[0].cols) * program.problem.numerics().operand.bytes() as u64,
        );
        let ranks =
            group.iter().filter(|transfer| transfer.dest != program.rank.get()).count() as u64;
        at = at.saturating_add(machine.push_overhead(rows, row_bytes, group.len() as u64));
        all.resize(all.len() + group.len(), at);
        at = at.saturating_add(machine.one_way_time(ranks * rows * row_bytes));
    }
    all
}
