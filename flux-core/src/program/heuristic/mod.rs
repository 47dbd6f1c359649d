//! The schedule of whoever names none.
//!
//! Invariant: a schedule depends on the problem alone, so all ranks choose the same.

mod bands;
mod few_rows;

use super::most_early;
use super::schedule::{Chunk, Schedule};
use crate::layout::{gather_place_bytes, slot_bytes};
use crate::tile::{Raster, TileGrid};
use crate::{OpKind, Problem, TileShape};
use bands::LINK;

/// Largest piece of a shard that one signal announces by default: some 12 us of a link, so that a reader starts after a fraction of a large shard.
const PIECE_BYTES: u64 = 4 << 20;
/// What one signal announces where a chunk is staged.
const STAGED_BYTES: u64 = 2 << 20;
/// Rows that share a pass over `w` by default. With 128, an H200 is bound by reading `w` from memory: the AllGather-GEMM of GPT-3 at
/// m = 512 on 4 ranks reads its 302 MB of `w` four times in the time of two waves of tiles.
const BAND_ROWS: u32 = 512;
/// Rows of the usual tiles: a shard with fewer leaves a part of each idle.
const ROWS: u32 = 128;
/// Rows of a shard from which on a GEMM-ReduceScatter of two ranks has tiles of one shard: with fewer the own shard, which is then worked on last and by itself, reads
/// all of `w` once more in too short a time (results/tuning/wide-bands.txt). Of four ranks tiles that span shards are slower at 512 rows in all (results/tuning/small-m.txt).
const PAIR_ROWS: u32 = 256;
/// What a rank sends of one slice along k, to all who await it together, where tiles await several shards: they begin when the first slice is there. About 3 us of a
/// link; fewer slices are slower, more bring nothing (results/tuning/slices-tp2.txt).
const SLICE_BYTES: u64 = 1 << 20;
/// Most slices.
const MOST_SLICES: u32 = 12;
/// Workers that a wave of tiles is counted for: SMs of an H200, less four, which make 128x256 tiles of the reference shapes whole waves.
pub(super) const WORKERS: u32 = 128;
/// SMs of an H200, and so the workers of a call: what is in one wave of tiles is finished at nearly the same time.
pub(super) const MULTIPROCESSORS: u32 = WORKERS + 4;
/// Operations of a multiprocessor in a nanosecond: 4096 a cycle at 1.5 GHz, of a card at its power limit.
pub(super) const OPERATIONS: u64 = 6144;
/// Tiles to choose from, with the time of one step of a tile relative to its area: 128x128 moves more operand bytes for
/// its work, so it has to gain something in waves.
pub(super) const TILES: [(TileShape, u64); 4] = [
    (TileShape::new(128, 256, 64), 100),
    (TileShape::new(128, 224, 64), 100),
    (TileShape::new(128, 192, 64), 100),
    (TileShape::new(128, 128, 64), 101),
];
/// The same of a GEMM-ReduceScatter whose tiles are of one shard, in the order of [`TILES`]: the last wave's partial tiles leave when nothing is left to multiply, so there is
/// more to gain by narrow tiles, and what they cost matters (128x128: results/tuning/wide-bands.txt; the others by their operand bytes).
const TO_SEND: [u64; 4] = [100, 101, 103, 110];
/// Tile to choose from, too, where it is long along `k`, with its costs in [`TILES`] and [`TO_SEND`]. It moves an eighth less through L2 than 128x256 and a quarter less from memory:
/// at the card's power limit it takes 2 to 4 % less time (results/tuning/back-to-back.txt), with rests, and full clocks, up to 2.2 % less (results/tuning/rests.txt).
const LARGE: (TileShape, u64) = (TileShape::new(256, 192, 64), 99);
/// Steps along `k` from which on it is long enough, as its ends are longer. With fewer it was not measured.
const LARGE_STEPS: u32 = 96;
/// Operations of a rank from which on it is a choice for partial tiles that are staged, too: some 3 ms of an H200. GPT-3 at TP 2 and m = 1024, a quarter of that, takes 19 % more
/// time over `pcie` with it (results/h200-x2-pcie.json, 8be58e2).
const LONG: u64 = 2_000_000_000_000;
/// Bytes of `w` in a nanosecond that a GEMM-ReduceScatter is bound by, where it is read more than once: GPT-3 at TP 2 and m = 512 reads 1.2 GB in 0.41 ms (results/tuning/rests.txt).
const READ: u64 = 2900;

/// Waves of a GEMM-ReduceScatter from which on what they leave is shared. With rests, Llama-2 70B at m = 8192, 15.5 waves, takes 1.4 % less to 0.2 more time so, and 0.3 to
/// 1.5 % more at 4096, 7.8 waves; GPT-3 with 11.6 between 0.4 % less and 0.2 more (results/tuning/rests.txt).
const SHARED_WAVES: u64 = 12;

/// Row blocks of a raster group: their tiles are worked on side by side.
pub(super) const ROW_GROUP: u32 = 8;

fn waves(items: u64) -> u64 {
    items.div_ceil(u64::from(WORKERS))
}

fn area(tile: TileShape) -> u64 {
    u64::from(tile.m) * u64::from(tile.n)
}

/// Slices of k of an AllGather-GEMM in such bands.
fn slices(problem: &Problem, band: u32) -> u32 {
    let sent = gather_place_bytes(problem) * u64::from(band - 1);
    u32::try_from(sent / SLICE_BYTES).unwrap_or(u32::MAX).clamp(1, MOST_SLICES)
}

/// The tile of a problem whose tiles do not span shards, of which [`LARGE`] may be one.
fn usual_tile(problem: &Problem, may_be_large: bool) -> TileShape {
    let of_shard = |tile| TileGrid::of_shard(problem, tile).tiles();
    let tiles = |tile| u64::from(problem.world().get()) * of_shard(tile);
    let multiplied = |tile, cost: u64| {
        let area = u128::from(waves(tiles(tile)) * area(tile));
        area * u128::from(cost * 2 * u64::from(problem.k_local())) / u128::from(100 * OPERATIONS)
    };
    let w_bytes = u64::from(problem.n_local()) * u64::from(problem.k_local()) * problem.dtype().bytes() as u64;
    // Nanoseconds in which `w` is read: for the peers' shards and, where these are not in one wave with it, for the own one.
    let read = |tile| {
        let passes = if tiles(tile) > u64::from(MULTIPROCESSORS) { 2 } else { 1 };
        passes * u128::from(w_bytes / READ)
    };
    // Nanoseconds of the link for the peers' tiles of the last wave.
    let sent = |tile| {
        let last_wave = (tiles(tile) - 1) / u64::from(MULTIPROCESSORS) * u64::from(MULTIPROCESSORS);
        u128::from((tiles(tile) - of_shard(tile)).saturating_sub(last_wave) * slot_bytes(problem, tile) / LINK)
    };
    let is_long = problem.k_local().div_ceil(LARGE.0.k) >= LARGE_STEPS;
    let large = (may_be_large && is_long).then_some((LARGE, LARGE.1));
    let candidates = large.into_iter().chain(TILES.into_iter().zip(TO_SEND));
    let fastest = match problem.op() {
        OpKind::AllGatherGemm => candidates.min_by_key(|&((tile, cost), _)| multiplied(tile, cost)),
        OpKind::GemmReduceScatter => candidates.min_by_key(|&((tile, _), cost)| multiplied(tile, cost).max(read(tile)) + sent(tile)),
    };
    fastest.map_or(TILES[0].0, |((tile, _), _)| tile)
}

impl Schedule {
    /// A schedule that is reasonable without measurement. A heuristic, made for Hopper GPUs over NVLink: a tuned choice is better.
    ///
    /// - Tile: the one of 256x192x64, if `k` is long enough, 128x256x64, 128x224x64, 128x192x64 and 128x128x64 whose waves over the SMs, and the partial tiles that leave after the
    ///   last, take the least time, the first of equals.
    /// - Chunk: for AllGather-GEMM the shard, in row blocks of at most 4 MiB where it is larger; for GEMM-ReduceScatter one tile.
    /// - Raster: groups of 8 row blocks, so that the tiles in flight share their operands in L2; bands of at least 512 rows, of more where they need not wait, and of an
    ///   AllGather-GEMM's of a wave of tiles.
    /// - Partial tiles of a GEMM-ReduceScatter early, if they were multiplied a wave before the tile that they are added to; where the own tiles are more than a wave.
    /// - What whole waves leave of the tiles is shared by groups of workers, where that gains time; for GEMM-ReduceScatter from twelve waves on.
    /// - Slices of `k`: where a band has several shards, so that its tiles begin before all of their rows are there.
    /// - Shards of fewer than 128 rows, and than 256 for a GEMM-ReduceScatter of two ranks: tiles span them, of 64 rows where there are no more in all; with at
    ///   most 128 rows narrower ones stand to choose too, and two or three items share a tile where that takes less time.
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
        Self::shard_by_shard(problem).in_whole_waves(problem).in_wider_bands(problem)
    }

    /// What whole waves leave of the tiles shared, and first, but for the largest tiles: those are for calls at the card's power limit, and shared they take 1 to 2 % more time back
    /// to back (results/tuning/shares-of-a-wave.txt). Nor where `k` comes in slices: whoever has the last steps of a tile would await the last slice first. Nor for short calls of
    /// GEMM-ReduceScatter, which end when all workers have added partial tiles, and not only those that are left in the last wave.
    fn in_whole_waves(self, problem: &Problem) -> Self {
        if self.tile == LARGE.0 || self.k_chunks > 1 {
            return self;
        }
        let tiles = u64::from(problem.world().get()) * TileGrid::of_shard(problem, self.tile).tiles();
        let shared = Self { shares: MULTIPROCESSORS, ..self };
        let gains = match problem.op() {
            OpKind::AllGatherGemm => true,
            OpKind::GemmReduceScatter => tiles >= SHARED_WAVES * u64::from(MULTIPROCESSORS),
        };
        if gains && shared.shared_first(problem).is_some() { shared } else { self }
    }

    /// The same for transports whose shards come and go one after another.
    pub(super) fn shard_by_shard(problem: &Problem) -> Self {
        let pair = problem.op() == OpKind::GemmReduceScatter && problem.world().get() == 2;
        if problem.m_shard() < ROWS || pair && problem.m_shard() < PAIR_ROWS {
            return Self::stacked(problem);
        }
        let tile = usual_tile(problem, true);
        let chunk = match problem.op() {
            OpKind::AllGatherGemm if gather_place_bytes(problem) <= PIECE_BYTES => Chunk::Shard,
            OpKind::AllGatherGemm => {
                let row_block_bytes = gather_place_bytes(problem) / u64::from(problem.m_shard()) * u64::from(tile.m);
                Chunk::Tiles(u32::try_from(PIECE_BYTES / row_block_bytes).unwrap_or(u32::MAX).max(1))
            }
            OpKind::GemmReduceScatter => Chunk::Tiles(1),
        };
        let band = BAND_ROWS.div_ceil(problem.m_shard().next_multiple_of(tile.m)).min(problem.world().get());
        let k_chunks = if problem.op() == OpKind::AllGatherGemm { slices(problem, band) } else { 1 };
        Self { chunk, raster: Raster::RowGroups(ROW_GROUP), band, k_chunks, ..Self::of(tile) }
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
        let usual = Self::shard_by_shard(problem);
        if problem.op() == OpKind::AllGatherGemm && usual.stack {
            return usual;
        }
        let thin = TileShape::new(64, 128, 64);
        let tile = match problem.op() {
            _ if usual.stack && problem.m_shard() <= thin.m => thin,
            // What leaves a GEMM-ReduceScatter, the host or the network carries slowly: in short calls the sooner it begins the better.
            OpKind::GemmReduceScatter if !usual.stack => usual_tile(problem, problem.flop_per_rank() >= LONG),
            _ => usual.tile,
        };
        let unit = match problem.op() {
            OpKind::AllGatherGemm => gather_place_bytes(problem) / u64::from(problem.m_shard()) * u64::from(tile.m),
            OpKind::GemmReduceScatter => slot_bytes(problem, tile),
        };
        let tiles = u32::try_from(STAGED_BYTES / unit.max(1)).unwrap_or(u32::MAX).max(1);
        Self { chunk: Chunk::Tiles(tiles), raster: usual.raster, ..Self::of(tile) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, WorldSize};

    #[test]
    fn tiles_make_the_shortest_waves() {
        let tile = |op, m, n, k| own(8, op, m, n, k).tile.n;
        assert_eq!(tile(OpKind::AllGatherGemm, 8192, 28672, 8192), 256, "7 whole waves");
        assert_eq!(tile(OpKind::GemmReduceScatter, 2048, 12288, 49152), 256, "6 whole waves, of whose last less is sent than of 4");
        assert_eq!(tile(OpKind::AllGatherGemm, 1024, 49152, 12288), 192, "2 whole waves, where 256 columns make 1.5");
        assert_eq!(tile(OpKind::GemmReduceScatter, 2048, 512, 4096), 128, "32 wide tiles for 128 SMs");
        assert_eq!(
            own(4, OpKind::GemmReduceScatter, 512, 8192, 28672).tile.n,
            128,
            "one wide wave would send when nothing is left to multiply"
        );
        assert_eq!(own(2, OpKind::GemmReduceScatter, 512, 8192, 28672).tile.n, 256, "with twice the work for the same bytes");
    }

    #[test]
    fn what_whole_waves_leave_is_shared_but_of_the_largest_tiles_and_in_slices() {
        let (ag, rs) = (OpKind::AllGatherGemm, OpKind::GemmReduceScatter);
        let shares = |world, op, m, n, k| own(world, op, m, n, k).shares;
        assert_eq!(shares(4, ag, 4096, 28672, 8192), 132, "104 tiles of 128x256");
        assert_eq!([shares(4, rs, 4096, 12288, 49152), shares(4, rs, 8192, 8192, 28672)], [1, 132], "11.6 waves, and 15.5");
        assert_eq!(shares(4, ag, 8192, 49152, 12288), 1, "68 tiles of 256x192");
        assert_eq!(shares(4, ag, 2048, 28672, 8192), 1, "116 of 128x224 are nearly a wave");
        let problem =
            |m| Problem::new(ag, m, 24576, 12288, DType::Bf16, WorldSize::new(4).expect("a world size")).expect("a valid problem");
        let wide = |k_chunks| Schedule { k_chunks, ..Schedule::of(TILES[0].0) }.in_whole_waves(&problem(1024)).shares;
        assert_eq!([wide(1), wide(6)], [132, 1], "60 tiles, which await slices");
        assert_eq!(Schedule::staged(&problem(4096)).shares, 1, "chunks that are carried come later");
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
    fn what_is_long_along_k_has_large_tiles_where_they_make_as_few_waves() {
        let (ag, rs) = (OpKind::AllGatherGemm, OpKind::GemmReduceScatter);
        let tile = |world, op, m, n, k| {
            let (rows, cols, ..) = chosen(world, op, m, n, k);
            (rows, cols)
        };
        assert_eq!(tile(4, ag, 8192, 49152, 12288), (256, 192), "192 steps, in 16 waves rather than 24 of two thirds");
        assert_eq!(tile(4, ag, 1024, 49152, 12288), (256, 192), "in 2 waves");
        assert_eq!(tile(4, ag, 8192, 49152, 4096), (128, 256), "64 steps");
        assert_eq!(tile(4, rs, 1024, 12288, 49152), (128, 256), "of 2 waves the link would carry 60 tiles after the last");
        assert_eq!(tile(2, rs, 512, 12288, 49152), (256, 192), "64, but `w` is read once");
        let staged = |m| {
            Schedule::staged(&Problem::new(rs, m, 12288, 49152, DType::Bf16, WorldSize::new(2).expect("two ranks")).expect("a problem"))
        };
        assert_eq!([staged(1024).tile.m, staged(4096).tile.m], [128, 256], "0.6 T operations, and 2.5");
        assert_eq!(tile(2, ag, 8192, 28672, 8192), (128, 256), "14336 columns are 56 times 256, and 75 times 192 not quite");
        assert_eq!(tile(4, ag, 4 * 2000, 49152, 12288), (256, 192), "2000 rows are as many of 256 as 2048");
        assert_eq!(tile(4, ag, 4 * 2100, 49152, 12288).0, 128, "2100 rows are 17 blocks of 128, and not 8.5 of 256");
    }

    #[test]
    fn rows_longer_than_a_piece_still_make_a_chunk() {
        let schedule = own(8, OpKind::AllGatherGemm, 8 * 512, 8192, 1 << 20);
        assert_eq!(schedule.chunk, Chunk::Tiles(1));
        assert_eq!(own(8, OpKind::AllGatherGemm, 1024, 49152, 12288).chunk, Chunk::Shard);
    }
}
