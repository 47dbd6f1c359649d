//! What a call takes by estimate, with a schedule.
//!
//! Invariant: an estimate depends on the call and the schedule alone. The constants were fitted to
//! plans that were timed beside each other (results/tuning/ragged-rows.txt, plans-of-rows.txt,
//! tile-rows.txt, slices-tp4.txt, plans-of-one-rank.txt), and say which of two plans is the faster,
//! not what a machine takes.

use super::super::shares::Shares;
use super::bands::LINK;
use super::candidates::{Comes, percent};
use super::tiles::{READ, TILES, area, w_bytes};
use super::{MULTIPROCESSORS, OPERATIONS, ROW_GROUP, Schedule};
use crate::layout::{gather_place_bytes, scatter_place_bytes, slot_bytes};
use crate::machine::Machine;
use crate::tile::TileGrid;
use crate::{OpKind, Problem, TileShape};

/// What else a tile takes, in steps: its beginning and its end.
const ENDS: u64 = 4;
/// Nanoseconds until the parts of a tile that is shared are added.
pub(in crate::program) const SHARING_NS: u64 = 5_000;
/// Bytes of an element of a part, and those of parts that a worker fetches and adds in a
/// nanosecond. Behind whole waves nobody waits for that.
const PART_BYTES: u64 = 4;
const ADDED: u64 = 60;
/// Of so many nanoseconds of products they take one more where ranges of workers go from one tile
/// to the next, and no whole waves follow: AllGather-GEMM of Llama at 258 and 320 rows took 0.136
/// and 0.143 ms so, and takes 0.122 and 0.132 in whole tiles on 112 of 132 multiprocessors
/// (results/tuning/plans-of-rows.txt).
const TWO_TILES: u64 = 10;
/// Bytes of `w` in a nanosecond that an H200 reads, where [`READ`] is nearly what an H100 does. A
/// schedule is for both.
const READ_FASTER: u64 = 4_200;
/// Percent that reads of `w` take longer where nearly all multiprocessors have nothing to do in the
/// last wave.
const IDLE: u64 = 10;
/// Percent that tiles of 128 columns take more beside rows that are scattered, and where they are
/// one wave and a half at most: so narrow, their loads leave no room for them.
const BESIDE: u64 = 7;
const BESIDE_FEW: u64 = 2;
/// Percent that products of a GEMM-ReduceScatter's partial tiles are counted to take more for each
/// peer after the first, beside scattered ones. Why is not known; on one H200 as a rank of 4 and of
/// 8, where nothing comes over links, choices are nearer to the fastest plan so
/// (results/tuning/plans-of-one-rank.txt).
const SENT_TO_MORE: u64 = 2;
/// Nanoseconds of a wave of tiles whose rows are scattered, which consumers do.
const SCATTERING_NS: u64 = 2_000;
/// Nanoseconds until folds begin, and the bytes that they read in one.
const FOLD_NS: u64 = 6_000;
const FOLDED: u64 = 2_500;
/// Percent that tiles of 128x128 of one shard each take more than by their steps where partial
/// tiles go through the host: GPT-3 at 700 and 900 rows, and Llama
/// (results/tuning/ragged-pcie.txt).
const BY_HOST_SMALL: u64 = 38;
/// Nanoseconds until first rows are there which the kernel pushes.
pub(super) const PUSHED_NS: u64 = 5_000;
/// Percent of a pass over `w` that each takes after the first of an AllGather-GEMM, whose shards
/// could be worked on side by side. So much more than by [what tiles wait for](Schedule::begins_ns)
/// calls take shard by shard, beside slices: GPT-3 some 40 us at TP 2 and 600 to 960 rows, where a
/// pass takes 172, and 20 at TP 4 and 1280 to 1536, where two do; Llama 22 at TP 2, of 67, and up
/// to 20 at TP 4, of 68 (results/tuning/slices-tp4.txt, 1., 4., 5. and 6.).
const AGAIN: u64 = 17;

/// What takes so long by itself, side by side: neither hides under the other as a whole, and the
/// less the nearer they are.
fn side_by_side(a: u64, b: u64) -> u64 {
    let (longer, shorter) = (u128::from(a.max(b)).max(1), u128::from(a.min(b)));
    let percent = 100 * shorter / longer;
    u64::try_from(longer + shorter * percent.pow(4) / (8 * 100_u128.pow(4))).unwrap_or(u64::MAX)
}

/// Nanoseconds in which so many bytes go through the host, while as many go the other way.
pub(super) fn through_host_ns(bytes: u128) -> u64 {
    u64::try_from(1000 * bytes / u128::from(Machine::H100_PAIR_BY_HOST.both_ways_bytes_per_us)).unwrap_or(u64::MAX)
}

/// Nanoseconds of a call with such tiles: of its waves or, where that is longer, of the first and
/// what the host then carries of the peers' tiles, which come first.
pub(super) fn by_host_ns(problem: &Problem, tile: TileShape) -> u128 {
    let tiles_of_shard = u128::from(TileGrid::of_shard(problem, tile).tiles());
    let small = if tile == TILES[3].0 { BY_HOST_SMALL } else { 0 };
    let steps = u64::from(problem.k_local().div_ceil(tile.k)) + ENDS;
    let wave = steps * 2 * area(tile) * u64::from(tile.k) * (percent(tile, problem.m_shard(), Comes::Carried) + small) / (100 * OPERATIONS);
    let waves = (u128::from(problem.world().get()) * tiles_of_shard).div_ceil(MULTIPROCESSORS.into());
    let bytes = u128::from(problem.world().peers()) * tiles_of_shard * u128::from(slot_bytes(problem, tile));
    let carried = u128::from(through_host_ns(bytes));
    (u128::from(wave) * waves).max(u128::from(wave) + carried)
}

/// What there is to multiply.
struct Work {
    /// Rows that tiles are cut from: all, or a shard's.
    rows: u32,
    /// Tiles of these.
    grid: TileGrid,
    /// Tiles in all.
    tiles: u64,
    shares: Option<Shares>,
}

impl Schedule {
    /// Nanoseconds of a call over peers' memory: of its waves, beside its reads of `w`, and of what
    /// there is to do before and after them.
    pub(super) fn estimate_ns(&self, problem: &Problem) -> u64 {
        self.estimate_with_ns(problem, MULTIPROCESSORS.into())
    }

    /// The same with so many workers.
    pub(super) fn estimate_with_ns(&self, problem: &Problem, workers: u64) -> u64 {
        let work = self.work(problem);
        let multiplied = self.multiplied_ns(problem, &work, workers, Comes::ToPeers);
        let beside = if 2 * work.tiles > 3 * workers { BESIDE } else { BESIDE_FEW };
        let beside = match problem.op() {
            OpKind::GemmReduceScatter if !self.scatters(problem) => SENT_TO_MORE * u64::from(problem.world().peers().saturating_sub(1)),
            OpKind::GemmReduceScatter if self.tile.n == 128 => beside,
            _ => 0,
        };
        let multiplied = multiplied.saturating_add(multiplied / 100 * beside);

        let slots = work.tiles.div_ceil(workers) * workers;
        let idle = if work.shares.is_some() { 0 } else { (slots - work.tiles) * IDLE / slots };
        let beside_reads = |rate| self.beside_reads(problem, &work, multiplied, w_bytes(problem) / rate * (100 + idle) / 100);
        let both = beside_reads(READ).midpoint(beside_reads(READ_FASTER));
        both.saturating_add(self.sharing_ns(&work, workers, multiplied)).saturating_add(self.ends_ns(problem, &work, workers, multiplied))
    }

    /// The same of tiles of one shard each, in one piece, whose rows or partial sums are carried.
    /// What plans over peers' memory have shown is not in it: it was not held against what is
    /// carried.
    pub(super) fn carried_ns(&self, problem: &Problem) -> u64 {
        let (work, workers) = (self.work(problem), u64::from(MULTIPROCESSORS));
        let multiplied = self.multiplied_ns(problem, &work, workers, Comes::Carried);
        let reads = self.passes(problem, &work.grid).saturating_mul(w_bytes(problem)) / READ;
        // Neither hides under the other as a whole.
        multiplied.max(reads).saturating_add(multiplied.min(reads) / 32).saturating_add(self.ends_ns(problem, &work, workers, multiplied))
    }

    /// The same of an AllGather-GEMM's tiles that span shards, whose rows are carried in slices of
    /// `k`: what is multiplied first waits until all have come.
    pub(super) fn sliced_ns(&self, problem: &Problem) -> u64 {
        let (work, workers) = (self.work(problem), u64::from(MULTIPROCESSORS));
        let all = self.multiplied_ns(problem, &work, workers, Comes::Carried).max(w_bytes(problem) / READ);
        let slots = if work.shares.is_some() { work.tiles } else { work.tiles.next_multiple_of(workers) };
        let first = u64::try_from(u128::from(all) * u128::from(workers.min(slots)) / u128::from(slots)).unwrap_or(all);
        let comes = through_host_ns(u128::from(gather_place_bytes(problem)) * u128::from(problem.world().peers()));
        first.max(comes).saturating_add(all - first).saturating_add(self.sharing_ns(&work, workers, all))
    }

    /// The same of a GEMM-ReduceScatter's tiles that span shards, whose rows kernels store to
    /// memory of the host: of its waves and of what the last leaves or, where that is longer, of
    /// the first and what all leave, while as much comes. Two H100 take 25 us more than this, and 7
    /// % more or less in the mean, where tiles are filled (results/tuning/pcie-turns.txt, 6.).
    pub(super) fn scattered_by_host_ns(&self, problem: &Problem) -> u64 {
        let (work, workers) = (self.work(problem), u64::from(MULTIPROCESSORS));
        let reads = self.passes(problem, &work.grid).saturating_mul(w_bytes(problem)) / READ;
        let all = self.multiplied_ns(problem, &work, workers, Comes::Carried).max(reads);
        let waves = work.tiles.div_ceil(workers);
        let bytes = u128::from(scatter_place_bytes(problem)) * u128::from(problem.world().peers());
        let leave = |tiles: u64| through_host_ns(bytes * u128::from(tiles) / u128::from(work.tiles));
        let behind = all.saturating_add(leave(work.tiles - (waves - 1) * workers));
        behind.max((all / waves).saturating_add(leave(work.tiles)))
    }

    fn work(&self, problem: &Problem) -> Work {
        let (shards, rows) = if self.spans(problem) { (1, problem.m()) } else { (u64::from(problem.world().get()), problem.m_shard()) };
        let grid = TileGrid::new(rows, problem.n_local(), self.tile);
        Work { rows, tiles: shards * grid.tiles(), grid, shares: self.shared_tiles(problem) }
    }

    /// Nanoseconds of the products of all tiles.
    fn multiplied_ns(&self, problem: &Problem, work: &Work, workers: u64, comes: Comes) -> u64 {
        let whole = u64::from(problem.k_local().div_ceil(self.tile.k)) + ENDS;
        let in_steps = match work.shares {
            Some(shares) => work.tiles / workers * whole + shares.time() + ENDS,
            None => work.tiles.div_ceil(workers) * whole,
        };
        let step = u128::from(2 * area(self.tile) * u64::from(self.tile.k) * percent(self.tile, work.rows, comes));
        u64::try_from(u128::from(in_steps) * step / u128::from(100 * OPERATIONS)).unwrap_or(u64::MAX)
    }

    /// Whether tiles span shards of several ranks.
    fn spans(&self, problem: &Problem) -> bool {
        self.stack && problem.world().peers() > 0
    }

    fn scatters(&self, problem: &Problem) -> bool {
        self.spans(problem) && problem.op() == OpKind::GemmReduceScatter
    }

    /// Reads of `w`.
    fn passes(&self, problem: &Problem, grid: &TileGrid) -> u64 {
        let (world, peers) = (u64::from(problem.world().get()), u64::from(problem.world().peers()));
        match problem.op() {
            _ if self.spans(problem) || peers == 0 => u64::from(grid.row_blocks().div_ceil(ROW_GROUP)),
            OpKind::AllGatherGemm => u64::from(self.alone) + (world - u64::from(self.alone).min(world)).div_ceil(self.band.into()),
            OpKind::GemmReduceScatter => peers.div_ceil(self.band.into()) + 1,
        }
    }

    /// Nanoseconds of so many of products, beside reads of `w`, each of `read` nanoseconds.
    fn beside_reads(&self, problem: &Problem, work: &Work, multiplied: u64, read: u64) -> u64 {
        // Of row blocks that are taken together the last may be few, with as much of `w` to read:
        // once, or once a shard.
        let (blocks, last) = (u64::from(work.grid.row_blocks()), u64::from((work.grid.row_blocks() - 1) % ROW_GROUP + 1));
        let times = if self.spans(problem) { 1 } else { u64::from(problem.world().get()) };
        let waits = if blocks > last { times * read.saturating_sub(multiplied / (times * blocks) * last) } else { 0 };
        let passes = self.passes(problem, &work.grid);
        let again = if problem.op() == OpKind::AllGatherGemm && !self.spans(problem) { (passes - 1) * read * AGAIN / 100 } else { 0 };
        side_by_side(multiplied, passes.saturating_mul(read)).saturating_add(waits).saturating_add(again)
    }

    /// Nanoseconds that sharing costs, if anything is shared.
    fn sharing_ns(&self, work: &Work, workers: u64, multiplied: u64) -> u64 {
        match &work.shares {
            None => 0,
            Some(shares) if work.tiles < workers => self.sharing_alone_ns(shares, multiplied),
            Some(_) => SHARING_NS,
        }
    }

    /// Nanoseconds that sharing costs where all tiles are shared, of products that take
    /// `multiplied`: no whole waves hide the way of the parts.
    fn sharing_alone_ns(&self, shares: &Shares, multiplied: u64) -> u64 {
        let part_ns = area(self.tile) * PART_BYTES / ADDED;
        let adding = shares.workers_of_one_tile().map_or(part_ns + multiplied / TWO_TILES, |workers| (workers - 1) * part_ns);
        SHARING_NS.saturating_add(adding)
    }

    /// Nanoseconds before the first tile and after the last.
    fn ends_ns(&self, problem: &Problem, work: &Work, workers: u64, multiplied: u64) -> u64 {
        let tiles = work.tiles;
        // Behind tiles that are shared come whole waves.
        let last_wave = if work.shares.is_some() { tiles.min(workers) } else { tiles - (tiles - 1) / workers * workers };
        let (world, peers) = (u64::from(problem.world().get()), u64::from(problem.world().peers()));
        let place = gather_place_bytes(problem);
        match problem.op() {
            _ if peers == 0 => 0,
            OpKind::AllGatherGemm if self.spans(problem) && self.k_slices == 1 => PUSHED_NS + place * peers / LINK,
            OpKind::AllGatherGemm => self.begins_ns(problem, multiplied),
            OpKind::GemmReduceScatter if self.scatters(problem) => {
                let folded = FOLD_NS + scatter_place_bytes(problem) * world / FOLDED;
                folded + tiles.div_ceil(workers) * SCATTERING_NS + last_wave * slot_bytes(problem, self.tile) * peers / world / LINK
            }
            OpKind::GemmReduceScatter => last_wave.saturating_sub(work.grid.tiles()) * slot_bytes(problem, self.tile) / LINK,
        }
    }
}
