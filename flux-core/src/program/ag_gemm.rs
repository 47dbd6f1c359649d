//! The program of AllGather-GEMM: own shard first, then the peers' in the order in which they arrive; the shards of a band side by side,
//! from the moment on which all their rows are there.
//!
//! Invariant: rank `r` works on sources `r`, `r + 1`, `r + 2`, ... and sends its shard to `r - 1`, `r - 2`, ..., so the mover step that
//! brings a shard is the step at which it is worked on, and at one step every rank writes to another destination.

use super::along_k::AlongK;
use super::arrivals::Arrivals;
use super::items::Items;
use super::{Schedule, TileProgram, Transfer, WorkItem, sink, source};
use crate::tile::TileGrid;
use crate::{Problem, Rank};

pub(super) fn build(problem: &Problem, rank: Rank, schedule: &Schedule) -> TileProgram {
    let world = problem.world();
    let grid = TileGrid::of_shard(problem, schedule.tile);
    let arrivals = Arrivals::new(problem, schedule);
    let (chunks, slices) = (arrivals.chunks(), arrivals.slices());
    let mut list = Items::new(
        rank,
        world.get() * grid.row_blocks() * grid.col_blocks(),
        AlongK::new(problem, schedule),
        schedule,
        world.peers() * chunks * slices,
    );
    awaits(&mut list, &arrivals, problem, rank, schedule);

    for (tile, step) in schedule.in_bands(grid, 0..world.get()) {
        let shard = rank.after(step, world);
        let place = shard.place_at(rank);
        // The await list is in the order of bands, without the own shard. A shard by itself is begun chunk by chunk. The tiles of a band read the
        // same weights: begun at different times they would each read them from memory, so all of them, own ones too, await the whole band.
        let band = schedule.band_of(step, world);
        let first_step = band.start.max(1);
        let before_band = (first_step - 1) * chunks * slices;
        let (first, per_slice) = if band.len() > 1 {
            (before_band, (band.end - first_step) * chunks)
        } else if place.is_some() {
            (before_band + arrivals.chunks_of(tile.row..tile.row + tile.rows).start * slices, 1)
        } else {
            (0, 0)
        };
        let item = WorkItem {
            a_source: if place.is_some() { source::GATHER } else { source::CALLER },
            a_outer: place.unwrap_or(0),
            row: tile.row,
            rows: tile.rows,
            col: tile.col,
            cols: tile.cols,
            sink: sink::STORE,
            out_outer: shard.get(),
            dest: rank.get(),
            ..WorkItem::default()
        };
        list.tile(item, |k| arrivals.awaits_of(first, per_slice, k));
    }
    TileProgram {
        problem: *problem,
        rank,
        tile: schedule.tile,
        signals: list.signals(),
        part_slots: list.part_slots,
        items: list.all,
        awaits: list.awaits,
        transfers: transfers(&arrivals, problem, rank, schedule),
        slots_per_source: 0,
        counters: 0,
        stacked: false,
    }
}

/// What is awaited of each band: of one shard chunk by chunk, of several slice by slice.
fn awaits(list: &mut Items, arrivals: &Arrivals, problem: &Problem, rank: Rank, schedule: &Schedule) {
    let world = problem.world();
    for first in (0..world.get()).step_by(schedule.band as usize) {
        let band = schedule.band_of(first, world);
        let pieces = band.clone().filter_map(|step| {
            let shard = rank.after(step, world);
            Some((shard.place_at(rank)?, shard))
        });
        let chunks = || 0..arrivals.chunks();
        let slices = || 0..arrivals.slices();
        let piece = |(place, shard), chunk, slice| arrivals.await_piece(place, shard, chunk, slice);
        if band.len() == 1 {
            let of = |shard| chunks().flat_map(move |chunk| slices().map(move |slice| piece(shard, chunk, slice)));
            list.awaits.extend(pieces.flat_map(of));
        } else {
            let of = |slice| pieces.clone().flat_map(move |shard| chunks().map(move |chunk| piece(shard, chunk, slice)));
            list.awaits.extend(slices().flat_map(of));
        }
    }
}

/// The own shard to every peer. Readers of a band want the first slices of all its shards first, those of single shards one chunk after another.
fn transfers(arrivals: &Arrivals, problem: &Problem, rank: Rank, schedule: &Schedule) -> Vec<Transfer> {
    let world = problem.world();
    let steps = || {
        (1..world.get()).filter_map(|step| {
            let dest = rank.before(step, world);
            Some((dest, step, rank.place_at(dest)?))
        })
    };
    let chunks = || 0..arrivals.chunks();
    let slices = || 0..arrivals.slices();
    let piece = |(dest, step, place), chunk, slice| arrivals.transfer((dest, step), place, chunk, slice);
    let mut list = Vec::with_capacity((world.peers() * arrivals.chunks() * arrivals.slices()) as usize);
    for first in (0..world.get()).step_by(schedule.band as usize) {
        let band = schedule.band_of(first, world);
        let steps = || steps().filter(|(_, step, _)| band.contains(step));
        if band.len() == 1 {
            list.extend(steps().flat_map(|to| chunks().flat_map(move |chunk| slices().map(move |slice| piece(to, chunk, slice)))));
        } else {
            // what goes to several readers side by side, so that a mover can load it once
            list.extend(slices().flat_map(|slice| chunks().flat_map(move |chunk| steps().map(move |to| piece(to, chunk, slice)))));
        }
    }
    list
}
