//! The schedule of whoever names none, where chunks go through the host.
//!
//! Invariant: as of the other [heuristics](super), it depends on the problem alone.

use super::super::schedule::{Chunk, Schedule};
use super::candidates::CANDIDATES;
use super::estimate::through_host_ns;
use super::ragged::by_host;
use super::scattered::may_scatter;
use super::tiles::{self, LONG};
use super::{MULTIPROCESSORS, OPERATIONS, is_ragged, unless_unsent};
use crate::layout::{gather_place_bytes, slot_bytes};
use crate::{OpKind, Problem, TileShape};

/// What one signal announces where a chunk is staged.
const STAGED_BYTES: u64 = 2 << 20;
/// Operations of a rank below which small tiles are sent through the host, so that the first chunk
/// leaves sooner: 0.48 T take 11 % less time with 128x128 than with 128x256, and 0.62 T 6 % more
/// (results/tuning/short-calls.txt).
const STAGED_SHORT: u64 = 550_000_000_000;
/// Rows of an AllGather-GEMM of two ranks up to which its tiles span shards and wait for slices of
/// `k`, so that `w` is read once, by row blocks side by side: two H100 take 31 % less time so than
/// with rows that are worked on as they come with 258 rows, 10 with 576 and 4 with 700
/// (results/tuning/slices-pcie.txt, third and fourth machine).
const SPANNING_ROWS_OF_TWO: u32 = 704;
/// What such tiles wait for in slices of `k`: bytes of a shard for each rank, and elements of a
/// row, that are worth one. More slices take the host more time, once for each peer, and narrow
/// ones copies more (results/tuning/slices-pcie.txt; pcie-tp4.txt, 2.).
const SLICE_BYTES: u64 = 128 << 10;
const SLICE_COLUMNS: u32 = 2048;
/// Rows of an AllGather-GEMM that are worked on as they come, whose tiles share a pass over `w`:
/// each of its bytes serves an operation for each row, so that with fewer than 280 the card's 811
/// TFLOP/s would have to read more than the 2.9 TB/s that an H100's memory gives. Where rows come
/// faster than they are multiplied, more make fewer passes.
const AS_THEY_COME: u32 = 256;

/// Row blocks that are worked on as they come: of at least 256 rows, and of 512 where a shard has
/// twice as many and rows are there by the time that those before are multiplied.
fn blocks_that_come(problem: &Problem, tile: TileShape) -> u32 {
    let (n, k) = (u64::from(problem.n_local()), u64::from(problem.k_local()));
    let row_bytes = k * problem.dtype().bytes() as u64;
    // In nanoseconds, while as much goes out.
    let comes = through_host_ns(row_bytes.into());
    let multiplied = 2 * n * k / (u64::from(MULTIPROCESSORS) * OPERATIONS);
    let rows = if comes > multiplied { AS_THEY_COME } else { (problem.m_shard() / 2).clamp(AS_THEY_COME, 2 * AS_THEY_COME) };
    rows.div_ceil(tile.m)
}

impl Schedule {
    /// As [`heuristic`](Self::heuristic), for transports that carry chunks through the host or over
    /// a network: each costs them some 10 us, whatever its size, so a signal announces about 2 MiB.
    /// Shards are single bands, as they come one after another; peers' shards of an AllGather-GEMM
    /// are worked on chunk by chunk, of at least 256 rows, while the next come. Tiles of few rows
    /// span shards, which for AllGather-GEMM begin with the first slice of `k`, and for
    /// GEMM-ReduceScatter kernels then scatter through the host themselves: of two ranks up to 4
    /// MiB, and 5.5 MiB where rows are no whole tiles of 128, of more shards of up to 200 rows.
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
        if let Some(sliced) = Self::sliced_by_host(problem, &usual) {
            return sliced;
        }
        if let Some(scattered) = Self::scattered_few_rows(problem) {
            return scattered;
        }
        let (ragged, may_scatter) = (is_ragged(problem), may_scatter(problem));
        if usual.stack && (problem.op() == OpKind::AllGatherGemm || may_scatter) {
            return usual;
        }
        if ragged
            && problem.op() == OpKind::GemmReduceScatter
            && may_scatter
            && let Some(spanning) = Self::ragged_spanning(problem)
        {
            return spanning;
        }
        let [thin, small] = [64, 128].map(|rows| TileShape::new(rows, 128, 64));
        let tile = match problem.op() {
            _ if usual.stack && problem.m_shard() <= thin.m => thin,
            OpKind::GemmReduceScatter if ragged => by_host(problem, problem.flop_per_rank() >= LONG),
            OpKind::GemmReduceScatter if problem.flop_per_rank() < STAGED_SHORT => small,
            // What leaves a GEMM-ReduceScatter, the host or the network carries slowly: in short
            // calls the sooner it begins the better.
            OpKind::GemmReduceScatter if !usual.stack => tiles::usual(problem, problem.flop_per_rank() >= LONG),
            _ => unless_unsent(problem, usual.tile),
        };
        let (unit, least, by_chunk) = match problem.op() {
            OpKind::AllGatherGemm => (
                gather_place_bytes(problem) / u64::from(problem.m_shard()) * u64::from(tile.m),
                blocks_that_come(problem, tile),
                problem.world().peers(),
            ),
            OpKind::GemmReduceScatter => (slot_bytes(problem, tile), 1, 0),
        };
        // Of a short call's few chunks the last leaves when nothing is left to multiply.
        let short = ragged && problem.op() == OpKind::GemmReduceScatter && problem.flop_per_rank() < STAGED_SHORT;
        let announced = if short { STAGED_BYTES / 2 } else { STAGED_BYTES };
        let tiles = u32::try_from(announced / unit.max(1)).unwrap_or(u32::MAX).max(least);
        Self { chunk: Chunk::Tiles(tiles), raster: usual.raster, by_chunk, ..Self::of(tile) }
    }

    /// Of few rows of an AllGather-GEMM: tiles that span shards, the usual ones if they do, in
    /// slices of `k`.
    fn sliced_by_host(problem: &Problem, usual: &Self) -> Option<Self> {
        let few = usual.stack || problem.world().peers() == 1 && problem.m() <= SPANNING_ROWS_OF_TWO;
        if problem.op() != OpKind::AllGatherGemm || problem.world().peers() == 0 || !few {
            return None;
        }
        let slice_bytes = SLICE_BYTES * u64::from(problem.world().get());
        let worth = (gather_place_bytes(problem) / slice_bytes).min((problem.k_local() / SLICE_COLUMNS).into());
        let k_slices = u32::try_from(worth).unwrap_or(u32::MAX).max(1);
        if usual.stack {
            return Some(Self { k_slices, ..*usual });
        }
        let ways = CANDIDATES.iter().flat_map(|candidate| {
            let whole = Self { k_slices, ..Self::spanning(problem, candidate.tile, 1) };
            [whole, whole.sharing(problem, MULTIPROCESSORS)]
        });
        ways.min_by_key(|schedule| schedule.sliced_ns(problem))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;
    use crate::program::TileProgram;
    use crate::simulate::{Pushes, simulate};
    use crate::{DType, WorldSize};

    /// What took two H100 the least time of what was tried, or within 3 % of it
    /// (results/tuning/pcie-as-they-come.txt).
    #[test]
    fn rows_are_worked_on_as_they_come() {
        let chosen = |world, m, n, k| {
            let problem =
                Problem::new(OpKind::AllGatherGemm, m, n, k, DType::Bf16, WorldSize::new(world).expect("ranks")).expect("a problem");
            let schedule = Schedule::staged(&problem);
            let Chunk::Tiles(blocks) = schedule.chunk else { panic!("{schedule}") };
            (schedule.by_chunk, blocks * schedule.tile.m)
        };
        assert_eq!([1024, 2048, 4096].map(|m| chosen(2, m, 28672, 8192)), [(1, 256); 3], "bound by the host: each byte is there late");
        assert_eq!(
            [1024, 2048, 4096].map(|m| chosen(2, m, 49152, 12288)),
            [(1, 256), (1, 512), (1, 512)],
            "bound by products: fewer passes over w"
        );
        assert_eq!(chosen(4, 8192, 49152, 12288), (3, 256), "the more peers the later");
        let rs =
            Problem::new(OpKind::GemmReduceScatter, 4096, 8192, 28672, DType::Bf16, WorldSize::new(2).expect("ranks")).expect("a problem");
        assert_eq!(Schedule::staged(&rs).by_chunk, 0);
    }

    /// What took two H100 the least time of what was tried, or within 5 % of it
    /// (results/tuning/slices-pcie.txt).
    #[test]
    fn few_rows_are_worked_on_by_slices_by_row_blocks_side_by_side() {
        let chosen = |m, n, k| {
            let problem = Problem::new(OpKind::AllGatherGemm, m, n, k, DType::Bf16, WorldSize::new(2).expect("ranks")).expect("a problem");
            let schedule = Schedule::staged(&problem);
            assert_eq!(schedule.stack, m <= 704, "{schedule}");
            (schedule.tile.m, schedule.tile.n, schedule.shares > 1, schedule.k_slices)
        };
        let gpt3 = |m| chosen(m, 49152, 12288);
        assert_eq!([64, 128].map(gpt3), [(64, 192, false, 3), (128, 192, false, 6)]);
        assert_eq!([200, 256, 512].map(gpt3), [(208, 128, false, 6), (256, 192, false, 6), (256, 192, false, 6)]);
        assert_eq!([258, 300, 350, 450].map(gpt3), [136, 152, 176, 152].map(|rows| (rows, 256, true, 6)));
        assert_eq!([600, 700].map(gpt3), [(152, 256, false, 6), (176, 256, false, 6)], "2.9 waves of four row blocks");
        assert_eq!(gpt3(720).3, 1);
        let llama = |m| chosen(m, 28672, 8192);
        assert_eq!([64, 128, 200, 256].map(llama), [(64, 128, false, 2), (128, 128, false, 4), (208, 128, false, 4), (128, 224, false, 4)]);
        assert_eq!([258, 300, 350].map(llama), [136, 152, 176].map(|rows| (rows, 256, false, 4)), "a wave that is not full");
        assert_eq!([450, 516, 600, 700].map(llama), [152, 176, 152, 176].map(|rows| (rows, 256, true, 4)));
    }

    /// What took four H200 the least time of what was tried, or within 2 % of it
    /// (results/tuning/pcie-tp4.txt, 2.), but for the four slices, between three and six that were.
    #[test]
    fn few_rows_of_more_ranks_come_in_fewer_slices() {
        let slices = |m, n, k| {
            let problem = Problem::new(OpKind::AllGatherGemm, m, n, k, DType::Bf16, WorldSize::new(4).expect("ranks")).expect("a problem");
            Schedule::staged(&problem).k_slices
        };
        assert_eq!([132, 200, 256, 352].map(|m| slices(m, 49152, 12288)), [1, 2, 3, 4]);
        assert_eq!([132, 200, 256, 352].map(|m| slices(m, 28672, 8192)), [1, 1, 2, 2]);
    }

    /// By simulation of two H100, which meets what they took from 1024 rows on within 8.5 %
    /// (`flux-bench simulate --machine h100-pair-by-host --against results/h100-x2-pcie.json`).
    #[test]
    fn what_is_worked_on_as_it_comes_is_done_sooner_where_the_host_bounds_it() {
        let gained = |m, n, k| {
            let problem = Problem::new(OpKind::AllGatherGemm, m, n, k, DType::Bf16, WorldSize::new(2).expect("ranks")).expect("a problem");
            let schedule = Schedule::staged(&problem);
            let side_by_side = Schedule { chunk: Chunk::Tiles(1), by_chunk: 0, ..schedule };
            let [own, other] = [schedule, side_by_side].map(|schedule| {
                let build = |rank| TileProgram::build(&problem, rank, &schedule).expect("a valid schedule");
                let programs: Vec<_> = problem.world().ranks().map(build).collect();
                simulate(&programs, &Machine::H100_PAIR_BY_HOST, Pushes::default()).expect("no rank is stuck").time.as_micros()
            });
            100 - 100 * own.cast_signed() / other.cast_signed()
        };
        let llama = [1024, 2048, 4096].map(|m| gained(m, 28672, 8192));
        assert!(llama.iter().all(|&percent| percent >= 10) && llama[1] >= 25, "{llama:?} %");
        let gpt3 = [1024, 2048, 4096, 8192].map(|m| gained(m, 49152, 12288));
        assert!(gpt3.iter().all(|&percent| percent >= -1), "{gpt3:?} %");
    }

    /// What took two H100 the least time of what was tried, or within 3 % of it
    /// (results/tuning/ragged-pcie.txt).
    #[test]
    fn shards_of_no_whole_tiles_that_are_carried_have_the_tile_that_they_fill() {
        let two = WorldSize::new(2).expect("ranks");
        let chosen = |m, n, k| {
            let problem = Problem::new(OpKind::GemmReduceScatter, m, n, k, DType::Bf16, two).expect("a problem");
            let schedule = Schedule::staged(&problem);
            assert!(!schedule.stack || may_scatter(&problem) && schedule.shares == 1);
            (schedule.tile.m, schedule.tile.n, schedule.stack)
        };
        let gpt3 = |m| chosen(m, 12288, 49152);
        assert_eq!(
            [516, 600].map(gpt3),
            [(144, 256, false), (152, 256, false)],
            "with 128x128 1.13 and 1.02 ms, and 0.64 and 0.66 with 160x256"
        );
        assert_eq!(gpt3(900), (240, 128, false), "with 128x128, 1.10 ms instead of 0.75");
        assert_eq!([chosen(256, 12288, 49152), chosen(512, 12288, 49152)].map(|(.., stack)| stack), [true, false], "whole tiles as before");
    }
}
