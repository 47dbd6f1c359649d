//! One call: what each worker does with its items, and how the last act closes it.
//!
//! Invariant: payload is touched only between the signals that hand it over, and after a failure nothing is published.

use super::panel::{self, Panel};
use super::{Epilogue, HostMemory, Rows, RowsMut, pause};
use crate::Element;
use flux_core::Rank;
use flux_core::layout;
use flux_core::program::{TileProgram, WorkItem, sink, source};
use flux_core::signal::{Left, Poisoned, Protocol};
use std::marker::PhantomData;

/// One worker's buffers.
#[derive(Debug)]
pub(super) struct Scratch<T> {
    /// Operand A of the current shard.
    a: Panel,
    /// Accumulators of a tile, in rows of the tile's `n`.
    acc: Vec<f32>,
    /// One row of a partial tile.
    partial: Vec<f32>,
    element: PhantomData<T>,
}

impl<T: Element> Scratch<T> {
    pub(super) fn new(program: &TileProgram) -> Self {
        let (tile_m, tile_n) = (program.tile.m as usize, program.tile.n as usize);
        let (rows, k) = (program.problem.m_shard() as usize, program.problem.k_local() as usize);
        Self { a: Panel::new(rows, k, tile_m), acc: vec![0.0; tile_m * tile_n], partial: vec![0.0; tile_n], element: PhantomData }
    }
}

/// `y`, of which workers store disjoint tiles.
pub(super) struct Output<'a, T> {
    first: *mut T,
    stride: usize,
    lives: PhantomData<&'a mut [T]>,
}

impl<'a, T> Output<'a, T> {
    pub(super) fn new(y: RowsMut<'a, T>) -> Self {
        let RowsMut { elements, stride } = y;
        Self { first: elements.as_mut_ptr(), stride, lives: PhantomData }
    }
}

// SAFETY: it stands for a `&mut [T]` whose elements are written by one worker each: a checked program stores a tile in one item, and an item
// is one worker's.
unsafe impl<T: Send> Sync for Output<'_, T> {}

/// What the workers of a call share.
pub(super) struct Call<'a, T> {
    pub(super) program: &'a TileProgram,
    pub(super) x: Rows<'a, T>,
    /// `w` in fp32, dense.
    pub(super) weights: &'a [f32],
    pub(super) y: Output<'a, T>,
    pub(super) epilogue: Epilogue<'a, T>,
    pub(super) memory: &'a HostMemory<'a>,
    pub(super) protocol: Protocol<'a, HostMemory<'a>>,
    /// Whether a mover reads `x` in this call.
    pub(super) await_pushed: bool,
}

impl<T: Element> Call<'_, T> {
    /// Works on the items `first`, `first + step`, ... in order, then leaves the call; the last of the `step` workers to leave closes it.
    pub(super) fn work(&self, first: usize, step: usize, scratch: &mut Scratch<T>) -> Result<Left, Poisoned> {
        scratch.a.reset();
        for item in self.program.items.iter().skip(first).step_by(step) {
            if self.protocol.poisoned() {
                return Err(Poisoned);
            }
            self.multiply(item, scratch)?;
            match item.sink {
                sink::SEND => self.send(item, &scratch.acc),
                sink::REDUCE => {
                    self.reduce(item, scratch)?;
                    self.store(item, &mut scratch.acc);
                }
                _ => self.store(item, &mut scratch.acc),
            }
            self.protocol.complete(item)?;
        }
        let workers = u32::try_from(step).expect("there are fewer workers than 2^32");
        self.protocol.leave(workers, self.await_pushed, pause::until(self.memory.deadline()))
    }

    /// The tile's product into the accumulators, once its rows of A are there.
    fn multiply(&self, item: &WorkItem, scratch: &mut Scratch<T>) -> Result<(), Poisoned> {
        let (row, rows) = (item.row as usize, item.rows as usize);
        let (col, cols) = (item.col as usize, item.cols as usize);
        let problem = &self.program.problem;
        let k = problem.k_local() as usize;
        let key = (item.a_source, item.a_outer);
        let a = if item.a_source == source::GATHER {
            self.await_all(item)?;
            let place = u64::from(item.a_outer) * layout::gather_place_bytes(problem);
            let bytes = (rows * k * size_of::<T>()) as u64;
            let offset = place + (row * k * size_of::<T>()) as u64;
            let first: *const T = self.memory.half::<T>(self.program.rank, self.protocol.half(), offset, bytes);
            // SAFETY: `half` has checked that these bytes lie inside the own data region. Their writer published them before the signals just
            // awaited, and writes them again only after this call's credit, which is published after the last read.
            let gathered = unsafe { std::slice::from_raw_parts(first, rows * k) };
            scratch.a.rows(key, row, rows, |i| &gathered[i * k..][..k])
        } else {
            let outer = (item.a_outer * problem.m_shard()) as usize;
            scratch.a.rows(key, row, rows, |i| self.x.row(outer + row + i, k))
        };
        let b = &self.weights[col * k..(col + cols) * k];
        panel::multiply(rows, cols, k, a, b, &mut scratch.acc, self.program.tile.n as usize);
        Ok(())
    }

    fn await_all(&self, item: &WorkItem) -> Result<(), Poisoned> {
        self.program
            .awaits_of(item)
            .iter()
            .try_for_each(|a| self.protocol.wait(a.signal, Rank::new(a.peer), pause::until(self.memory.deadline())))
    }

    /// Rounds the tile into its slot at the owner; rows lie the tile's `n` apart.
    fn send(&self, item: &WorkItem, acc: &[f32]) {
        for (i, from) in self.rows(item, acc).enumerate() {
            let first = self.slot_row(Rank::new(item.dest), item.slot, i, item.cols);
            // SAFETY: `slot_row` has checked that the row lies inside the owner's data region. This rank alone writes the slot, and its owner
            // reads it only after the signal that this item's chunk raises later; it has read the slot's last content, by its credit.
            let to = unsafe { std::slice::from_raw_parts_mut(first, from.len()) };
            T::narrow(from, to);
        }
    }

    /// Adds the peers' partial tiles in rank order, once they are there.
    fn reduce(&self, item: &WorkItem, scratch: &mut Scratch<T>) -> Result<(), Poisoned> {
        self.await_all(item)?;
        let (cols, tile_n) = (item.cols as usize, self.program.tile.n as usize);
        let partial = &mut scratch.partial[..cols];
        for source in 0..item.partials {
            let slot = item.slot + source * self.program.slots_per_source;
            for (i, acc) in scratch.acc.chunks_exact_mut(tile_n).take(item.rows as usize).enumerate() {
                let first: *const T = self.slot_row(self.program.rank, slot, i, item.cols);
                // SAFETY: as for the gather buffer: inside the own data region, published before the signals just awaited, and not written
                // again before this call's credit.
                let sent = unsafe { std::slice::from_raw_parts(first, cols) };
                T::widen(sent, partial);
                for (sum, add) in acc.iter_mut().zip(&*partial) {
                    *sum += add;
                }
            }
        }
        Ok(())
    }

    /// Finishes the tile's sums and rounds them into `y`.
    fn store(&self, item: &WorkItem, acc: &mut [f32]) {
        if !self.epilogue.is_none() {
            for row in acc.chunks_exact_mut(self.program.tile.n as usize).take(item.rows as usize) {
                self.epilogue.apply(item.col as usize, &mut row[..item.cols as usize]);
            }
        }
        let outer = (item.out_outer * self.program.problem.m_shard() + item.row) as usize;
        for (i, from) in self.rows(item, acc).enumerate() {
            let offset = (outer + i) * self.y.stride + item.col as usize;
            // SAFETY: the operand holds all rows of the problem at this stride (`fits`), and the item's rows and columns are
            // among them (`check`). No other item stores these elements.
            let to = unsafe { std::slice::from_raw_parts_mut(self.y.first.add(offset), from.len()) };
            T::narrow(from, to);
        }
    }

    /// The rows of an item's accumulators.
    fn rows<'r>(&self, item: &WorkItem, acc: &'r [f32]) -> impl Iterator<Item = &'r [f32]> {
        let cols = item.cols as usize;
        acc.chunks_exact(self.program.tile.n as usize).take(item.rows as usize).map(move |row| &row[..cols])
    }

    /// Row `row` of a slot at `owner`, of which `cols` elements are about to be used.
    fn slot_row(&self, owner: Rank, slot: u32, row: usize, cols: u32) -> *mut T {
        let tile = self.program.tile;
        let bytes = size_of::<T>() as u64;
        let offset = u64::from(slot) * layout::slot_bytes(&self.program.problem, tile) + row as u64 * u64::from(tile.n) * bytes;
        self.memory.half(owner, self.protocol.half(), offset, u64::from(cols) * bytes)
    }
}
