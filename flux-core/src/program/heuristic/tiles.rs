//! The tile of a problem whose tiles do not span shards.
//!
//! Invariant: of the candidates it is the one whose waves, and what comes before and after them,
//! take the least time by estimate.

use super::bands::LINK;
use super::ragged::{self, is_ragged};
use super::{MULTIPROCESSORS, OPERATIONS, WORKERS};
use crate::layout::slot_bytes;
use crate::tile::TileGrid;
use crate::{OpKind, Problem, TileShape};

/// Tiles to choose from, with the time of one step of a tile relative to its area: 128x128 moves
/// more operand bytes for its work, so it has to gain something in waves.
pub(in crate::program) const TILES: [(TileShape, u64); 4] = [
    (TileShape::new(128, 256, 64), 100),
    (TileShape::new(128, 224, 64), 100),
    (TileShape::new(128, 192, 64), 100),
    (TileShape::new(128, 128, 64), 101),
];
/// The same of tiles of one shard that are sent, or that gather rows beside messages, in the order
/// of [`TILES`]. Of a GEMM-ReduceScatter the last wave's partial tiles leave when nothing is left
/// to multiply, so there is more to gain by narrow tiles, and what they cost matters (128x128:
/// results/tuning/wide-bands.txt; the others by their operand bytes).
pub(super) const TO_SEND: [u64; 4] = [100, 101, 103, 110];
/// Tile to choose from, too, where it is long along `k`, with its costs in [`TILES`] and
/// [`TO_SEND`]. It moves an eighth less through L2 than 128x256 and a quarter less from memory: at
/// the card's power limit it takes 2 to 4 % less time (results/tuning/back-to-back.txt), with
/// rests, and full clocks, up to 2.2 % less (results/tuning/rests.txt).
pub(super) const LARGE: (TileShape, u64) = (TileShape::new(256, 192, 64), 99);
/// Steps along `k` from which on it is long enough, as its ends are longer. With fewer it was not
/// measured.
pub(super) const LARGE_STEPS: u32 = 96;
/// Operations of a rank from which on it is a choice for partial tiles that are staged, too: some 3
/// ms of an H200. GPT-3 at TP 2 and m = 1024, a quarter of that, takes 19 % more time over `pcie`
/// with it (results/h200-x2-pcie.json of 8be58e2, in the history).
pub(super) const LONG: u64 = 2_000_000_000_000;
/// Bytes of `w` in a nanosecond that a GEMM-ReduceScatter is bound by, where it is read more than
/// once: GPT-3 at TP 2 and m = 512 reads 1.2 GB in 0.41 ms (results/tuning/rests.txt).
pub(in crate::program) const READ: u64 = 2900;

/// Bytes of a rank's part of `w`.
pub(in crate::program) fn w_bytes(problem: &Problem) -> u64 {
    u64::from(problem.n_local()) * u64::from(problem.k_local()) * problem.dtype().bytes() as u64
}

pub(super) fn waves(items: u64) -> u64 {
    items.div_ceil(u64::from(WORKERS))
}

pub(super) fn area(tile: TileShape) -> u64 {
    u64::from(tile.m) * u64::from(tile.n)
}

/// The tile of a problem whose tiles do not span shards, of which [`LARGE`] may be one.
pub(super) fn usual(problem: &Problem, may_be_large: bool) -> TileShape {
    if is_ragged(problem) {
        return ragged::usual(problem, may_be_large);
    }
    let of_shard = |tile| TileGrid::of_shard(problem, tile).tiles();
    let tiles = |tile| u64::from(problem.world().get()) * of_shard(tile);
    let multiplied = |tile, cost: u64| {
        let area = u128::from(waves(tiles(tile)) * area(tile));
        area * u128::from(cost * 2 * u64::from(problem.k_local())) / u128::from(100 * OPERATIONS)
    };
    // Nanoseconds in which `w` is read: for the peers' shards and, where these are not in one wave
    // with it, for the own one.
    let read = |tile| {
        let passes = if problem.world().peers() > 0 && tiles(tile) > u64::from(MULTIPROCESSORS) { 2 } else { 1 };
        passes * u128::from(w_bytes(problem)) / u128::from(READ)
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

#[cfg(test)]
mod tests {
    use super::super::tests::{chosen, own};
    use crate::program::Schedule;
    use crate::{DType, OpKind, Problem, WorldSize};

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
        assert_eq!(tile(4, ag, 4 * 2000, 49152, 12288), (184, 256), "2000 rows are 11 blocks of 184 almost, and as many of 256 as 2048");
        assert_eq!(tile(4, ag, 4 * 2100, 49152, 12288), (192, 256), "2100 rows are 11 blocks of 192 almost, and not 8.5 of 256");
    }
}
