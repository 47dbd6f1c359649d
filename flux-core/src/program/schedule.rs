//! The tuning knobs of a tile program.
//!
//! Invariant: no value of a [`Schedule`] changes what is computed, only when and in which pieces; `splits`, and `stack` for GEMM-ReduceScatter, also where
//! it is rounded.

use super::ScheduleError;
use crate::layout::{gather_place_bytes, slot_bytes};
use crate::problem::MAX_EXTENT;
use crate::tile::{Raster, TileExtent, TileGrid};
use crate::{OpKind, Problem, TileShape, WorldSize};
use std::fmt;
use std::ops::Range;

/// How much of a shard one signal announces: the communication tile, independent of the GEMM tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Chunk {
    /// The whole shard.
    Shard,
    /// So many tiles of the shard, at least 1; as many as the shard has, or more, are the whole shard.
    ///
    /// What is sent decides how they are counted. AllGather-GEMM sends rows of `x`: row blocks of `tile.m` rows each.
    /// GEMM-ReduceScatter sends partial tiles: tiles, in the order of the raster. Either way `Tiles(1)` is the finest.
    Tiles(u32),
}

impl fmt::Display for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shard => f.write_str("shard"),
            Self::Tiles(tiles) => write!(f, "{tiles} tiles"),
        }
    }
}

/// How a problem is cut and ordered. All ranks of a call use the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Schedule {
    /// Extents of a GEMM tile.
    pub tile: TileShape,
    /// How much one signal announces.
    pub chunk: Chunk,
    /// Order of the tiles within every shard.
    pub raster: Raster,
    /// Shards whose tiles are worked on side by side: 1 and a shard is finished before the next is begun.
    ///
    /// Every band reads all of `w` once, as long as its tiles keep in step. Thin shards, of a few row blocks, are therefore better taken several at
    /// a time, though for AllGather-GEMM the band then begins when its last rows are there. For GEMM-ReduceScatter the own shard is always a band of
    /// its own.
    pub band: u32,
    /// Most slices that the columns of a shard, its `k`, are cut into, each with signals of its own (AllGather-GEMM): 1 and whole rows are announced.
    ///
    /// An item waits for a slice only when it comes to it, so that with several it begins when the first is there. Slices end at steps of `tile.k`.
    pub k_chunks: u32,
    /// Items that share a tile, each of which multiplies a part of `k`; more than `k` has steps are as many as it has steps.
    ///
    /// For problems with fewer tiles than there are workers. The parts are added in the order of `k`, in fp32: the same bits in every run, but others
    /// than those of another number of splits.
    pub splits: u32,
    /// Whether tiles span shards, for shards with fewer rows than a tile. Means nothing in a world of 1.
    ///
    /// For GEMM-ReduceScatter it changes what is rounded: every rank's product, the own one too, is then rounded before all are added.
    pub stack: bool,
}

/// Largest piece of a shard that one signal announces by default: some 12 us of a link, so that a reader starts after a fraction of a large shard.
const PIECE_BYTES: u64 = 4 << 20;
/// What one signal announces where a chunk is staged.
const STAGED_BYTES: u64 = 2 << 20;
/// Row blocks that share a pass over `w` by default. With one, an H200 is bound by reading `w` from memory: the AllGather-GEMM of GPT-3 at
/// m = 512 on 4 ranks reads its 302 MB of `w` four times in the time of two waves of tiles.
const BAND_ROW_BLOCKS: u32 = 4;
/// Rows of the usual tiles: a shard with fewer leaves a part of each idle.
const ROWS: u32 = 128;
/// The tile for few rows.
const THIN: TileShape = TileShape::new(64, 128, 64);
/// Elements of a slice along k, for each row block of a shard, where tiles await several shards: they begin when the first slice is there.
const SLICE_COLUMNS: u32 = 2048;
/// Workers that a wave of tiles is counted for: SMs of an H200, less four, which make 128x256 tiles of the reference shapes whole waves.
pub(super) const WORKERS: u32 = 128;
/// Tiles to choose from, with the time of one step of a tile relative to its area: 128x128 moves more operand bytes for
/// its work, so it has to gain something in waves.
const TILES: [(TileShape, u64); 3] =
    [(TileShape::new(128, 256, 64), 100), (TileShape::new(128, 192, 64), 100), (TileShape::new(128, 128, 64), 101)];

fn waves(items: u64) -> u64 {
    items.div_ceil(u64::from(WORKERS))
}

fn area(tile: TileShape) -> u64 {
    u64::from(tile.m) * u64::from(tile.n)
}

impl Schedule {
    /// A schedule that is reasonable without measurement. A heuristic, made for Hopper GPUs over NVLink: a tuned choice is better.
    ///
    /// - Tile: the one of 128x256x64, 128x192x64 and 128x128x64 whose waves over the SMs take the least time, the largest of equals.
    /// - Chunk: for AllGather-GEMM the shard, in row blocks of at most 4 MiB where it is larger; for GEMM-ReduceScatter one tile.
    /// - Raster: groups of 8 row blocks, so that the tiles in flight share their operands in L2; bands of at least 4 row blocks.
    /// - Slices of `k`: where a band has several shards, so that its tiles begin before all of their rows are there.
    /// - Shards of fewer than 128 rows: tiles span them, of 64 rows where there are no more in all, and two items share a tile where there are
    ///   otherwise fewer than half as many as SMs.
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
        if problem.m_shard() < ROWS {
            return Self::stacked(problem);
        }
        let tiles = |tile| u64::from(problem.world().get()) * TileGrid::of_shard(problem, tile).tiles();
        let tile = TILES.iter().min_by_key(|&&(tile, cost)| waves(tiles(tile)) * area(tile) * cost).map_or(TILES[0].0, |t| t.0);
        let chunk = match problem.op() {
            OpKind::AllGatherGemm if gather_place_bytes(problem) <= PIECE_BYTES => Chunk::Shard,
            OpKind::AllGatherGemm => {
                let row_block_bytes = gather_place_bytes(problem) / u64::from(problem.m_shard()) * u64::from(tile.m);
                Chunk::Tiles(u32::try_from(PIECE_BYTES / row_block_bytes).unwrap_or(u32::MAX).max(1))
            }
            OpKind::GemmReduceScatter => Chunk::Tiles(1),
        };
        let row_blocks = TileGrid::of_shard(problem, tile).row_blocks();
        let band = BAND_ROW_BLOCKS.div_ceil(row_blocks).min(problem.world().get());
        let k_chunks = match problem.op() {
            OpKind::AllGatherGemm if band > 1 => (problem.k_local() / (SLICE_COLUMNS * row_blocks)).max(1),
            _ => 1,
        };
        Self { chunk, raster: Raster::RowGroups(8), band, k_chunks, ..Self::of(tile) }
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
        let tile = if usual.stack && problem.m_shard() <= THIN.m { THIN } else { usual.tile };
        let unit = match problem.op() {
            OpKind::AllGatherGemm => gather_place_bytes(problem) / u64::from(problem.m_shard()) * u64::from(tile.m),
            OpKind::GemmReduceScatter => slot_bytes(problem, tile),
        };
        let tiles = u32::try_from(STAGED_BYTES / unit.max(1)).unwrap_or(u32::MAX).max(1);
        Self { chunk: Chunk::Tiles(tiles), raster: usual.raster, ..Self::of(tile) }
    }

    /// For shards with fewer rows than a tile. Such a call is bound by reading `w`: what matters is that all workers do.
    fn stacked(problem: &Problem) -> Self {
        let tiles = |tile| TileGrid::new(problem.m(), problem.n_local(), tile).tiles();
        let splits = |tile| if 2 * tiles(tile) <= u64::from(WORKERS) { 2 } else { 1 };
        let time =
            |&(tile, cost): &(TileShape, u64)| waves(tiles(tile) * u64::from(splits(tile))) * area(tile) * cost / u64::from(splits(tile));
        let tile = match TILES.iter().min_by_key(|t| time(t)) {
            Some(&(tile, _)) if problem.m() > THIN.m => tile,
            _ => THIN,
        };
        Self { stack: true, splits: splits(tile), raster: Raster::RowGroups(8), ..Self::of(tile) }
    }

    /// The heuristic's schedule for a transport whose chunks are messages of at least `bytes`: whole rows and tiles of one shard each, and no more chunks
    /// than four of a shard.
    ///
    /// A message costs the same to begin whatever its size, so small problems are sent as whole shards. Tiles that span shards have no one reader, so
    /// the shards of small problems are taken side by side instead: they still share one pass over `w`.
    pub fn in_messages(problem: &Problem, bytes: u64) -> Self {
        let own = Self::heuristic(problem);
        let (shard, piece) = match problem.op() {
            OpKind::AllGatherGemm => {
                let row = gather_place_bytes(problem) / u64::from(problem.m_shard());
                (gather_place_bytes(problem), row * u64::from(own.tile.m))
            }
            OpKind::GemmReduceScatter => {
                let slot = slot_bytes(problem, own.tile);
                (TileGrid::of_shard(problem, own.tile).tiles() * slot, slot)
            }
        };
        let tiles = shard.div_ceil(4).max(bytes).div_ceil(piece);
        let chunk = u32::try_from(tiles).map_or(Chunk::Shard, Chunk::Tiles);
        let (band, splits) = if own.stack { (problem.world().get(), 1) } else { (own.band, own.splits) };
        Self { chunk, band, splits, k_chunks: 1, stack: false, ..own }
    }

    /// The simplest schedule of these tiles: whole shards, one after another, each tile one item.
    ///
    /// ```
    /// use flux_core::TileShape;
    /// use flux_core::program::{Chunk, Schedule};
    /// let schedule = Schedule { chunk: Chunk::Tiles(1), ..Schedule::of(TileShape::new(128, 256, 64)) };
    /// assert_eq!((schedule.band, schedule.k_chunks, schedule.splits, schedule.stack), (1, 1, 1, false));
    /// ```
    pub const fn of(tile: TileShape) -> Self {
        Self { tile, chunk: Chunk::Shard, raster: Raster::RowsFastest, band: 1, k_chunks: 1, splits: 1, stack: false }
    }

    /// What makes the schedule unusable whatever the problem.
    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        let Self { tile, chunk, raster, band, k_chunks, splits, stack: _ } = *self;
        for (name, value) in [("tile.m", tile.m), ("tile.n", tile.n), ("tile.k", tile.k)] {
            if value == 0 {
                return Err(ScheduleError::Zero { name });
            }
            if value > MAX_EXTENT {
                return Err(ScheduleError::TooLarge { name, value });
            }
        }
        for (name, value) in [("band", band), ("k_chunks", k_chunks), ("splits", splits)] {
            if value == 0 {
                return Err(ScheduleError::Zero { name });
            }
        }
        match (chunk, raster) {
            (Chunk::Tiles(0), _) => Err(ScheduleError::Zero { name: "chunk" }),
            (_, Raster::RowGroups(0)) => Err(ScheduleError::Zero { name: "raster group" }),
            _ => Ok(()),
        }
    }

    /// The tiles of the shards at `steps`, band by band, with their step; each shard's in the order of the raster.
    pub(super) fn in_bands(&self, grid: TileGrid, steps: Range<u32>) -> impl Iterator<Item = (TileExtent, u32)> {
        let (raster, band) = (self.raster, self.band);
        let bands = steps.clone().step_by(band as usize);
        bands.flat_map(move |first| {
            let shards = first..steps.end.min(first.saturating_add(band));
            grid.order(raster).flat_map(move |tile| shards.clone().map(move |step| (tile, step)))
        })
    }

    /// The steps whose shards share a band with that of `step`, counted from 0 (AllGather-GEMM).
    pub(super) fn band_of(&self, step: u32, world: WorldSize) -> Range<u32> {
        let first = step - step % self.band;
        first..first.saturating_add(self.band).min(world.get())
    }

    /// Tiles of a chunk: row blocks for AllGather-GEMM, tiles for GEMM-ReduceScatter, of the `available` ones of a shard.
    pub(super) fn chunk_of(&self, available: u32) -> u32 {
        match self.chunk {
            Chunk::Shard => available,
            Chunk::Tiles(tiles) => tiles.min(available),
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tile, chunk, raster, band, k_chunks, splits, stack } = self;
        write!(f, "tile {tile}, chunk {chunk}, {raster}, band {band}")?;
        if *k_chunks > 1 {
            write!(f, ", {k_chunks} slices of k")?;
        }
        if *splits > 1 {
            write!(f, ", {splits} splits")?;
        }
        f.write_str(if *stack { ", stacked" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::TileProgram;
    use crate::{DType, Rank};

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

    #[test]
    fn messages_are_whole_shards_or_large_pieces_of_them() {
        let world = WorldSize::new(8).expect("8 is a world size");
        for op in [OpKind::AllGatherGemm, OpKind::GemmReduceScatter] {
            for m in [64, 512, 1024, 8192] {
                let (n, k) = if op == OpKind::AllGatherGemm { (49152, 12288) } else { (12288, 49152) };
                let problem = Problem::new(op, m, n, k, DType::Bf16, world).expect("a valid problem");
                let schedule = Schedule::in_messages(&problem, 4 << 20);
                let program = TileProgram::build(&problem, Rank::new(3), &schedule).expect("a valid schedule");
                let rounds = program.rounds().expect("whole ranges of places");
                assert!((7..=28).contains(&rounds.len()), "{op} m={m}: {} rounds", rounds.len());
                let largest = rounds.iter().map(|round| round.bytes).max();
                assert!(largest >= Some((4 << 20).min(program.place_bytes())), "{op} m={m}: {largest:?}");
            }
        }
    }

    #[test]
    fn rows_longer_than_a_piece_still_make_a_chunk() {
        let schedule = heuristic(OpKind::AllGatherGemm, 8 * 512, 8192, 1 << 20);
        assert_eq!(schedule.chunk, Chunk::Tiles(1));
        assert_eq!(heuristic(OpKind::AllGatherGemm, 1024, 49152, 12288).chunk, Chunk::Shard);
    }
}
