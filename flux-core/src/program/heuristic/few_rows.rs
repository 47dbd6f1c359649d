//! Few rows: tiles that span shards. Few tiles: several items share each.
//!
//! Invariant: such a call is bound by what its workers read; what matters is that all do, to the
//! end.

use super::tiles::{TILES, area, waves};
use super::{Chunk, ROW_GROUP, Schedule, WORKERS, ragged};
use crate::tile::{Raster, TileGrid};
use crate::{OpKind, Problem, TileShape};

/// Rows of thin tiles.
pub(in crate::program) const THIN_ROWS: u32 = 64;
/// Tiles for at most so many rows, as [`TILES`]: small ones read `x` more often
/// (results/tuning/slim-tiles.txt).
const THIN: [(TileShape, u64); 5] = [
    (TileShape::new(64, 256, 64), 100),
    (TileShape::new(64, 192, 64), 100),
    (TileShape::new(64, 128, 64), 100),
    (TileShape::new(64, 96, 64), 102),
    (TileShape::new(64, 64, 64), 105),
];
/// Tiles besides [`TILES`] for at most 128 rows: more SMs read `w`. With more rows they read `x`
/// too often.
const SLIM: [(TileShape, u64); 2] = [(TileShape::new(128, 96, 64), 102), (TileShape::new(128, 64, 64), 105)];
/// What a wave of thin tiles takes besides, in columns of them: 112 tiles of 64x256 take 104 us
/// over NCCL, 224 of 64x128 126 us, and 448 of 64x64 168 us (results/tuning/short-calls.txt).
const WAVE: u64 = 48;
/// What it costs to share a tile, in elements along k: what the others have summed is written,
/// announced, fetched and added. For GEMM-ReduceScatter of GPT-3 at m = 128, 64 tiles of 128x192 in
/// two parts take 14 % more time than 96 of 128x128 with k = 6144
/// (results/tuning/few-rows-tp8.txt), and less with 24576; for AllGather-GEMM at m = 256 with
/// 12288, 14 % less.
const SHARED: u64 = 2000;
/// Most items that share a tile: a fourth brought nothing.
const MOST_SPLITS: u64 = 3;

/// Rows from which on tiles that span shards take rows in slices of k. With fewer what they read of
/// `w` bounds them, and the simulator, by which this was found, has not been held against
/// measurements; two H200 gained nothing by it at 64 to 256 rows (results/tuning/slices-tp2.txt).
const SLICED_ROWS: u32 = 512;

/// Into how many items each of so many tiles may be split while all are one wave of so many
/// workers, and how long along k each then is by its time.
fn ways_to_split(problem: &Problem, tiles: u64, workers: u32) -> impl Iterator<Item = (u64, u64)> + use<> {
    let (k, most) = (u64::from(problem.k_local()), (u64::from(workers) / tiles).clamp(1, MOST_SPLITS));
    (1..=most).map(move |splits| (splits, k / splits + if splits > 1 { SHARED } else { 0 }))
}

/// The tile of shards of at most 64 rows, each of which is worked on by itself.
pub(in crate::program) fn thin(problem: &Problem) -> TileShape {
    let tiles = |tile| u64::from(problem.world().get()) * TileGrid::of_shard(problem, tile).tiles();
    let time = |&tile: &TileShape| waves(tiles(tile)) * (u64::from(tile.n) + WAVE);
    THIN.map(|(tile, _)| tile).into_iter().min_by_key(time).unwrap_or(THIN[0].0)
}

impl Schedule {
    /// Where the tiles of a GEMM-ReduceScatter with peers are for half of the workers at most, and
    /// long along k, two or three items share each: simulated, TP 4 with m = 512, n = 1024 and k =
    /// 65536 takes 0.053 ms instead of 0.109 (docs/experiments.md). AllGather-GEMM has [other
    /// means](Self::in_whole_waves), and in slices of k a part would await the last of them.
    pub(super) fn in_splits(self, problem: &Problem) -> Self {
        if self.stack || problem.op() == OpKind::AllGatherGemm || problem.world().peers() == 0 {
            return self;
        }
        let tiles = u64::from(problem.world().get()) * TileGrid::of_shard(problem, self.tile).tiles();
        let fastest = ways_to_split(problem, tiles, WORKERS).min_by_key(|way| way.1);
        Self { splits: fastest.map_or(1, |(splits, _)| splits as u32), ..self }
    }

    /// Of the tiles that there are for so many rows, and of the ways to share them, the one whose
    /// waves over so many workers take the least time.
    pub(in crate::program) fn flattened(problem: &Problem, workers: u32) -> Self {
        let candidates = match problem.m() {
            ..=64 => THIN.to_vec(),
            65..=128 => [TILES.as_slice(), &SLIM].concat(),
            _ if ragged::is_ragged(problem) => ragged::that_span(problem),
            _ => TILES.to_vec(),
        };
        let ways = candidates.into_iter().flat_map(|(tile, cost)| {
            let tiles = TileGrid::new(problem.m(), problem.n_local(), tile).tiles();
            ways_to_split(problem, tiles, workers).map(move |(splits, along_k)| {
                let time = u128::from((tiles * splits).div_ceil(workers.into())) * u128::from(area(tile) * cost) * u128::from(along_k);
                (time, tile, splits as u32)
            })
        });
        let (tile, splits) = ways.min_by_key(|way| way.0).map_or((TILES[0].0, 1), |(_, tile, splits)| (tile, splits));
        Self::spanning(problem, tile, splits)
    }

    /// Of these tiles, which span shards.
    pub(in crate::program) fn spanning(problem: &Problem, tile: TileShape, splits: u32) -> Self {
        let chunk = if problem.op() == OpKind::AllGatherGemm { Chunk::Shard } else { Chunk::Tiles(1) };
        Self { chunk, stack: true, splits, raster: Raster::RowGroups(ROW_GROUP), ..Self::of(tile) }
    }

    /// What tiles that span shards wait for in slices of k, so that they begin when the first is
    /// there, and not when all rows are.
    pub(super) fn in_slices(self, problem: &Problem) -> Self {
        if !self.stack || problem.op() == OpKind::GemmReduceScatter || problem.m() < SLICED_ROWS {
            return self;
        }
        self.in_best_slices(problem)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Schedule;
    use super::super::tests::{chosen, own, simulated_with};
    use crate::{DType, OpKind, Problem, WorldSize};

    /// What ran fastest of the tiles and splits on 2 H200 (results/tuning/small-m-tp2.txt,
    /// bands-tp2.txt, slim-tiles.txt).
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
        assert!(!chosen(rs, 512, 12288, 49152).3 && !chosen(rs, 512, 8192, 28672).3 && !chosen(ag, 256, 49152, 12288).3);
    }

    /// What ran fastest on 2 H200 over NCCL, or within 6 % of it (results/tuning/short-calls.txt).
    #[test]
    fn few_rows_that_are_not_stacked_have_few_waves() {
        let tile = |op, m, n, k| {
            let problem = Problem::new(op, m, n, k, DType::Bf16, WorldSize::new(2).expect("two ranks")).expect("a problem");
            super::thin(&problem).n
        };
        let (ag, rs) = (OpKind::AllGatherGemm, OpKind::GemmReduceScatter);
        for m in [64, 128] {
            assert_eq!([tile(ag, m, 28672, 8192), tile(ag, m, 49152, 12288)], [256, 192], "112 tiles, and 256");
            assert_eq!([tile(rs, m, 8192, 28672), tile(rs, m, 12288, 49152)], [128, 192], "128 each");
        }
    }

    /// Where tiles are few and long, idle workers cost more than adding parts.
    #[test]
    fn few_tiles_of_shards_are_split() {
        let chosen = |world, m, n, k| chosen(world, OpKind::GemmReduceScatter, m, n, k);
        let ragged = own(4, OpKind::GemmReduceScatter, 508, 1024, 65536);
        assert_eq!((ragged.stack, ragged.splits, ragged.shares), (true, 1, 132), "tiles that span shards, by groups of workers: {ragged}");
        assert_eq!(chosen(4, 512, 1024, 65536), (128, 128, 3, false), "as many of one shard each");
        assert_eq!(chosen(4, 512, 2048, 65536), (128, 128, 2, false), "64 in halves");
        assert_eq!(chosen(4, 512, 2056, 65536), (128, 128, 1, false), "68 are more than half of the workers");
        assert_eq!(chosen(4, 512, 1024, 4 * 2560), (128, 128, 1, false), "40 steps are not long enough");
        for (world, m, n, k) in [(2, 512, 1024, 32768), (4, 512, 2048, 65536), (8, 1024, 1024, 65536)] {
            let [split, whole] = simulated_with(OpKind::GemmReduceScatter, world, (m, n, k), [|s| s, |s| Schedule { splits: 1, ..s }]);
            assert!(split * 10 < whole * 9, "{split:?} instead of {whole:?}");
        }
    }

    /// The same of 8 ranks, one H200 at their shapes (results/tuning/few-rows-tp8.txt,
    /// slim-tiles.txt).
    #[test]
    fn small_tiles_come_before_shared_ones() {
        let (ag, rs) = (OpKind::AllGatherGemm, OpKind::GemmReduceScatter);
        assert_eq!(chosen(8, rs, 128, 12288, 49152), (128, 96, 1, true), "128 tiles, rather than halves of 64");
        assert_eq!(chosen(8, ag, 64, 28672, 8192), (64, 64, 2, true), "halves of 56");
        assert_eq!(chosen(8, ag, 256, 28672, 8192), (128, 128, 2, true), "small ones would read x too often");
        assert_eq!(chosen(8, ag, 256, 49152, 12288), (128, 192, 2, true), "halves of 64");
        assert_eq!(chosen(8, rs, 256, 12288, 49152), (128, 192, 1, true), "128 tiles");
    }

    /// With as many rows as the simulator is known to be right for. A kernel that pushes takes some
    /// 5 us a piece besides its bytes (results/tuning/slices-tp4.txt), which leaves less to win
    /// than bytes alone; but slices of at most 2 KiB of a row are pushed in half as many rounds as
    /// wider ones: on four H100 GPT-3 takes as long with twelve as with nine at 768 and 800 rows
    /// (h100-x4-ragged-nvlink.json of 6867920 and of 3b369e8).
    #[test]
    fn tiles_that_span_shards_begin_with_the_first_slice() {
        let ag = OpKind::AllGatherGemm;
        let sliced = |world, m, n, k| {
            let s = own(world, ag, m, n, k);
            (s.stack, s.k_slices)
        };
        let (stack, slices) = sliced(8, 512, 49152, 12288);
        assert!(stack && (2..10).contains(&slices), "{slices} of seven times 1.5 MiB, which the kernel pushes one after another");
        let (stack, slices) = sliced(8, 1016, 49152, 12288);
        assert!(stack && (2..=12).contains(&slices), "{slices} of 21 MiB");
        assert_eq!([sliced(8, 256, 49152, 12288), sliced(2, 254, 49152, 12288)], [(true, 1); 2], "few rows");
        for (m, n, k) in [(512, 49152, 12288), (512, 28672, 8192), (1016, 49152, 12288)] {
            let [sliced, whole] = simulated_with(ag, 8, (m, n, k), [|s| s, |s| Schedule { k_slices: 1, ..s }]);
            assert!(sliced * 100 < whole * 95, "{sliced:?} instead of {whole:?}");
        }
    }
}
