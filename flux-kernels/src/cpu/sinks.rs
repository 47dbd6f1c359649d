//! What becomes of an item's accumulators.
//!
//! Invariant: whatever is added is added in one order, parts in that of `k` and partial tiles in
//! that of their slots, so the bits do not depend on who came first.

use super::call::{Call, Scratch, stride};
use crate::element::Element;
use flux_core::Rank;
use flux_core::layout;
use flux_core::program::{WorkItem, sink};

impl<T: Element> Call<'_, T> {
    /// Puts the item's result where others, or the caller, read it. What it adds to it is there.
    pub(super) fn sink(&self, item: &WorkItem, scratch: &mut Scratch<T>) {
        self.add_parts(item, &mut scratch.acc);
        match item.sink {
            sink::SEND => {
                self.reduce(item, scratch);
                self.send(item, &scratch.acc);
            }
            sink::PARTIAL => self.lend(item, &scratch.acc),
            sink::SCATTER => self.scatter(item, &scratch.acc),
            sink::REDUCE_ROWS => self.fold(item, scratch),
            sink::REDUCE => {
                self.reduce(item, scratch);
                self.store(item, &mut scratch.acc);
            }
            _ => self.store(item, &mut scratch.acc),
        }
    }

    /// Leaves the accumulators in their part slot; rows lie the tile's `n` apart.
    fn lend(&self, item: &WorkItem, acc: &[f32]) {
        for (i, from) in self.rows(item, acc).enumerate() {
            let first = self.part_row(item.part, i, item.cols);
            // SAFETY: `part_row` has checked that the row lies inside the own data region. This
            // item alone writes the part slot, and its one reader awaits the signal that this item
            // raises later; the reader of the call before the last was done before that call was
            // closed.
            unsafe { std::slice::from_raw_parts_mut(first, from.len()) }.copy_from_slice(from);
        }
    }

    /// Adds the parts that other items have left of the tile, in the order of `k`.
    fn add_parts(&self, item: &WorkItem, acc: &mut [f32]) {
        for part in (0..item.parts).map(|i| item.part + i) {
            for (i, acc) in acc.chunks_exact_mut(stride(self.program)).take(item.rows as usize).enumerate() {
                let first: *const f32 = self.part_row(part, i, item.cols);
                // SAFETY: as for a slot: inside the own data region, published before the signals
                // just awaited, and not written again before this call is closed.
                let lent = unsafe { std::slice::from_raw_parts(first, item.cols as usize) };
                for (sum, add) in acc.iter_mut().zip(lent) {
                    *sum += add;
                }
            }
        }
    }

    /// Rounds the tile into its slot at the owner; rows lie the tile's `n` apart.
    fn send(&self, item: &WorkItem, acc: &[f32]) {
        for (i, from) in self.rows(item, acc).enumerate() {
            let first = self.slot_row(Rank::new(item.dest), item.slot, i, item.cols);
            // SAFETY: `slot_row` has checked that the row lies inside the owner's data region. This
            // rank alone writes the slot, and its owner reads it only after the signal that this
            // item's chunk raises later; it has read the slot's last content, in a call that it has
            // ended.
            let to = unsafe { std::slice::from_raw_parts_mut(first, from.len()) };
            T::narrow(from, to);
        }
    }

    /// Adds the partial tiles of others, in the order of their slots.
    fn reduce(&self, item: &WorkItem, scratch: &mut Scratch<T>) {
        let (cols, stride) = (item.cols as usize, stride(self.program));
        let partial = &mut scratch.partial[..cols];
        for source in 0..item.partials {
            let slot = item.partial_slot + source * self.program.slots_per_source;
            for (i, acc) in scratch.acc.chunks_exact_mut(stride).take(item.rows as usize).enumerate() {
                let first: *const T = self.slot_row(self.program.rank, slot, i, item.cols);
                // SAFETY: as for the gather buffer: inside the own data region, published before
                // the signals just awaited, and not written again before this call has ended.
                let sent = unsafe { std::slice::from_raw_parts(first, cols) };
                add(sent, partial, acc);
            }
        }
    }

    /// Rounds each row of the tile into this rank's place at the rank that owns it.
    fn scatter(&self, item: &WorkItem, acc: &[f32]) {
        let m_shard = self.program.problem.m_shard();
        for (row, from) in (item.row..).zip(self.rows(item, acc)) {
            let first = self.scattered_row(Rank::new(row / m_shard), self.program.rank, (row % m_shard, item.col, item.cols));
            // SAFETY: `scattered_row` has checked that these columns lie inside the owner's data
            // region. No other item scatters them, and the owner reads them only after the signal
            // that this item raises later; it has read their last content, in a call that it has
            // ended.
            let to = unsafe { std::slice::from_raw_parts_mut(first, from.len()) };
            T::narrow(from, to);
        }
    }

    /// Adds what all ranks have scattered, row by row and in rank order, and rounds the sums into
    /// `y`.
    fn fold(&self, item: &WorkItem, scratch: &mut Scratch<T>) {
        let cols = item.cols as usize;
        let (sum, partial) = (&mut scratch.acc[..cols], &mut scratch.partial[..cols]);
        for i in 0..item.rows {
            sum.fill(0.0);
            for source in 0..item.partials {
                let first: *const T = self.scattered_row(self.program.rank, Rank::new(source), (item.row + i, item.col, item.cols));
                // SAFETY: as for a slot.
                let sent = unsafe { std::slice::from_raw_parts(first, cols) };
                add(sent, partial, sum);
            }
            self.store_row(item, i, sum);
        }
    }

    /// Finishes the tile's sums and rounds them into `y`.
    fn store(&self, item: &WorkItem, acc: &mut [f32]) {
        for (i, row) in (0..item.rows).zip(acc.chunks_exact_mut(stride(self.program))) {
            self.store_row(item, i, &mut row[..item.cols as usize]);
        }
    }

    /// Finishes the sums of row `i` of an item and rounds them into `y`.
    fn store_row(&self, item: &WorkItem, i: u32, from: &mut [f32]) {
        self.epilogue.apply(item.col as usize, from);
        let row = (item.out_outer * self.program.problem.m_shard() + item.row + i) as usize;
        let offset = row * self.y.stride + item.col as usize;
        // SAFETY: the operand holds all rows of the problem at this stride (`fits`), and the item's
        // rows and columns are among them (`check`). No other item stores these elements.
        let to = unsafe { std::slice::from_raw_parts_mut(self.y.first.add(offset), from.len()) };
        T::narrow(from, to);
    }

    /// The rows of an item's accumulators.
    fn rows<'r>(&self, item: &WorkItem, acc: &'r [f32]) -> impl Iterator<Item = &'r [f32]> {
        let cols = item.cols as usize;
        acc.chunks_exact(stride(self.program)).take(item.rows as usize).map(move |row| &row[..cols])
    }

    /// Row `row` of a slot at `owner`, of which `cols` elements are about to be used.
    fn slot_row(&self, owner: Rank, slot: u32, row: usize, cols: u32) -> *mut T {
        let tile = self.program.tile;
        let bytes = size_of::<T>() as u64;
        let offset = u64::from(slot) * layout::slot_bytes(&self.program.problem, tile) + row as u64 * u64::from(tile.n) * bytes;
        self.memory.half(owner, self.protocol.half(), offset, u64::from(cols) * bytes)
    }

    /// Row `row` of an own part slot, of which `cols` elements are about to be used.
    fn part_row(&self, part: u32, row: usize, cols: u32) -> *mut f32 {
        let tile = self.program.tile;
        let offset = self.program.split_k_offset() + u64::from(part) * layout::part_bytes(tile) + row as u64 * u64::from(tile.n) * 4;
        self.memory.half(self.program.rank, self.protocol.half(), offset, u64::from(cols) * 4)
    }

    /// At `owner`, what `source` scatters there of one of its rows: `cols` columns from `col`,
    /// which are about to be used.
    fn scattered_row(&self, owner: Rank, source: Rank, (row, col, cols): (u32, u32, u32)) -> *mut T {
        let problem = &self.program.problem;
        let bytes = size_of::<T>() as u64;
        let in_place = (u64::from(row) * u64::from(problem.n_local()) + u64::from(col)) * bytes;
        let offset = u64::from(source.get()) * layout::scatter_place_bytes(problem) + in_place;
        self.memory.half(owner, self.protocol.half(), offset, u64::from(cols) * bytes)
    }
}

/// Adds `from` to `sum`, by way of `wide`.
fn add<T: Element>(from: &[T], wide: &mut [f32], sum: &mut [f32]) {
    T::widen(from, wide);
    for (sum, add) in sum.iter_mut().zip(wide) {
        *sum += *add;
    }
}
