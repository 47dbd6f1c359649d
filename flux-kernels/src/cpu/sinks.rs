//! The sinks of an item's accumulators.
//!
//! Invariant: split-K partials are added in the order of `k` and partial tiles in slot order, so
//! the bits do not depend on arrival.

use super::buffers::{Scratch, stride};
use super::call::Call;
use crate::element::Element;
use crate::weights::GateLayout;
use flux_core::layout;
use flux_core::program::{NONE, Sink, WorkItem};
use flux_core::{Partials, Rank};

impl<X: Element, Y: Element> Call<'_, X, Y> {
    /// Adds what has arrived to the item's sum. Rows are reduced, and results copied, into `y`.
    pub(super) fn add(&self, item: &WorkItem, scratch: &mut Scratch) {
        self.add_split_k_partials(item, &mut scratch.acc);
        match item.sink {
            Sink::Send | Sink::Reduce => self.reduce(item, scratch),
            Sink::ReduceRows => self.reduce_rows(item, scratch),
            Sink::Copy => self.copy(item),
            Sink::Partial | Sink::Scatter | Sink::Store => {}
        }
    }

    /// Writes the item's sum where its sink says.
    pub(super) fn write(&self, item: &WorkItem, scratch: &mut Scratch) {
        match item.sink {
            Sink::Send => self.send(item, &scratch.acc),
            Sink::Partial => self.write_partial(item, &scratch.acc),
            Sink::Scatter => self.scatter(item, &scratch.acc),
            Sink::Reduce | Sink::Store => self.store(item, &mut scratch.acc),
            Sink::ReduceRows | Sink::Copy => {}
        }
    }

    /// Writes a split-K partial into its workspace slot; rows lie the tile's `n` apart.
    fn write_partial(&self, item: &WorkItem, acc: &[f32]) {
        for (i, from) in self.rows(item, acc).enumerate() {
            let first = self.split_k_row(item.part, i, item.cols);
            // SAFETY: `split_k_row` has checked that the row lies inside the own data region. Only
            // this item writes the slot, and its reader awaits the signal that the item raises
            // later. Its reader in the call before the last was done when that call closed.
            unsafe { std::slice::from_raw_parts_mut(first, from.len()) }.copy_from_slice(from);
        }
    }

    /// Adds the tile's split-K partials, in the order of `k`.
    fn add_split_k_partials(&self, item: &WorkItem, acc: &mut [f32]) {
        for part in (0..item.parts).map(|i| item.part + i) {
            for (i, acc) in
                acc.chunks_exact_mut(stride(self.program)).take(item.rows as usize).enumerate()
            {
                let first: *const f32 = self.split_k_row(part, i, item.cols);
                // SAFETY: as for a slot: inside the own data region, published before the awaited
                // signals, and not written again before this call closes.
                let partial = unsafe { std::slice::from_raw_parts(first, item.cols as usize) };
                for (sum, add) in acc.iter_mut().zip(partial) {
                    *sum += add;
                }
            }
        }
    }

    /// Writes the tile into its slot at the owner, in the type of partial sums; rows lie the tile's
    /// `n` apart.
    fn send(&self, item: &WorkItem, acc: &[f32]) {
        for (i, from) in self.rows(item, acc).enumerate() {
            let first = self.slot_row(Rank::new(item.dest), item.slot, i, item.cols);
            // SAFETY: `slot_row` has checked that the row lies inside the owner's data region. Only
            // this rank writes the slot. The owner reads it after the signal that this item's chunk
            // raises later, and has ended the call that read its last content.
            unsafe { self.write_sent(from, first) };
        }
    }

    /// Adds peers' partial tiles, in slot order.
    fn reduce(&self, item: &WorkItem, scratch: &mut Scratch) {
        let (cols, stride) = (item.cols as usize, stride(self.program));
        let partial = &mut scratch.partial[..cols];
        for source in 0..item.partials {
            let slot = item.partial_slot + source * self.program.slots_per_source;
            for (i, acc) in
                scratch.acc.chunks_exact_mut(stride).take(item.rows as usize).enumerate()
            {
                let first = self.slot_row(self.program.rank, slot, i, item.cols);
                // SAFETY: as for the gather buffer: inside the own data region, published before
                // the awaited signals, and not written again before this call ends.
                unsafe { self.add_sent(first, partial, &mut acc[..cols]) };
            }
        }
    }

    /// Writes each row of the tile into this rank's source slot at the row's owners, in the type of
    /// partial sums.
    fn scatter(&self, item: &WorkItem, acc: &[f32]) {
        let problem = &self.program.problem;
        for (owner, owned) in
            problem.world().ranks().map(|owner| (owner, self.program.reduced_rows(owner)))
        {
            for (row, from) in
                (item.row..).zip(self.rows(item, acc)).filter(|(row, _)| owned.contains(row))
            {
                let first = self.scattered_row(
                    owner,
                    self.program.rank,
                    row - owned.start,
                    item.col,
                    item.cols,
                );
                // SAFETY: `scattered_row` has checked that these columns lie inside the owner's
                // data region. No other item scatters them. The owner reads them after the signal
                // that this item raises later, and has ended the call that read their last content.
                unsafe { self.write_sent(from, first) };
            }
        }
    }

    /// Reduces scattered rows: adds all ranks' in rank order and rounds the sums into `y`.
    fn reduce_rows(&self, item: &WorkItem, scratch: &mut Scratch) {
        let cols = item.cols as usize;
        let (sum, partial) = (&mut scratch.acc[..cols], &mut scratch.partial[..cols]);
        for i in 0..item.rows {
            sum.fill(0.0);
            for source in 0..item.partials {
                let first = self.scattered_row(
                    self.program.rank,
                    Rank::new(source),
                    item.row + i,
                    item.col,
                    item.cols,
                );
                // SAFETY: as for a slot.
                unsafe { self.add_sent(first, partial, sum) };
            }
            self.store_row(item, i, sum);
        }
    }

    /// Applies the epilogue to the tile's sums and rounds them into `y`.
    fn store(&self, item: &WorkItem, acc: &mut [f32]) {
        for (i, row) in (0..item.rows).zip(acc.chunks_exact_mut(stride(self.program))) {
            self.store_row(item, i, &mut row[..item.cols as usize]);
        }
    }

    /// Applies the epilogue to row `i` of an item and rounds it into `y`.
    fn store_row(&self, item: &WorkItem, i: u32, from: &mut [f32]) {
        let to_all = matches!(item.sink, Sink::Reduce | Sink::ReduceRows) && item.raise != NONE;
        let shard = if to_all { self.program.rank } else { Rank::new(item.out_outer) };
        let row = self.program.problem.shard_rows(shard).start + item.row + i;
        let to = self.y_row(row, item);
        let (weight, col) = self.program.weight_column(item.col);
        self.epilogue.apply(weight, row as usize, col as usize, to, from);
        Y::narrow(&from[..to.len()], to);
        if to_all {
            for peer in self.program.signalled_ranks(item) {
                let first = self.result_row(peer, row, item);
                // SAFETY: `result_row` has checked that these columns lie inside the peer's data
                // region. No other rank stores this row. The peer reads it after the signal that
                // this item raises later, and has ended the call that read its last content.
                unsafe { std::slice::from_raw_parts_mut(first, to.len()) }.copy_from_slice(to);
            }
        }
    }

    /// Copies a peer's finished tile to `y`.
    fn copy(&self, item: &WorkItem) {
        for row in item.row..item.row + item.rows {
            let first: *const Y = self.result_row(self.program.rank, row, item);
            // SAFETY: as for a slot: inside the own data region, published before the awaited
            // signal, and not written again before this call closes.
            let from = unsafe { std::slice::from_raw_parts(first, item.cols as usize) };
            self.y_row(row, item).copy_from_slice(from);
        }
    }

    /// The item's columns of a row of its weight's `y`.
    #[expect(clippy::mut_from_ref, reason = "workers store disjoint elements")]
    fn y_row(&self, row: u32, item: &WorkItem) -> &mut [Y] {
        let (weight, col) = self.program.weight_column(item.col);
        let [col, cols] =
            [col, item.cols].map(|col| GateLayout::result_cols(self.epilogue.gates, col) as usize);
        let y = &self.outputs[weight];
        let offset = row as usize * y.stride + col;
        // SAFETY: the operand holds all rows of the problem at this stride (`fits`), and the item's
        // rows and columns are among them (`verify_rank`). No other item stores these elements, and
        // the item has one slice at a time.
        unsafe { std::slice::from_raw_parts_mut(y.first.add(offset), cols) }
    }

    /// The item's columns of a row of the results that `owner` has of its peers, checked.
    fn result_row(&self, owner: Rank, row: u32, item: &WorkItem) -> *mut Y {
        let (problem, bytes) = (&self.program.problem, size_of::<Y>() as u64);
        let in_place = (u64::from(row) * u64::from(problem.n()) + u64::from(item.col)) * bytes;
        let offset = self.program.results_offset() + in_place;
        self.memory.half(owner, self.protocol.half(), offset, u64::from(item.cols) * bytes)
    }

    /// Writes partial sums at `to`, in the type in which ranks send them.
    ///
    /// # Safety
    /// `to` is aligned and valid for writes of as many, and nothing else accesses them.
    unsafe fn write_sent(&self, from: &[f32], to: *mut u8) {
        // SAFETY: as the caller promises, for the type that `partial_bytes` counts.
        unsafe {
            match self.program.problem.numerics().partials {
                Partials::Output => {
                    Y::narrow(from, std::slice::from_raw_parts_mut(to.cast(), from.len()));
                }
                Partials::F32 => {
                    std::slice::from_raw_parts_mut(to.cast(), from.len()).copy_from_slice(from);
                }
            }
        }
    }

    /// Adds the partial sums at `from` to `sum`, by way of `wide`.
    ///
    /// # Safety
    /// `from` is aligned and valid for reads of as many, and nobody writes them.
    unsafe fn add_sent(&self, from: *const u8, wide: &mut [f32], sum: &mut [f32]) {
        // SAFETY: as the caller promises, for the type that `partial_bytes` counts.
        unsafe {
            match self.program.problem.numerics().partials {
                Partials::Output => {
                    Y::widen(std::slice::from_raw_parts(from.cast(), sum.len()), wide);
                }
                Partials::F32 => {
                    wide.copy_from_slice(std::slice::from_raw_parts(from.cast(), sum.len()));
                }
            }
        }
        for (sum, add) in sum.iter_mut().zip(wide) {
            *sum += *add;
        }
    }

    /// The rows of an item's accumulators.
    fn rows<'r>(&self, item: &WorkItem, acc: &'r [f32]) -> impl Iterator<Item = &'r [f32]> {
        let cols = item.cols as usize;
        acc.chunks_exact(stride(self.program)).take(item.rows as usize).map(move |row| &row[..cols])
    }

    /// Row `row` of a slot at `owner`, checked for `cols` partial sums.
    fn slot_row(&self, owner: Rank, slot: u32, row: usize, cols: u32) -> *mut u8 {
        let tile = self.program.tile;
        let bytes = self.program.problem.numerics().partial_bytes() as u64;
        let offset = u64::from(slot) * layout::slot_bytes(&self.program.problem, tile)
            + row as u64 * u64::from(tile.n) * bytes;
        self.memory.half(owner, self.protocol.half(), offset, u64::from(cols) * bytes)
    }

    /// Row `row` of a split-K workspace slot, checked for `cols` elements.
    fn split_k_row(&self, part: u32, row: usize, cols: u32) -> *mut f32 {
        let (tile, bytes) = (self.program.tile, size_of::<f32>() as u64);
        let offset = self.program.split_k_offset()
            + u64::from(part) * layout::split_k_slot_bytes(tile)
            + row as u64 * u64::from(tile.n) * bytes;
        self.memory.half(self.program.rank, self.protocol.half(), offset, u64::from(cols) * bytes)
    }

    /// `cols` columns from `col` of a row that `source` scatters to `owner`, checked.
    fn scattered_row(&self, owner: Rank, source: Rank, row: u32, col: u32, cols: u32) -> *mut u8 {
        let problem = &self.program.problem;
        let bytes = problem.numerics().partial_bytes() as u64;
        let in_place = (u64::from(row) * u64::from(problem.n()) + u64::from(col)) * bytes;
        let offset = u64::from(source.get()) * self.program.scatter_place_bytes() + in_place;
        self.memory.half(owner, self.protocol.half(), offset, u64::from(cols) * bytes)
    }
}
