//! Few rows of a GEMM-ReduceScatter through the host: kernels store them to memory of the host
//! themselves, from where their owners' read them.
//!
//! Invariant: tiles of one wave leave when nothing is left to multiply; of several, one wave leaves
//! while the next is multiplied.

use super::super::schedule::Schedule;
use super::candidates::beyond_percent;
use super::ragged::MOST_FOLDED;
use super::{MULTIPROCESSORS, OPERATIONS, ROWS, is_ragged};
use crate::layout::scatter_place_bytes;
use crate::tile::TileGrid;
use crate::{OpKind, Problem, TileShape};

/// What a rank of two scatters at most, and the most rows of a shard, where its kernel stores it to
/// memory of the host, from where its owners' read it: in several waves of tiles, of which one
/// leaves while the next is multiplied, 3 MiB take 8 % less time than in one wave, 4 MiB 5 % less
/// than by copy engines, and 6 MiB 3 % more and in the tiles that are chosen 27
/// (results/tuning/pcie-turns.txt).
const SCATTERED_BYTES: u64 = 4 << 20;
const SCATTERED_ROWS: u32 = 256;
/// The same in one wave, 3 MiB: they take 2 % less time than by copy engines, and 4 MiB 18 % more
/// (results/tuning/few-rows-carried.txt). Of more ranks, in tiles of 128x256 four H200 take 7 %
/// less with 5.3 MiB of GPT-3, 3 more with 5.3 of Llama, and 7 more with 6.2
/// (results/tuning/pcie-tp4.txt, 2.).
const SCATTERED_AT_ONCE_BYTES: u64 = 3 << 20;
const SCATTERED_AT_ONCE_OF_MORE_BYTES: u64 = 11 << 19;
/// The same of more ranks in several waves, and the most rows of a shard: with 200 rows four H100
/// take 10 and 14 % less time relative to serial than by copy engines, with 256, whose tiles are
/// full, 12 and 14 % more, of Llama in 128x192 1 more (results/tuning/pcie-turns.txt, 2. and 5.,
/// beside h100-x4-pcie.json).
const SCATTERED_OF_MORE_BYTES: u64 = 15 << 20;
const SCATTERED_OF_MORE_ROWS: u32 = 200;
/// The same of two ranks' rows that are no whole tiles of 128, which tiles that span shards fill
/// better: of Llama 5.3 and 5.7 MB take 9 and 6 % less time so than by copy engines, of GPT-3 5.6
/// as long and 5.9 4 % more (results/tuning/pcie-turns.txt, 6.).
const SCATTERED_RAGGED_BYTES: u64 = 11 << 19;
/// Percent of the rows of tiles from which on too many are beyond the last row, of turned ones and
/// of others: of the latter with more two H100 take up to 38 % longer than by estimate where hosts
/// are not late (the same).
const TOO_MUCH_BEYOND: u64 = 15;
const TOO_MUCH_BEYOND_WHOLE: u64 = 6;
/// Rows in all up to which what is scattered leaves in one wave: more of them would read `w` no
/// faster.
const ONE_WAVE_ROWS: u32 = 128;
/// Columns of tiles that are scattered in several waves. Of two ranks, and of more where the host
/// takes longer than the products, so that it should begin as soon as may be, or does not.
const COLUMNS_OF_TWO: u32 = 96;
const COLUMNS_BOUND_BY_HOST: u32 = 64;
const COLUMNS_BOUND_BY_PRODUCTS: u32 = 128;
/// Bytes in a nanosecond that leave each of four GPUs while as many come, by NCCL, of 256 and 512
/// rows 23 to 27 (results/h100-x4-pcie.json), and by how many times longer that takes than the
/// products where it bounds a call: of Llama at TP 4 3.3 times as long, where 64 columns take up to
/// 11 % less time than 96, but 1 more at 400 rows, and of GPT-3 1.9 times, where they take up to 40
/// % more than 128 (results/tuning/pcie-turns.txt).
const LEAVES: u64 = 26;
const BOUND_PERCENT: u64 = 250;

/// Whether few enough of such tiles' rows are beyond the last.
fn is_filled(problem: &Problem, tile: TileShape) -> bool {
    beyond_percent(tile, problem.m()) < if tile.swaps_ab() { TOO_MUCH_BEYOND } else { TOO_MUCH_BEYOND_WHOLE }
}

/// Bytes that a rank scatters to its peers.
const fn scattered(problem: &Problem) -> u64 {
    scatter_place_bytes(problem) * problem.world().peers() as u64
}

/// Whether kernels scatter what a GEMM-ReduceScatter's ranks have for each other, if their tiles
/// can, in one wave or whatever their tiles are.
pub(super) fn may_scatter(problem: &Problem) -> bool {
    let most = match (problem.world().peers(), is_ragged(problem)) {
        (2.., _) => SCATTERED_AT_ONCE_OF_MORE_BYTES,
        (_, true) => SCATTERED_RAGGED_BYTES,
        (_, false) => SCATTERED_AT_ONCE_BYTES,
    };
    scattered(problem) <= most
}

/// Whether they do in several waves of narrow tiles.
fn may_scatter_in_waves(problem: &Problem) -> bool {
    let world = problem.world();
    let (most_bytes, most_rows) = match world.peers() {
        1 => (SCATTERED_BYTES, SCATTERED_ROWS),
        _ => (SCATTERED_OF_MORE_BYTES, SCATTERED_OF_MORE_ROWS),
    };
    let few = problem.m() > ONE_WAVE_ROWS && problem.m_shard() <= most_rows && scattered(problem) <= most_bytes;
    // Two ranks have other tiles for rows that are no whole ones.
    problem.op() == OpKind::GemmReduceScatter
        && few
        && match world.peers() {
            0 => false,
            1 => !is_ragged(problem),
            _ => world.get() <= MOST_FOLDED,
        }
}

impl Schedule {
    /// Of few rows of a GEMM-ReduceScatter: tiles that span shards, more of them than a wave, so
    /// that the host takes what one has left while the next is multiplied; of two ranks' rows
    /// between whole tiles in one wave, too, where that takes less time by estimate.
    pub(super) fn scattered_few_rows(problem: &Problem) -> Option<Self> {
        Self::scattered_in_waves(problem).or_else(|| Self::scattered_in_row_blocks(problem))
    }

    /// In narrow tiles of 128 rows.
    fn scattered_in_waves(problem: &Problem) -> Option<Self> {
        if !may_scatter_in_waves(problem) {
            return None;
        }
        let leaves_ns = scattered(problem) / LEAVES;
        let multiplied_ns = problem.flop_per_rank() / (u64::from(MULTIPROCESSORS) * OPERATIONS);
        let columns = match problem.world().peers() {
            1 => COLUMNS_OF_TWO,
            _ if 100 * leaves_ns > BOUND_PERCENT * multiplied_ns => COLUMNS_BOUND_BY_HOST,
            _ => COLUMNS_BOUND_BY_PRODUCTS,
        };
        let tile = TileShape::new(ONE_WAVE_ROWS, columns, 64);
        let tiles = TileGrid::new(problem.m(), problem.n_local(), tile).tiles();
        (tiles > u64::from(MULTIPROCESSORS)).then(|| Self::spanning(problem, tile, 1))
    }

    /// Of two ranks' rows that are no whole tiles of 128, and more than one row block: in the tiles
    /// that they fill of which an estimate of the waves, and of what the host takes, says least.
    fn scattered_in_row_blocks(problem: &Problem) -> Option<Self> {
        let is_of_two = problem.op() == OpKind::GemmReduceScatter && problem.world().peers() == 1;
        if !is_of_two || problem.m() <= 2 * ROWS || !is_ragged(problem) || !may_scatter(problem) {
            return None;
        }
        let filled = Self::all_spanning(problem).filter(|whole| is_filled(problem, whole.tile));
        filled.min_by_key(|whole| whole.scattered_by_host_ns(problem))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, WorldSize};

    /// As long as no more than 4 MiB leave a rank of two, and 15 one of more, whose shards have 200
    /// rows at most.
    #[test]
    fn few_rows_are_scattered_through_the_host_and_more_are_carried() {
        let flattened = |world, op, m, n, k| {
            let problem = Problem::new(op, m, n, k, DType::Bf16, WorldSize::new(world).expect("ranks")).expect("a problem");
            Schedule::staged(&problem).stack
        };
        let (ag, rs) = (OpKind::AllGatherGemm, OpKind::GemmReduceScatter);
        assert!(flattened(2, rs, 256, 12288, 49152) && flattened(2, rs, 512, 8192, 28672), "3 MiB, and 4");
        assert!(!flattened(2, rs, 512, 8448, 28672) && !flattened(4, rs, 800, 16384, 49152), "more than 4, and 19");
        assert!(flattened(4, rs, 800, 12288, 49152) && !flattened(4, rs, 804, 8192, 28672), "14, and 9 of 201 rows each");
        assert!(flattened(4, ag, 256, 49152, 12288), "a shard is copied, however large");
    }

    /// What took H100s the least time of what was tried, or within 7 % of it
    /// (results/tuning/pcie-turns.txt); with 128 rows one wave.
    #[test]
    fn rows_are_scattered_in_several_waves_of_narrow_tiles() {
        let chosen = |world, m, n, k| {
            let problem = Problem::new(OpKind::GemmReduceScatter, m, n, k, DType::Bf16, WorldSize::new(world).expect("ranks"));
            let schedule = Schedule::staged(&problem.expect("a problem"));
            (schedule.tile.m, schedule.tile.n, schedule.stack)
        };
        for m in [200, 256, 300, 352, 400, 452, 512, 600, 700, 800] {
            assert_eq!(chosen(4, m, 12288, 49152), (128, 128, true), "{m}: bound by products");
            assert_eq!(chosen(4, m, 8192, 28672), (128, 64, true), "{m}: bound by the host");
        }
        assert_eq!([chosen(4, 128, 12288, 49152), chosen(4, 128, 8192, 28672)], [(128, 96, true), (128, 64, true)], "128 tiles");
        assert!(!chosen(4, 1024, 12288, 49152).2 && !chosen(4, 1024, 8192, 28672).2, "shards of whole tiles, which copy engines carry");
        assert_eq!([chosen(2, 256, 12288, 49152), chosen(2, 256, 8192, 28672), chosen(2, 512, 8192, 28672)], [(128, 96, true); 3]);
        assert!(!chosen(2, 512, 12288, 49152).2, "6 MiB");
        assert!(!chosen(2, 1024, 4096, 28672).2, "4 MiB of 512 rows each");
        assert!(!chosen(16, 1024, 8192, 28672).2 && !chosen(4, 128, 40960, 49152).2, "15 MiB to fold of 16 ranks, and 7.5 in one wave");
        assert_eq!(chosen(4, 256, 2048, 28672).1, 128, "one wave of tiles of any columns, those of whole waves by their reads");
    }

    /// What took two H100 the least time of what was tried, or within 4 % of it
    /// (results/tuning/pcie-turns.txt, 6.); of GPT-3's 484 rows, 5.9 MB, and Llama's 720 copy
    /// engines carry.
    #[test]
    fn rows_between_whole_tiles_are_scattered_in_tiles_that_they_fill() {
        let chosen = |m, n, k| {
            let problem =
                Problem::new(OpKind::GemmReduceScatter, m, n, k, DType::Bf16, WorldSize::new(2).expect("ranks")).expect("a problem");
            let schedule = Schedule::staged(&problem);
            schedule.stack.then_some((schedule.tile.m, schedule.tile.n))
        };
        let gpt3 = [260, 300, 320, 352, 400, 452, 484].map(|m| chosen(m, 12288, 49152));
        assert_eq!(
            gpt3,
            [Some((144, 192)), Some((152, 128)), Some((160, 192)), Some((176, 128)), Some((208, 128)), Some((152, 128)), None]
        );
        let llama = [260, 300, 320, 352, 400, 452, 484, 516, 560, 600, 650, 700, 720].map(|m| chosen(m, 8192, 28672).map(|tile| tile.0));
        let fewer = [152, 152, 176, 176, 208, 152, 128, 176, 152, 152, 176, 176].map(Some);
        assert_eq!(llama, [&fewer[..], &[None]].concat()[..]);
    }
}
