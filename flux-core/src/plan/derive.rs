//! The schedule of a plan, which tile programs are built from.
//!
//! Invariant: it depends only on what all ranks share: the plan, the problem, the links, the nodes
//! and the SM count. It uses no rate of a machine.

use super::{KSplit, Links, Plan, RowMapping, Target};
use crate::layout::RowLayout;
use crate::program::{MAX_ITEMS, Schedule, most_partials};
use crate::tile::TileGrid;
use crate::{Problem, Rank, SumsTo};

/// Row blocks of a raster group. A wave of 132 tiles then reads 8 + 17 blocks of operands, close to
/// the least.
pub(super) const RASTER_GROUP: u32 = 8;

impl Plan {
    /// The schedule of this plan for `problem`.
    pub fn schedule(&self, problem: &Problem, target: &Target) -> Schedule {
        let (group, rows) = match self.rows {
            RowMapping::PerShard { group } => (group, RowLayout::PerShard),
            RowMapping::Flattened => (1, RowLayout::Flattened),
            RowMapping::FlattenedTwoExchanges => (1, RowLayout::FlattenedTwoExchanges),
        };
        let workers = target.machine.multiprocessors;
        let (split_k, stream_k_workers) = match self.k {
            KSplit::Whole => (1, 1),
            KSplit::SplitK(parts) => (parts, 1),
            KSplit::StreamK => (1, workers),
        };
        let (raster_group, k_slices) = (RASTER_GROUP, self.k_slices);
        let plain = Schedule {
            chunk: self.chunk,
            raster_group,
            group,
            k_slices,
            split_k,
            stream_k_workers,
            rows,
            ..Schedule::of(self.tile)
        };
        if rows.is_flattened() || problem.world().peers() == 0 {
            return plain;
        }
        if problem.op().gathers() {
            Schedule {
                prologue: prologue_shards(&plain, problem, workers),
                chunk_ordered: chunk_ordered_shards(&plain, problem, target),
                ..plain
            }
        } else {
            match target.links {
                Links::PeerMemory if problem.op().sums_to() == SumsTo::All => {
                    Schedule { own_lag: workers, ..plain }
                }
                Links::PeerMemory => {
                    Schedule { in_mainloop: in_mainloop(&plain, problem, workers.into()), ..plain }
                }
                // Staged partial tiles arrive late: own tiles are the last.
                Links::HostStaged if problem.op().sums_to() == SumsTo::All => {
                    Schedule { own_lag: u32::MAX, ..plain }
                }
                // Too late for a mainloop.
                Links::HostStaged | Links::Messages(_) => plain,
            }
        }
    }
}

/// Shards before the first group: the own one, if it keeps more than half of the workers busy while
/// the group's rows arrive. Slices need no prologue.
fn prologue_shards(schedule: &Schedule, problem: &Problem, workers: u32) -> u32 {
    let own = TileGrid::of_shard(problem, schedule.tile).tiles();
    u32::from(schedule.group > 1 && schedule.k_slices == 1 && 2 * own > u64::from(workers))
}

/// Peers' shards in chunk order: all, over links that are slower than the multiplication. Each
/// chunk costs a pass over `w`, so peer memory takes none.
fn chunk_ordered_shards(schedule: &Schedule, problem: &Problem, target: &Target) -> u32 {
    let in_order = target.links != Links::PeerMemory && schedule.k_slices == 1;
    if in_order { problem.world().peers() } else { 0 }
}

/// Partial tiles that an own tile adds in its mainloop: those that were multiplied at least a wave
/// earlier. None if all own tiles are in the last wave, which the additions would delay.
fn in_mainloop(schedule: &Schedule, problem: &Problem, workers: u64) -> u32 {
    let (world, tiles) =
        (u64::from(problem.world().get()), TileGrid::of_shard(problem, schedule.tile).tiles());
    if tiles <= workers || world * tiles > MAX_ITEMS || schedule.split_k > 1 {
        return 0;
    }
    let stream_k = schedule.stream_k_tiles(problem, Rank::new(0));
    let wave = |tile| stream_k.map_or(tile / workers, |stream_k| stream_k.wave(tile, workers));
    let before = |step: u64| {
        let first = step - (step - 1) % u64::from(schedule.group);
        let steps = u64::from(schedule.group).min(world - first);
        (0..tiles).all(|tile| {
            let (sent, own) =
                ((first - 1) * tiles + tile * steps + step - first, (world - 1) * tiles + tile);
            let last = own + workers >= world * tiles;
            wave(sent) < wave(own) || last && wave(own) < wave(world * tiles - 1)
        })
    };
    let there = (1..world).take_while(|&step| before(step)).count() as u32;
    there.min(most_partials(
        problem,
        problem.k_local(problem.least_rank()).div_ceil(schedule.tile.k),
    ))
}
