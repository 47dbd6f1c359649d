//! From a problem and a schedule to the tile program of a rank.
//!
//! Invariant: a built program passes [`check::verify`](super::check::verify) together with those of
//! the other ranks.

mod ag_gemm;
mod ag_gemm_flattened;
mod gemm_rs;
mod items;
mod k_extent;
mod shard_cut;
mod stream_k;
mod sum_flattened;
mod sums;

pub(crate) use sums::MOST_REDUCTIONS;

use super::{MAX_ITEMS, Schedule, ScheduleError, TileProgram};
use crate::layout::RowLayout;
use crate::tile::TileGrid;
use crate::{Nodes, Problem, Rank, SumsTo};
use shard_cut::ShardCut;

impl TileProgram {
    /// The program of `rank` for `problem`, where all ranks reach each other alike. All ranks of a
    /// call build with the same problem and schedule.
    ///
    /// ```
    /// use flux_core::program::{Schedule, TileProgram, check};
    /// use flux_core::{DType, OpKind, Problem, TileShape, WorldSize};
    /// let world = WorldSize::new(4).unwrap();
    /// let p = Problem::new(OpKind::GemmReduceScatter, 4 * 129, 1000, 4096, DType::Bf16, world)?;
    /// let schedule = Schedule::of(TileShape::new(128, 128, 64));
    /// let build = |rank| TileProgram::build(&p, rank, &schedule);
    /// let programs: Vec<_> = world.ranks().map(build).collect::<Result<_, _>>()?;
    /// check::verify(&programs)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`ScheduleError`] names the value and the limit: a zero extent, a rank outside the world,
    /// too many tiles.
    pub fn build(
        problem: &Problem,
        rank: Rank,
        schedule: &Schedule,
    ) -> Result<Self, ScheduleError> {
        Self::build_across(problem, rank, schedule, Nodes::apart(problem.world()))
    }

    /// As [`build`](Self::build), with ranks grouped in nodes: traffic between nodes stays on its
    /// rail.
    ///
    /// The rank that receives a shard of `x` forwards it to its node. The rank on an owner's rail
    /// adds its node's partial tiles and sends the sum. With one node, or one rank in each, this is
    /// [`build`](Self::build).
    ///
    /// ```
    /// use flux_core::program::{Schedule, TileProgram, check};
    /// use flux_core::{DType, Nodes, OpKind, Problem, TileShape, WorldSize};
    /// let world = WorldSize::new(8).unwrap();
    /// let p = Problem::new(OpKind::AllGatherGemm, 8 * 256, 1024, 512, DType::Bf16, world)?;
    /// let schedule = Schedule::of(TileShape::new(128, 128, 64));
    /// let nodes = Nodes::new(world, 2).unwrap();
    /// let build = |rank| TileProgram::build_across(&p, rank, &schedule, nodes);
    /// let programs: Vec<_> = world.ranks().map(build).collect::<Result<_, _>>()?;
    /// check::verify(&programs)?;
    /// let [first, ..] = &programs[..] else { unreachable!() };
    /// // Three intra-node peers and one rank of the other node, which forwards to three peers.
    /// assert_eq!((first.transfers.len(), first.forwards.len()), (4, 3));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`ScheduleError`], also if `nodes` are of another world, or mixed with flattened rows or a
    /// GEMM-AllReduce.
    pub fn build_across(
        problem: &Problem,
        rank: Rank,
        schedule: &Schedule,
        nodes: Nodes,
    ) -> Result<Self, ScheduleError> {
        schedule.check()?;
        let world = problem.world();
        if nodes.world() != world {
            return Err(ScheduleError::OtherWorld { nodes: nodes.world(), world });
        }
        if rank.get() >= world.get() {
            return Err(ScheduleError::RankOutsideWorld { rank, world });
        }
        let all_reduces = problem.op().sums_to() == SumsTo::All;
        let rows = match schedule.rows {
            _ if world.peers() == 0 => RowLayout::PerShard,
            RowLayout::FlattenedTwoExchanges if !all_reduces => RowLayout::Flattened,
            rows => rows,
        };
        if all_reduces && nodes.are_mixed() {
            return Err(ScheduleError::AllReduceNodes { nodes });
        }
        if rows.is_flattened() && nodes.are_mixed() {
            return Err(ScheduleError::FlattenedNodes { nodes });
        }
        let schedule = &Schedule { rows, ..*schedule };
        limits(problem, schedule)?;
        Ok(match (problem.op().sums_to(), rows.is_flattened()) {
            (SumsTo::Nothing, false) => ag_gemm::build(problem, rank, schedule, nodes),
            (SumsTo::Nothing, true) => ag_gemm_flattened::build(problem, rank, schedule, nodes),
            (SumsTo::Rows | SumsTo::All, false) => gemm_rs::build(problem, rank, schedule, nodes),
            (SumsTo::Rows | SumsTo::All, true) => {
                sum_flattened::build(problem, rank, schedule, nodes)
            }
        })
    }
}

/// Refuses programs with too many records.
fn limits(problem: &Problem, schedule: &Schedule) -> Result<(), ScheduleError> {
    let (world, flattened) = (problem.world(), schedule.rows.is_flattened());
    // All ranks refuse alike: the first has the most columns and steps.
    let (tile, k_steps) = (schedule.tile, problem.k_shard().div_ceil(schedule.tile.k));
    let of_all = TileGrid::of_all_rows(problem, Rank::new(0), tile);
    let tiles = if flattened {
        of_all.tiles()
    } else {
        u64::from(world.get()) * TileGrid::of_shard(problem, tile).tiles()
    };
    let whole = || sum_flattened::is_whole(schedule, u32::try_from(tiles).unwrap_or(u32::MAX));
    let (reductions, signals) = match problem.op().sums_to() {
        SumsTo::Nothing => (0, ShardCut::new(problem, schedule).signals(world.get())),
        SumsTo::Rows | SumsTo::All if flattened => {
            let (reductions, copies) =
                sum_flattened::reductions_and_copies(problem, schedule, of_all);
            let of_tiles = u64::from(world.get()).saturating_mul(if whole() { 1 } else { tiles });
            // Sums of every rank are announced and copied.
            (reductions + copies, of_tiles.saturating_add(copies))
        }
        SumsTo::Rows => (0, tiles),
        // Every tile of a peer is copied, and announced once more.
        SumsTo::All => (tiles, 2 * tiles),
    };
    let of_tiles = tiles.saturating_mul(u64::from(schedule.split_k.min(k_steps)));
    let items = of_tiles.saturating_add(reductions + 2 * u64::from(schedule.stream_k_workers - 1));
    if items > MAX_ITEMS {
        return Err(ScheduleError::TooManyItems { tile, items });
    }
    if signals > MAX_ITEMS {
        return Err(ScheduleError::TooManySignals { tile, signals });
    }
    // Other await lists have few entries for each signal, part and partial tile.
    if flattened && problem.op().gathers() {
        let awaits =
            ag_gemm_flattened::awaits(problem, schedule, &ShardCut::new(problem, schedule));
        if awaits > MAX_ITEMS {
            return Err(ScheduleError::TooManyAwaits { tile, awaits });
        }
    }
    Ok(())
}
