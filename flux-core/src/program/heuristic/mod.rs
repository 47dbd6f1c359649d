//! The schedule of whoever names none.
//!
//! Invariant: a schedule depends on the problem alone, so all ranks choose the same.

use super::most_early;
use super::schedule::{Chunk, Schedule};
use crate::layout::{gather_place_bytes, slot_bytes};
use crate::tile::{Raster, TileGrid};
use crate::{OpKind, Problem, TileShape};

/// Largest piece of a shard that one signal announces by default: some 12 us of a link, so that a reader starts after a fraction of a large shard.
const PIECE_BYTES: u64 = 4 << 20;
/// What one signal announces where a chunk is staged.
const STAGED_BYTES: u64 = 2 << 20;
/// Rows that share a pass over `w` by default. With 128, an H200 is bound by reading `w` from memory: the AllGather-GEMM of GPT-3 at
/// m = 512 on 4 ranks reads its 302 MB of `w` four times in the time of two waves of tiles.
const BAND_ROWS: u32 = 512;
/// Rows of the usual tiles: a shard with fewer leaves a part of each idle.
const ROWS: u32 = 128;
/// Rows of a shard up to which a GEMM-ReduceScatter of two ranks has tiles that span shards: the own shard, which is else worked on last and by itself, would
/// read all of `w` once more. Of four ranks the same is slower at 512 rows in all (results/tuning/small-m.txt).
const PAIR_ROWS: u32 = 256;
/// Tiles for at most 64 rows, as [`TILES`]: small ones read `x` more often (results/tuning/slim-tiles.txt).
const THIN: [(TileShape, u64); 5] = [
    (TileShape::new(64, 256, 64), 100),
    (TileShape::new(64, 192, 64), 100),
    (TileShape::new(64, 128, 64), 100),
    (TileShape::new(64, 96, 64), 102),
    (TileShape::new(64, 64, 64), 105),
];
/// Tiles besides [`TILES`] for at most 128 rows: more SMs read `w`. With more rows they read `x` too often.
const SLIM: [(TileShape, u64); 2] = [(TileShape::new(128, 96, 64), 102), (TileShape::new(128, 64, 64), 105)];
/// What it costs to share a tile, in elements along k: what the others have summed is written, announced, fetched and added. For GEMM-ReduceScatter of GPT-3 at
/// m = 128, 64 tiles of 128x192 in two parts take 14 % more time than 96 of 128x128 with k = 6144 (results/tuning/few-rows-tp8.txt), and less with 24576; for
/// AllGather-GEMM at m = 256 with 12288, 14 % less.
const SHARED: u64 = 2000;
/// Most items that share a tile: a fourth brought nothing.
const MOST_SPLITS: u64 = 3;
/// What a rank sends of one slice along k, to all who await it together, where tiles await several shards: they begin when the first slice is there. About 3 us of a
/// link; fewer slices are slower, more bring nothing (results/tuning/slices-tp2.txt).
const SLICE_BYTES: u64 = 1 << 20;
/// Most slices.
const MOST_SLICES: u32 = 12;
/// Workers that a wave of tiles is counted for: SMs of an H200, less four, which make 128x256 tiles of the reference shapes whole waves.
pub(super) const WORKERS: u32 = 128;
/// SMs of an H200, and so the workers of a call: what is in one wave of tiles is finished at nearly the same time.
pub(super) const MULTIPROCESSORS: u32 = WORKERS + 4;
/// Tiles to choose from, with the time of one step of a tile relative to its area: 128x128 moves more operand bytes for
/// its work, so it has to gain something in waves.
pub(super) const TILES: [(TileShape, u64); 4] = [
    (TileShape::new(128, 256, 64), 100),
    (TileShape::new(128, 224, 64), 100),
    (TileShape::new(128, 192, 64), 100),
    (TileShape::new(128, 128, 64), 101),
];
/// Tile for long calls, where it makes no more of them. The card is then at its power limit, and time is energy: this tile moves an eighth less through L2 than 128x256 and
/// a quarter less from memory, and takes 2 to 4 % less time back to back (results/tuning/back-to-back.txt). Of short calls the ends of a tile, which are longer, count for more.
const LARGE: TileShape = TileShape::new(256, 192, 64);
/// Operations of a rank from which on a call is long: some 3 ms of an H200. Where calls of half of that come with pauses, at higher clocks, it is up to 2 % slower.
const LONG: u64 = 2_000_000_000_000;

/// Tiles of the own shard from which on partial tiles are added while they are multiplied. With fewer, at TP 8 and m = 1024, early ones cost 2 to 5 % (results/tuning/early.txt),
/// perhaps because most workers have no own tile in the last wave, and the others get on faster when these have ended.
const OWN_TILES: u64 = 64;

/// Row blocks of a raster group: their tiles are worked on side by side.
pub(super) const ROW_GROUP: u32 = 8;

fn waves(items: u64) -> u64 {
    items.div_ceil(u64::from(WORKERS))
}

fn area(tile: TileShape) -> u64 {
    u64::from(tile.m) * u64::from(tile.n)
}

impl Schedule {
    /// A schedule that is reasonable without measurement. A heuristic, made for Hopper GPUs over NVLink: a tuned choice is better.
    ///
    /// - Tile: the one of 128x256x64, 128x224x64, 128x192x64 and 128x128x64 whose waves over the SMs take the least time, the largest of equals; 256x192x64 where a
    ///   rank has at least 2 T operations and its waves take no longer.
    /// - Chunk: for AllGather-GEMM the shard, in row blocks of at most 4 MiB where it is larger; for GEMM-ReduceScatter one tile.
    /// - Raster: groups of 8 row blocks, so that the tiles in flight share their operands in L2; bands of at least 512 rows.
    /// - Partial tiles of a GEMM-ReduceScatter early, if they were multiplied a wave before the tile that they are added to; with at least 64 own tiles.
    /// - Slices of `k`: where a band has several shards, so that its tiles begin before all of their rows are there.
    /// - Shards of fewer than 128 rows, and of at most 256 for a GEMM-ReduceScatter of two ranks: tiles span them, of 64 rows where there are no more in all; with at
    ///   most 128 rows narrower ones stand to choose too, and two or three items share a tile where that takes less time.
    ///
    /// ```
    /// use flux_core::program::{Chunk, Schedule};
    /// use flux_core::{DType, OpKind, Problem, TileShape, WorldSize};
    /// let world = WorldSize::new(8).unwrap();
    /// let p = Problem::new(OpKind::AllGatherGemm, 8192, 49152, 12288, DType::Bf16, world)?;
    /// let schedule = Schedule::heuristic(&p);
    /// assert_eq!((schedule.tile, schedule.chunk), (TileShape::new(128, 256, 64), Chunk::Tiles(1))); // 3 MiB
    /// # Ok::<(), flux_core::ProblemError>(())
    /// ```
    pub fn heuristic(problem: &Problem) -> Self {
        let pair = problem.op() == OpKind::GemmReduceScatter && problem.world().get() == 2;
        if problem.m_shard() < ROWS || pair && problem.m_shard() <= PAIR_ROWS {
            return Self::stacked(problem);
        }
        let tiles = |tile| u64::from(problem.world().get()) * TileGrid::of_shard(problem, tile).tiles();
        let usual = TILES.iter().min_by_key(|&&(tile, cost)| waves(tiles(tile)) * area(tile) * cost).map_or(TILES[0].0, |t| t.0);
        let time = |tile| waves(tiles(tile)) * area(tile);
        let tile = if problem.flop_per_rank() >= LONG && time(LARGE) <= time(usual) { LARGE } else { usual };
        let chunk = match problem.op() {
            OpKind::AllGatherGemm if gather_place_bytes(problem) <= PIECE_BYTES => Chunk::Shard,
            OpKind::AllGatherGemm => {
                let row_block_bytes = gather_place_bytes(problem) / u64::from(problem.m_shard()) * u64::from(tile.m);
                Chunk::Tiles(u32::try_from(PIECE_BYTES / row_block_bytes).unwrap_or(u32::MAX).max(1))
            }
            OpKind::GemmReduceScatter => Chunk::Tiles(1),
        };
        let band = BAND_ROWS.div_ceil(problem.m_shard().next_multiple_of(tile.m)).min(problem.world().get());
        let k_chunks = match problem.op() {
            OpKind::AllGatherGemm if band > 1 => {
                let sent = gather_place_bytes(problem) * u64::from(band - 1);
                u32::try_from(sent / SLICE_BYTES).unwrap_or(u32::MAX).clamp(1, MOST_SLICES)
            }
            _ => 1,
        };
        let schedule = Self { chunk, raster: Raster::RowGroups(ROW_GROUP), band, k_chunks, ..Self::of(tile) };
        Self { early: schedule.sent_a_wave_before(problem), ..schedule }
    }

    /// Of the partial tiles that a GEMM-ReduceScatter adds to an own one, how many were multiplied in an earlier wave, counted from the first to be sent: they are there
    /// when the own tile is half done at the latest. A few tiles, at the border of two waves, may be of the same and wait.
    fn sent_a_wave_before(&self, problem: &Problem) -> u32 {
        let (world, tiles) = (u64::from(problem.world().get()), TileGrid::of_shard(problem, self.tile).tiles());
        if problem.op() == OpKind::AllGatherGemm || tiles < OWN_TILES {
            return 0;
        }
        let wave = |position: u64| position / u64::from(MULTIPROCESSORS);
        let before = |step: u64| {
            // Of the band that the step is in: its first step, and how many there are.
            let first = step - (step - 1) % u64::from(self.band);
            let steps = u64::from(self.band).min(world - first);
            let earlier = |&tile: &u64| wave((first - 1) * tiles + tile * steps + step - first) < wave((world - 1) * tiles + tile);
            (0..tiles).filter(earlier).count() as u64 >= tiles - tiles / 16
        };
        let there = (1..world).take_while(|&step| before(step)).count() as u32;
        there.min(most_early(problem.k_local().div_ceil(self.tile.k)))
    }

    /// As [`heuristic`](Self::heuristic), for transports that carry chunks through the host or over a network: each costs them some 10 us, whatever its size, so
    /// a signal announces about 2 MiB. Shards are single bands, as they come one after another, and a GEMM-ReduceScatter is not stacked, whose rows would
    /// travel in many small pieces.
    ///
    /// ```
    /// use flux_core::program::{Chunk, Schedule};
    /// use flux_core::{DType, OpKind, Problem, WorldSize};
    /// let world = WorldSize::new(8).unwrap();
    /// let p = Problem::new(OpKind::GemmReduceScatter, 8192, 12288, 49152, DType::Bf16, world)?;
    /// assert_eq!(Schedule::staged(&p).chunk, Chunk::Tiles(32)); // of 64 KiB each
    /// # Ok::<(), flux_core::ProblemError>(())
    /// ```
    pub fn staged(problem: &Problem) -> Self {
        let usual = Self::heuristic(problem);
        if problem.op() == OpKind::AllGatherGemm && usual.stack {
            return usual;
        }
        let thin = TileShape::new(64, 128, 64);
        let tile = if usual.stack && problem.m_shard() <= thin.m { thin } else { usual.tile };
        let unit = match problem.op() {
            OpKind::AllGatherGemm => gather_place_bytes(problem) / u64::from(problem.m_shard()) * u64::from(tile.m),
            OpKind::GemmReduceScatter => slot_bytes(problem, tile),
        };
        let tiles = u32::try_from(STAGED_BYTES / unit.max(1)).unwrap_or(u32::MAX).max(1);
        Self { chunk: Chunk::Tiles(tiles), raster: usual.raster, ..Self::of(tile) }
    }

    /// For few rows. Such a call is bound by reading `w`: what matters is that all workers do, to the end.
    fn stacked(problem: &Problem) -> Self {
        let candidates = match problem.m() {
            ..=64 => [THIN.as_slice(), &[]],
            65..=128 => [TILES.as_slice(), &SLIM],
            _ => [TILES.as_slice(), &[]],
        };
        let ways = candidates.into_iter().flatten().flat_map(|&(tile, cost)| {
            let tiles = TileGrid::new(problem.m(), problem.n_local(), tile).tiles();
            let most = (u64::from(WORKERS) / tiles).clamp(1, MOST_SPLITS);
            (1..=most).map(move |splits| {
                let along_k = u64::from(problem.k_local()) / splits + if splits > 1 { SHARED } else { 0 };
                let time = u128::from(waves(tiles * splits)) * u128::from(area(tile) * cost) * u128::from(along_k);
                (time, tile, splits as u32)
            })
        });
        let (tile, splits) = ways.min_by_key(|way| way.0).map_or((TILES[0].0, 1), |(_, tile, splits)| (tile, splits));
        Self { stack: true, splits, raster: Raster::RowGroups(ROW_GROUP), ..Self::of(tile) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, WorldSize};

    fn heuristic(op: OpKind, m: usize, n: usize, k: usize) -> Schedule {
        let world = WorldSize::new(8).expect("8 is a world size");
        Schedule::heuristic(&Problem::new(op, m, n, k, DType::Bf16, world).expect("a valid problem"))
    }

    #[test]
    fn tiles_make_the_shortest_waves() {
        let tile = |op, m, n, k| heuristic(op, m, n, k).tile.n;
        assert_eq!(tile(OpKind::AllGatherGemm, 8192, 49152, 12288), 256, "12 whole waves");
        assert_eq!(tile(OpKind::GemmReduceScatter, 2048, 12288, 49152), 256, "6 whole waves");
        assert_eq!(tile(OpKind::AllGatherGemm, 1024, 49152, 12288), 192, "2 whole waves, where 256 columns make 1.5");
        assert_eq!(tile(OpKind::GemmReduceScatter, 2048, 512, 4096), 128, "32 wide tiles for 128 SMs");
    }

    fn chosen(world: u32, op: OpKind, m: usize, n: usize, k: usize) -> (u32, u32, u32, bool) {
        let world = WorldSize::new(world).expect("a world size");
        let s = Schedule::heuristic(&Problem::new(op, m, n, k, DType::Bf16, world).expect("a valid problem"));
        (s.tile.m, s.tile.n, s.splits, s.stack)
    }

    #[test]
    fn long_calls_have_large_tiles_where_they_make_as_few_waves() {
        let (ag, rs) = (OpKind::AllGatherGemm, OpKind::GemmReduceScatter);
        let tile = |world, op, m, n, k| {
            let (rows, cols, ..) = chosen(world, op, m, n, k);
            (rows, cols)
        };
        assert_eq!(tile(4, ag, 8192, 49152, 12288), (256, 192), "2.5 T operations, in 16 waves rather than 24 of two thirds");
        assert_eq!(tile(2, rs, 4096, 12288, 49152), (256, 192), "as many, in 8 waves");
        assert_eq!(tile(4, rs, 4096, 12288, 49152), (128, 256), "half of that is short");
        assert_eq!(tile(2, ag, 8192, 28672, 8192), (128, 256), "14336 columns are 56 times 256, and 75 times 192 not quite");
        assert_eq!(tile(4, ag, 4 * 2000, 49152, 12288), (256, 192), "2000 rows are as many of 256 as 2048");
        assert_eq!(tile(4, ag, 4 * 2100, 49152, 12288).0, 128, "2100 rows are 17 blocks of 128, and not 8.5 of 256");
    }

    /// What ran fastest of the tiles and splits on 2 H200 (results/tuning/small-m-tp2.txt, bands-tp2.txt, slim-tiles.txt).
    #[test]
    fn few_rows_are_read_by_all_workers() {
        let chosen = |op, m, n, k| chosen(2, op, m, n, k);
        let (ag, rs) = (OpKind::AllGatherGemm, OpKind::GemmReduceScatter);
        assert_eq!(chosen(ag, 64, 49152, 12288), (64, 192, 1, true), "128 of them");
        assert_eq!(chosen(ag, 64, 28672, 8192), (64, 128, 1, true), "112 narrow ones");
        assert_eq!(chosen(rs, 64, 12288, 49152), (64, 96, 1, true), "128 narrow ones");
        assert_eq!(chosen(rs, 64, 8192, 28672), (64, 64, 1, true), "128 of the smallest, rather than two halves of 64");
        assert_eq!(chosen(rs, 128, 8192, 28672), (128, 64, 1, true), "as many");
        assert_eq!(chosen(ag, 128, 28672, 8192), (128, 128, 1, true), "112 small ones rather than halves of 56 large ones");
        assert_eq!(chosen(rs, 256, 12288, 49152), (128, 192, 1, true), "one pass over w");
        assert!(chosen(rs, 512, 12288, 49152).3 && !chosen(rs, 1024, 12288, 49152).3 && !chosen(ag, 256, 49152, 12288).3);
    }

    /// The same of 8 ranks, one H200 at their shapes (results/tuning/few-rows-tp8.txt, slim-tiles.txt).
    #[test]
    fn small_tiles_come_before_shared_ones() {
        let (ag, rs) = (OpKind::AllGatherGemm, OpKind::GemmReduceScatter);
        assert_eq!(chosen(8, rs, 128, 12288, 49152), (128, 96, 1, true), "128 tiles, rather than halves of 64");
        assert_eq!(chosen(8, ag, 64, 28672, 8192), (64, 64, 2, true), "halves of 56");
        assert_eq!(chosen(8, ag, 256, 28672, 8192), (128, 128, 2, true), "small ones would read x too often");
        assert_eq!(chosen(8, ag, 256, 49152, 12288), (128, 192, 2, true), "halves of 64");
        assert_eq!(chosen(8, rs, 256, 12288, 49152), (128, 192, 1, true), "128 tiles");
    }

    #[test]
    fn partial_tiles_are_early_where_they_were_multiplied_a_wave_before() {
        let early = |world, op, m, n, k| {
            let world = WorldSize::new(world).expect("a world size");
            Schedule::heuristic(&Problem::new(op, m, n, k, DType::Bf16, world).expect("a valid problem")).early
        };
        let (ag, rs) = (OpKind::AllGatherGemm, OpKind::GemmReduceScatter);
        assert_eq!(early(4, rs, 8192, 12288, 49152), 3, "a shard is four waves");
        assert_eq!(early(4, rs, 2048, 12288, 49152), 3, "192 tiles of a shard are one and a half");
        assert_eq!(early(4, rs, 1024, 12288, 49152), 2, "the last shard is in the own one's wave");
        assert_eq!(early(4, rs, 1024, 8192, 28672), 2, "two shards fill the first of two waves");
        assert_eq!(early(4, rs, 512, 8192, 28672), 0, "one wave");
        assert_eq!(early(8, rs, 2048, 12288, 49152), 6);
        assert_eq!(early(8, rs, 1024, 12288, 49152), 0, "48 own tiles");
        assert_eq!(early(2, rs, 8192, 12288, 49152), 1);
        assert_eq!(early(4, rs, 8192, 12288, 4 * 1088), 2, "17 steps along k, of which two have four each behind the eighth");
        assert_eq!((early(8, rs, 256, 12288, 49152), early(4, ag, 8192, 49152, 12288)), (0, 0), "nothing is added to tiles");
    }

    #[test]
    fn rows_longer_than_a_piece_still_make_a_chunk() {
        let schedule = heuristic(OpKind::AllGatherGemm, 8 * 512, 8192, 1 << 20);
        assert_eq!(schedule.chunk, Chunk::Tiles(1));
        assert_eq!(heuristic(OpKind::AllGatherGemm, 1024, 49152, 12288).chunk, Chunk::Shard);
    }
}
