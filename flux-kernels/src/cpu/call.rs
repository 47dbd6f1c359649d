//! The workers of one call.
//!
//! Invariant: payload is touched only between the signals that hand it over, and nothing is
//! published after a failure.

use super::buffers::{Scratch, stride};
use super::epilogue::Epilogue;
use super::memory::HostMemory;
use super::operands::{Rows, RowsMut};
use super::panel::{self, PanelSource, Product};
use super::pause;
use super::scaling::Scaling;
use super::stamps::{Recorded, Recorder};
use crate::abi::ItemStamps;
use crate::element::Element;
use flux_core::Rank;
use flux_core::layout;
use flux_core::problem::{Shape, WeightList};
use flux_core::program::{Await, RowSource, Sink, TileProgram, WorkItem};
use flux_core::signal::{Left, Poisoned, Protocol, SharedMemory};
use std::marker::PhantomData;

/// `y`, of which workers store disjoint tiles.
pub(super) struct Output<'a, T> {
    pub(super) first: *mut T,
    pub(super) stride: usize,
    lives: PhantomData<&'a mut [T]>,
}

impl<'a, T> Output<'a, T> {
    pub(super) fn new(y: RowsMut<'a, T>) -> Self {
        let RowsMut { elements, stride } = y;
        Self { first: elements.as_mut_ptr(), stride, lives: PhantomData }
    }
}

// SAFETY: a checked program stores each element of this `&mut [T]` in one item, and an item belongs
// to one worker.
unsafe impl<T: Send> Sync for Output<'_, T> {}

/// What the workers of a call share.
pub(super) struct Call<'a, X, Y> {
    pub(super) program: &'a TileProgram,
    pub(super) x: Rows<'a, X>,
    pub(super) scales: Scaling<'a>,
    /// `w` in fp32, dense; several weights one behind the other.
    pub(super) weights: &'a [f32],
    pub(super) outputs: WeightList<Output<'a, Y>>,
    pub(super) epilogue: Epilogue<'a, Y>,
    pub(super) memory: &'a HostMemory<'a>,
    pub(super) protocol: Protocol<'a, SharedMemory<&'a [u64]>>,
    /// Whether a mover reads `x` in this call.
    pub(super) await_pushed: bool,
    /// Where workers leave their time stamps, in a traced call.
    pub(super) trace: Option<Recorded>,
}

impl<X: Element, Y: Element> Call<'_, X, Y> {
    /// Executes the items `first`, `first + step`, ..., then leaves the call; the last worker
    /// closes it.
    pub(super) fn work(
        &self,
        first: usize,
        step: usize,
        scratch: &mut Scratch,
    ) -> Result<Left, Poisoned> {
        let mut recorder = Recorder::begin(self.trace.as_ref());
        let problem = &self.program.problem;
        let rows = if self.program.rows.is_flattened() { problem.m() } else { problem.m_shard() };
        let block = Shape { rows: self.program.tile.m, cols: self.program.tile.k };
        scratch.a.open(Shape { rows, cols: problem.k_local(self.program.rank) }, block);
        for item in self.program.items.iter().skip(first).step_by(step) {
            if self.protocol.poisoned() {
                return Err(Poisoned);
            }
            // What a mainloop awaits on a GPU has arrived before it here: rows of A and partial
            // tiles.
            let (multiplies, late) = (
                !matches!(item.sink, Sink::ReduceRows | Sink::Copy),
                self.program.late_awaits_of(item),
            );
            let awaits = if multiplies { self.program.awaits_of(item) } else { &[] };
            let mut stamps = ItemStamps { opened: recorder.now(), ..ItemStamps::default() };
            self.await_all(awaits)?;
            stamps.rows_there = recorder.now();
            stamps.loaded = stamps.rows_there;
            if multiplies && item.rows > 0 {
                self.multiply(item, scratch, || stamps.loaded = recorder.now());
            }
            stamps.multiplied = recorder.now();
            self.await_all(late)?;
            if item.partials > 0 || !late.is_empty() {
                stamps.partials_there = recorder.now();
            }
            self.add(item, scratch);
            stamps.summed = recorder.now();
            self.write(item, scratch);
            stamps.written = recorder.now();
            self.protocol.complete(item, self.program.signalled_ranks(item))?;
            stamps.sent = recorder.now();
            recorder.done(stamps, problem.op().gathers() && !awaits.is_empty());
        }
        let workers = u32::try_from(step).expect("there are fewer workers than 2^32");
        let pause = pause::until(self.memory.deadline());
        let left = self.protocol.leave(workers, self.await_pushed, pause)?;
        recorder.left(first);
        Ok(left)
    }

    /// Multiplies the item's rows of A, which are there, into the accumulators; `loaded` is called
    /// when they are converted.
    fn multiply(&self, item: &WorkItem, scratch: &mut Scratch, loaded: impl FnOnce()) {
        let (row, rows) = (item.row as usize, item.rows as usize);
        let problem = &self.program.problem;
        let (weight, col) = self.program.weight_column(item.col);
        let before: usize =
            (0..weight).map(|weight| problem.weight_columns(weight, self.program.rank).len()).sum();
        let (col, cols) = (before + col as usize, item.cols as usize);
        let (k, tile_k) =
            (problem.k_local(self.program.rank) as usize, self.program.tile.k as usize);
        let steps = item.k_first as usize..(item.k_first + item.k_steps) as usize;
        let (first_k, end_k) = (steps.start * tile_k, k.min(steps.end * tile_k));
        let key = PanelSource { rows: item.a_source, outer: item.a_outer };
        let a = if item.a_source == RowSource::Gather {
            let place = u64::from(item.a_outer) * layout::gather_place_bytes(problem);
            scratch.a.rows(key, row..row + rows, steps, |i, columns| {
                let offset = place
                    + (row + i) as u64 * problem.gathered_row_bytes()
                    + (columns.start * size_of::<X>()) as u64;
                let bytes = (columns.len() * size_of::<X>()) as u64;
                let first: *const X =
                    self.memory.half::<X>(self.program.rank, self.protocol.half(), offset, bytes);
                // SAFETY: `half` has checked that these bytes lie inside the own data region. Their
                // writer published them before the awaited signals, and writes them again after
                // this call has ended.
                unsafe { std::slice::from_raw_parts(first, columns.len()) }
            })
        } else {
            let outer = problem.shard_rows(Rank::new(item.a_outer)).start as usize;
            scratch.a.rows(key, row..row + rows, steps, |i, columns| {
                &self.x.row(outer + row + i, k)[columns]
            })
        };
        loaded();
        let b = &self.weights[col * k + first_k..];
        let product =
            Product { m: rows, n: cols, k: end_k - first_k, ldk: k, ldc: stride(self.program) };
        if let Some(elements) = problem.numerics().scales.along_k() {
            let step = elements as usize;
            self.multiply_blocks(item, product, step, (a, b), &mut scratch.acc, &mut scratch.block);
        } else {
            panel::multiply(product, a, b, &mut scratch.acc);
            self.scale(item, &mut scratch.acc);
        }
    }

    /// Copies all rows of `x` when the call has ended (AllGather-GEMM). Peers write the gather
    /// buffer again only after this rank's next call.
    pub(super) fn hand_out(&self, to: RowsMut<'_, X>) {
        let RowsMut { elements, stride } = to;
        let (program, k) = (self.program, self.program.problem.gathered_columns() as usize);
        for row in 0..program.problem.m() {
            let (owner, of_shard) = program.problem.owner_of(row);
            let from = if owner == program.rank {
                self.x.row(of_shard as usize, k)
            } else {
                let place = if program.rows.is_flattened() {
                    Some(owner.get())
                } else {
                    owner.place_at(program.rank)
                };
                let place = place.expect("the owner is a peer");
                let bytes = (k * size_of::<X>()) as u64;
                let offset = program.gather_place_offset(place) + u64::from(of_shard) * bytes;
                let first: *const X =
                    self.memory.half::<X>(program.rank, self.protocol.half(), offset, bytes);
                // SAFETY: `half` has checked the bounds, and the call has awaited all rows.
                unsafe { std::slice::from_raw_parts(first, k) }
            };
            elements[row as usize * stride..][..k].copy_from_slice(from);
        }
    }

    fn await_all(&self, awaits: &[Await]) -> Result<(), Poisoned> {
        awaits.iter().try_for_each(|a| {
            self.protocol.wait(a.signal, Rank::new(a.peer), pause::until(self.memory.deadline()))
        })
    }
}
