//! The schedule of whoever names none.
//!
//! Invariant: a schedule depends on the problem alone, so all ranks choose the same.

mod bands;
mod candidates;
mod estimate;
mod few_rows;
mod ragged;
mod scattered;
mod slices;
mod staged;
mod tiles;

use super::most_early;
use super::schedule::{Chunk, Schedule};
use crate::layout::gather_place_bytes;
use crate::tile::{Raster, TileGrid};
use crate::{OpKind, Problem, TileShape};
pub(super) use estimate::SHARING_NS;
pub(super) use few_rows::{THIN_ROWS, thin};
use ragged::leaves_half_a_tile;
pub(super) use ragged::{is_ragged, of_shards, that_span, that_span_at_once, unless_unsent};
use tiles::LARGE;
#[cfg(test)]
pub(super) use tiles::TILES;
pub(super) use tiles::{READ, w_bytes};

/// Largest piece of a shard that one signal announces by default: some 12 us of a link, so that a
/// reader starts after a fraction of a large shard.
const PIECE_BYTES: u64 = 4 << 20;
/// Rows that share a pass over `w` by default. With 128, an H200 is bound by reading `w` from
/// memory: the AllGather-GEMM of GPT-3 at m = 512 on 4 ranks reads its 302 MB of `w` four times in
/// the time of two waves of tiles.
const BAND_ROWS: u32 = 512;
/// Rows of the usual tiles: a shard with fewer leaves a part of each idle.
const ROWS: u32 = 128;
/// Rows of a shard from which on a GEMM-ReduceScatter of two ranks has tiles of one shard: with
/// fewer the own shard, which is then worked on last and by itself, reads all of `w` once more in
/// too short a time (results/tuning/wide-bands.txt). Of four ranks tiles that span shards are
/// slower at 512 rows in all (results/tuning/small-m.txt).
const PAIR_ROWS: u32 = 256;
/// Workers that a wave of tiles is counted for: SMs of an H200, less four, which make 128x256 tiles
/// of the reference shapes whole waves.
pub(super) const WORKERS: u32 = 128;
/// SMs of an H200, and so the workers of a call: what is in one wave of tiles is finished at nearly
/// the same time.
pub(super) const MULTIPROCESSORS: u32 = WORKERS + 4;
/// Operations of a multiprocessor in a nanosecond: 4096 a cycle at 1.5 GHz, of a card at its power
/// limit.
pub(super) const OPERATIONS: u64 = 6144;
/// Waves of a GEMM-ReduceScatter with peers from which on what they leave is shared. With rests,
/// Llama-2 70B at m = 8192, 15.5 waves, takes 1.4 % less to 0.2 more time so, and 0.3 to 1.5 % more
/// at 4096, 7.8 waves; GPT-3 with 11.6 between 0.4 % less and 0.2 more (results/tuning/rests.txt).
const SHARED_WAVES: u64 = 12;

/// Hundredths of a tile that sharing has to gain with the largest tiles. Two H100 take up to 7 %
/// less time beside serial so where it gains 17 to 71 (GPT-3 at m = 4096 and 8192, by turns, in
/// seven of eight cases; results/tuning/ragged-rows.txt).
const LARGE_GAIN: u64 = 15;

/// Row blocks of a raster group: their tiles are worked on side by side.
pub(super) const ROW_GROUP: u32 = 8;

impl Schedule {
    /// A schedule that is reasonable without measurement. A heuristic, made for Hopper GPUs over
    /// NVLink: a tuned choice is better.
    ///
    /// - Tile: the one of 256x192x64, if `k` is long enough, 128x256x64, 128x224x64, 128x192x64 and
    ///   128x128x64 whose waves over the SMs, and the partial tiles that leave after the last, take
    ///   the least time, the first of equals. Where rows are no whole tiles of 128, in all or in a
    ///   shard, or leave half of a tile of 256, also 256 columns and 136 to 192 rows in steps of 8,
    ///   144x192x64 and 160x192x64, 152x128x64, 176x128x64, 208x128x64 and 240x128x64, of one shard
    ///   each or spanning shards, as an estimate of the whole call says; but for 224 to 255 rows in
    ///   all of small shards of a GEMM-ReduceScatter, which have what 256 have.
    /// - Chunk: for AllGather-GEMM the shard, in as many row blocks as 4 MiB have, at least one,
    ///   where it is larger; for GEMM-ReduceScatter one tile.
    /// - Raster: groups of 8 row blocks, so that the tiles in flight share their operands in L2;
    ///   bands of at least 512 rows, of more where they need not wait, and of an AllGather-GEMM's
    ///   of a wave of tiles.
    /// - Partial tiles of a GEMM-ReduceScatter early, if they were multiplied a wave before the
    ///   tile that they are added to; where the own tiles are more than a wave.
    /// - What whole waves leave of the tiles is shared by groups of workers, where that gains time;
    ///   for GEMM-ReduceScatter with peers from twelve waves on.
    /// - Slices of `k`: where a band has several shards, so that its tiles begin before all of
    ///   their rows are there.
    /// - Shards of fewer than 128 rows, and than 256 for a GEMM-ReduceScatter of two ranks: tiles
    ///   span them, of 64 rows where there are no more in all; with at most 128 rows narrower ones
    ///   stand to choose too, and two or three items share a tile where that takes less time. They
    ///   do with more rows too, where a GEMM-ReduceScatter with peers has tiles for half of the
    ///   workers at most. An AllGather-GEMM's tiles that span shards begin with slices of `k` from
    ///   512 rows on.
    ///
    /// ```
    /// use flux_core::program::{Chunk, Schedule};
    /// use flux_core::{DType, OpKind, Problem, TileShape, WorldSize};
    /// let world = WorldSize::new(8).unwrap();
    /// let p = Problem::new(OpKind::AllGatherGemm, 8192, 49152, 12288, DType::Bf16, world)?;
    /// let schedule = Schedule::heuristic(&p);
    /// assert_eq!((schedule.tile, schedule.chunk), (TileShape::new(256, 192, 64), Chunk::Tiles(1))); // 6 MiB
    /// # Ok::<(), flux_core::ProblemError>(())
    /// ```
    pub fn heuristic(problem: &Problem) -> Self {
        if is_ragged(problem) || leaves_half_a_tile(problem) {
            return Self::ragged(problem);
        }
        let schedule = Self::shard_by_shard(problem).in_splits(problem);
        schedule.in_whole_waves(problem).in_wider_bands(problem).in_slices(problem)
    }

    /// The [heuristic](Self::heuristic)'s schedule, and what to compare it with over peers' memory
    /// by measurement, each once: every tile of 128 rows and more that there is for the problem, of
    /// one shard each and spanning shards, in one piece and with what whole waves leave shared, the
    /// fastest by estimate first.
    ///
    /// ```
    /// use flux_core::program::Schedule;
    /// use flux_core::{DType, OpKind, Problem, WorldSize};
    /// let p = Problem::new(OpKind::AllGatherGemm, 258, 28672, 8192, DType::Bf16, WorldSize::new(2).unwrap())?;
    /// let candidates = Schedule::candidates(&p);
    /// assert!(candidates.len() > 10 && candidates[0] == Schedule::heuristic(&p));
    /// # Ok::<(), flux_core::ProblemError>(())
    /// ```
    pub fn candidates(problem: &Problem) -> Vec<Self> {
        let mut all = vec![Self::heuristic(problem)];
        for schedule in Self::by_estimate(problem) {
            if !all.contains(&schedule) {
                all.push(schedule);
            }
        }
        all
    }

    /// This schedule with tiles of one shard each: of a GEMM-ReduceScatter, which then sends
    /// partial tiles, with another tile in place of one that has none.
    ///
    /// ```
    /// use flux_core::program::Schedule;
    /// use flux_core::{DType, OpKind, Problem, TileShape, WorldSize};
    /// let p = Problem::new(OpKind::GemmReduceScatter, 258, 12288, 49152, DType::Bf16, WorldSize::new(2).unwrap())?;
    /// let own = Schedule::heuristic(&p);
    /// assert_eq!((own.tile, own.stack), (TileShape::new(144, 192, 64), true));
    /// assert_eq!((own.per_shard(&p).tile, own.per_shard(&p).stack), (TileShape::new(144, 256, 64), false));
    /// # Ok::<(), flux_core::ProblemError>(())
    /// ```
    #[must_use]
    pub fn per_shard(self, problem: &Problem) -> Self {
        Self { stack: false, tile: unless_unsent(problem, self.tile), ..self }
    }

    /// What whole waves leave of the tiles shared, and first. The largest tiles are for calls at
    /// the card's power limit, at which idle multiprocessors are not all lost: there sharing has to
    /// gain enough (results/tuning/ragged-rows.txt). Not where `k` comes in slices: whoever has the
    /// last steps of a tile would await the last slice first. Nor for short calls of
    /// GEMM-ReduceScatter with peers, which end when all workers have added partial tiles, and not
    /// only those that are left in the last wave.
    fn in_whole_waves(self, problem: &Problem) -> Self {
        if self.k_slices > 1 || self.stack {
            return self;
        }
        let tiles = u64::from(problem.world().get()) * TileGrid::of_shard(problem, self.tile).tiles();
        let shared = Self { shares: MULTIPROCESSORS, ..self };
        let Some(shares) = shared.shared_tiles(problem) else { return self };
        let gains = match problem.op() {
            _ if self.tile == LARGE.0 => 100 * shares.time() <= (100 - LARGE_GAIN) * shares.steps(),
            OpKind::AllGatherGemm => true,
            OpKind::GemmReduceScatter => problem.world().peers() == 0 || tiles >= SHARED_WAVES * u64::from(MULTIPROCESSORS),
        };
        if gains { shared } else { self }
    }

    /// The same for transports whose shards come and go one after another.
    pub(super) fn shard_by_shard(problem: &Problem) -> Self {
        let pair = problem.op() == OpKind::GemmReduceScatter && problem.world().get() == 2;
        if problem.m_shard() < ROWS || pair && problem.m_shard() < PAIR_ROWS {
            return Self::flattened(problem, WORKERS);
        }
        Self::by_shard(problem, tiles::usual(problem, true))
    }

    /// Of these tiles, of one shard each.
    fn by_shard(problem: &Problem, tile: TileShape) -> Self {
        let chunk = match problem.op() {
            OpKind::AllGatherGemm if gather_place_bytes(problem) <= PIECE_BYTES => Chunk::Shard,
            OpKind::AllGatherGemm => {
                let row_block_bytes = gather_place_bytes(problem) / u64::from(problem.m_shard()) * u64::from(tile.m);
                Chunk::Tiles(u32::try_from(PIECE_BYTES / row_block_bytes).unwrap_or(u32::MAX).max(1))
            }
            OpKind::GemmReduceScatter => Chunk::Tiles(1),
        };
        let band = BAND_ROWS.div_ceil(problem.m_shard().next_multiple_of(tile.m)).min(problem.world().get());
        Self { chunk, raster: Raster::RowGroups(ROW_GROUP), band, ..Self::of(tile) }.in_best_slices(problem)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;
    use crate::program::{TileProgram, sink};
    use crate::simulate::{Pushes, simulate};
    use crate::{DType, WorldSize};
    use std::time::Duration;

    #[test]
    fn what_whole_waves_leave_is_shared_where_it_gains_enough_and_not_in_slices() {
        let (ag, rs) = (OpKind::AllGatherGemm, OpKind::GemmReduceScatter);
        let shares = |world, op, m, n, k| own(world, op, m, n, k).shares;
        assert_eq!(shares(4, ag, 4096, 28672, 8192), 132, "104 tiles of 128x256");
        assert_eq!([shares(4, rs, 4096, 8192, 28672), shares(4, rs, 8192, 8192, 28672)], [1, 132], "7.8 waves, and 15.5");
        assert_eq!([shares(4, ag, 8192, 49152, 12288), shares(4, rs, 4096, 12288, 49152)], [132; 2], "68 tiles of 256x192, and 100");
        assert_eq!(shares(4, ag, 1024, 49152, 12288), 1, "124 of them are nearly a wave");
        assert_eq!(shares(4, ag, 2048, 28672, 8192), 1, "116 of 128x224 are nearly a wave");
        let problem =
            |m| Problem::new(ag, m, 24576, 12288, DType::Bf16, WorldSize::new(4).expect("a world size")).expect("a valid problem");
        let wide = |k_slices| Schedule { k_slices, ..Schedule::of(TILES[0].0) }.in_whole_waves(&problem(1024)).shares;
        assert_eq!([wide(1), wide(6)], [132, 1], "60 tiles, which await slices");
        assert_eq!(Schedule::staged(&problem(4096)).shares, 1, "chunks that are carried come later");
    }

    /// Whoever has the last steps of a shared tile would await the last slice first:
    /// results/tuning/ragged-shards.txt has what it takes by simulation.
    #[test]
    fn what_comes_in_slices_is_shared_last_if_at_all() {
        let mut last = 0;
        for world in [2, 4, 8] {
            for shard in [64, 127, 129, 200, 256, 320, 384, 512, 640, 768, 1024] {
                for (n, k) in [(49152, 12288), (28672, 8192), (10240, 8192), (6144, 4096), (8192, 2048), (7168, 2048), (6144, 1536)] {
                    let world = WorldSize::new(world).expect("a world size");
                    let problem =
                        Problem::new(OpKind::AllGatherGemm, shard * world.index(), n, k, DType::Bf16, world).expect("a valid problem");
                    let schedule = Schedule::heuristic(&problem);
                    if schedule.shares == 1 || schedule.k_slices == 1 {
                        continue;
                    }
                    let program = TileProgram::build(&problem, crate::Rank::new(0), &schedule).expect("a valid schedule");
                    let tiles = program.items.iter().filter(|item| item.sink == sink::STORE).count();
                    let first_lender = program.items.iter().position(|item| item.sink == sink::PARTIAL);
                    assert_eq!(first_lender, Some(tiles / 132 * 132), "{problem}: {schedule}");
                    assert!(!shard.is_multiple_of(256), "{problem}: what whole shards have was compared on GPUs");
                    last += 1;
                }
            }
        }
        // Others come shard by shard.
        assert!(last > 7, "{last}");
        let s = own(4, OpKind::AllGatherGemm, 2048, 12288, 4096);
        assert!(s.k_slices > 1, "{s}: in one slice before its band is wider");
    }

    #[test]
    fn a_rank_without_peers_has_no_partial_tiles_to_wait_for() {
        let rs = OpKind::GemmReduceScatter;
        assert_eq!(own(1, rs, 128, 4096, 14336).shares, 132, "32 tiles");
        assert_eq!(own(2, rs, 256, 4096, 28672).shares, 1, "64, which are added to");
        let [shared, alone] = simulated_with(rs, 1, (128, 4096, 14336), [|s| s, |s| Schedule { shares: 1, ..s }]);
        assert!(shared * 9 < alone * 5, "{shared:?} instead of {alone:?}");
    }

    /// What a call takes on an H200 by simulation, with each of these changes to its own schedule.
    pub(super) fn simulated_with<const N: usize>(
        op: OpKind,
        world: u32,
        (m, n, k): (usize, usize, usize),
        changes: [fn(Schedule) -> Schedule; N],
    ) -> [Duration; N] {
        let world = WorldSize::new(world).expect("a world size");
        let problem = Problem::new(op, m, n, k, DType::Bf16, world).expect("a valid problem");
        changes.map(|change| simulated(&problem, &change(Schedule::heuristic(&problem))))
    }

    /// What a call with this schedule takes.
    pub(super) fn simulated(problem: &Problem, schedule: &Schedule) -> Duration {
        let build = |rank| TileProgram::build(problem, rank, schedule).expect("a valid schedule");
        let programs: Vec<_> = problem.world().ranks().map(build).collect();
        simulate(&programs, &Machine::H200, Pushes::AsByDefault).expect("it ends").time
    }

    pub(super) fn own(world: u32, op: OpKind, m: usize, n: usize, k: usize) -> Schedule {
        let world = WorldSize::new(world).expect("a world size");
        Schedule::heuristic(&Problem::new(op, m, n, k, DType::Bf16, world).expect("a valid problem"))
    }

    pub(super) fn chosen(world: u32, op: OpKind, m: usize, n: usize, k: usize) -> (u32, u32, u32, bool) {
        let s = own(world, op, m, n, k);
        (s.tile.m, s.tile.n, s.splits, s.stack)
    }

    #[test]
    fn rows_longer_than_a_piece_still_make_a_chunk() {
        let schedule = own(8, OpKind::AllGatherGemm, 8 * 512, 8192, 1 << 20);
        assert_eq!(schedule.chunk, Chunk::Tiles(1));
        assert_eq!(own(8, OpKind::AllGatherGemm, 1024, 49152, 12288).chunk, Chunk::Shard);
    }
}
