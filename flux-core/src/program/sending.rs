//! Which sending takes a call the least time, and the schedule that goes with it.
//!
//! Invariant: both depend on the problem and on what all ranks know of the transport alone, so all
//! ranks choose the same. Times are estimates for an H200: only the choice depends on them.

use super::Lent;
use super::heuristic::{
    MULTIPROCESSORS, OPERATIONS, ROW_GROUP, THIN_ROWS, WORKERS, is_ragged, of_shards, that_span, that_span_at_once, thin, unless_unsent,
};
use super::messages::{Channels, Sending};
use super::schedule::{Chunk, Schedule};
use crate::layout::{gather_place_bytes, scatter_place_bytes, slot_bytes};
use crate::tile::TileGrid;
use crate::{Nodes, OpKind, Problem, TileShape};

/// What a tile takes besides.
const TILE_NS: u64 = 2000;
/// Chunks of a shard to choose from; of equals the first: fine ones leave more time until they are
/// waited for, many more calls of NCCL.
const CHUNKS: [u64; 8] = [4, 3, 2, 1, 5, 6, 7, 8];
/// Rows of an AllGather-GEMM that share a pass over `w` where they come as messages of one peer,
/// fewer than [elsewhere](super::heuristic): they come late, and the own ones can be worked on
/// meanwhile. With shards of 256 two H200 take 14 to 19 % less time so; with 128 they take 9 to 17
/// % more, bound by reading `w` twice (results/tuning/few-rows-carried.txt). Not measured with more
/// peers.
const BAND_ROWS: u32 = 256;
/// Rows of a shard up to which messages beside a kernel, of one peer, take a call longer than is
/// estimated, which has them as hidden; and percent of the estimate that they take. Two H100 take
/// up to 25 % less time with all messages before from 512 to 800 rows, and 1 to 2 % more of three
/// calls; with more rows about what is estimated (results/tuning/nccl-alone.txt). Not measured with
/// more peers.
const ALONE_ROWS: u32 = 400;
const BESIDE_PERCENT: u64 = 115;
/// The same of an AllGather-GEMM's messages of several peers, with any rows. Llama at 2048 rows
/// takes 1 % more than serial before them on four H200, and 12 more beside them, which are
/// estimated to take 0.5 % less; GPT-3 beside messages to one of three peers takes 5 and 7 % more
/// than is estimated at 2048 rows, on four H200 and four H100, and 2 and 3 % at 4096
/// (results/tuning/nccl-tp4.txt, 1. and 3.).
const ROWS_BESIDE_OF_MORE_PERCENT: u64 = 105;
/// Rows in all up to which calls whose messages go before have the plan that they have over peers'
/// memory. With more it was not timed since the estimate counts the workers that there are.
const FEW_ROWS: u32 = 256;
/// Percent of a tile's time that what groups of workers share of an AllGather-GEMM may take.
const MOST_SHARED: u64 = 85;
/// Over a network as many as are worth a message each: whole shards take 9 to 15 % longer there
/// (results/tuning/nccl-sending.txt). The [times](estimate) are not for it.
const NETWORK_CHUNKS: [u64; 1] = [u64::MAX];

impl Schedule {
    /// The heuristic's schedule for a transport whose chunks are messages between `nodes`, sent so:
    /// whole shards, tiles of one shard each, or tiles of all.
    ///
    /// A message costs the same to begin whatever its size, so small problems are sent as whole
    /// shards, and none, but over a network, as more than eight chunks of a shard. Where tiles span
    /// the shards of few rows, what a rank has for another is one message. Not where some ranks
    /// share a node: what is passed on there is of one shard, so those of small problems are taken
    /// side by side instead, and still share one pass over `w`. Those of a GEMM-ReduceScatter that
    /// go together always are, so that they are finished at about the same time. Where rows are no
    /// whole tiles, the tiles of a GEMM-ReduceScatter span shards of any size if that takes less
    /// time, and what whole waves leave may be shared by the workers that there are. Shards of
    /// several peers that come at once are taken side by side, chunk by chunk, where that takes
    /// less time, and some items are [lent](Schedule::lent) to the multiprocessors that the
    /// messages have.
    pub fn in_messages(problem: &Problem, channels: &Channels, sending: Sending, nodes: Nodes) -> Self {
        let own = Self::shard_by_shard(problem);
        let peers = problem.world().peers();
        if nodes.are_mixed() {
            // What is passed on to local peers, and what these add up, is on its way as long as the
            // call.
            Call::fastest(problem, channels, (sending, peers), &own, false).1
        } else {
            Call::chosen(problem, channels, (sending, peers), &own).1
        }
    }
}

impl Sending {
    /// The sending with which a call takes the least time, of `peers` peers to whom messages go. A
    /// heuristic: the more peers at once, the more is carried and the fewer multiprocessors are
    /// left. Where the call has a `schedule` already, one that [suits](Self::suits) it.
    pub fn heuristic(problem: &Problem, channels: &Channels, peers: u32, schedule: Option<&Schedule>) -> Self {
        let suits = schedule.is_none_or(|schedule| Self::Before.suits(problem.op(), schedule));
        let before = (peers == problem.world().peers() && !channels.network && suits).then_some(Self::Before);
        // Of equals the first. Rows of an AllGather-GEMM that come early leave their
        // multiprocessors to it: GPT-3 at 8192 rows takes 0.87 to 0.89 of serial's time on four
        // GPUs beside messages to three peers, and 0.88 to 0.93 beside those to one, estimated to
        // take as long (results/tuning/nccl-tp4.txt, 4.).
        let gathers = problem.op() == OpKind::AllGatherGemm;
        let most = peers.max(1);
        let beside = (0..most).map(|turn| Self::Beside { peers: if gathers { most - turn } else { turn + 1 } });
        let own = Schedule::shard_by_shard(problem);
        let few = peers == 1 && problem.m_shard() <= ALONE_ROWS;
        let time = |&sending: &Self| {
            let percent = match sending {
                Self::Beside { .. } if few => BESIDE_PERCENT,
                Self::Beside { .. } if peers > 1 && problem.op() == OpKind::AllGatherGemm => ROWS_BESIDE_OF_MORE_PERCENT,
                Self::Before | Self::Beside { .. } => 100,
            };
            Call::chosen(problem, channels, (sending, peers), &own).0.saturating_mul(percent)
        };
        beside.chain(before).min_by_key(time).unwrap_or(Self::ALL)
    }
}

/// Workers beside messages of so many bytes to these peers. What NCCL may have more is left to it,
/// and not counted on.
fn workers(channels: &Channels, op: OpKind, (sending, peers): (Sending, u32), bytes: u64) -> u32 {
    let left = match sending {
        Sending::Before => channels.beside(sending, op, &[]),
        Sending::Beside { .. } => channels.of_message(bytes).saturating_mul(sending.peers().min(peers)).min(channels.all),
    };
    MULTIPROCESSORS.saturating_sub(left).max(1)
}

/// Nanoseconds of a whole tile's operations.
fn along_k_ns(problem: &Problem, tile: TileShape) -> u64 {
    2 * u64::from(tile.m) * u64::from(tile.n) * u64::from(problem.k_local()) / OPERATIONS
}

/// What a shard of this tile's is cut into for chunks, row blocks or tiles, and the bytes of it
/// that one rank gives to another.
fn cut(problem: &Problem, tile: TileShape) -> (u64, u64) {
    let grid = TileGrid::of_shard(problem, tile);
    match problem.op() {
        OpKind::AllGatherGemm => (u64::from(grid.row_blocks()), gather_place_bytes(problem)),
        OpKind::GemmReduceScatter => (grid.tiles(), grid.tiles() * slot_bytes(problem, tile)),
    }
}

/// What one rank gives to another where tiles span shards.
fn place_bytes(problem: &Problem) -> u64 {
    match problem.op() {
        OpKind::AllGatherGemm => gather_place_bytes(problem),
        OpKind::GemmReduceScatter => scatter_place_bytes(problem),
    }
}

/// A call as it is estimated: what is computed, and how it is sent.
#[derive(Clone, Copy)]
struct Call<'a> {
    problem: &'a Problem,
    sending: Sending,
    /// To whom messages go.
    peers: u32,
    /// Multiprocessors that a message has at least.
    lanes: u32,
    workers: u32,
    tile_ns: u64,
    /// Tiles that groups of workers share, and the percent of a tile's time that these take.
    shared: Option<(u64, u64)>,
    /// Tiles of a shard; of all where they span shards.
    tiles: u64,
    flattened: bool,
    /// What one rank gives to another.
    place_bytes: u64,
    chunks: u64,
    /// Row blocks of a shard, and of a chunk where rows are sent.
    row_blocks: u64,
    of_chunk: u64,
    /// Row blocks that are taken together.
    group: u64,
    /// Shards side by side, and those before them that are bands of their own.
    band: u32,
    alone: u32,
    /// Multiprocessors of the messages, where they can have tiles before the first and after the
    /// last, and those that they have.
    lends: u32,
    lent: Lent,
}

impl<'a> Call<'a> {
    /// The schedule for this sending to so many peers where no ranks share a node, and the
    /// nanoseconds that it takes.
    fn chosen(problem: &'a Problem, channels: &Channels, to: (Sending, u32), own: &Schedule) -> (u64, Schedule) {
        let late = problem.op() == OpKind::AllGatherGemm && to.1 == 1 && to.0 != Sending::Before && !own.stack;
        let band = if late { BAND_ROWS.div_ceil(problem.m_shard()).min(own.band) } else { own.band };
        let by_shard = || Self::fastest(problem, channels, to, &Schedule { band, ..*own }, true);
        if to.1 == 0 {
            return by_shard();
        }
        // Of an AllGather-GEMM the own rows can be worked on while the others come; and over a
        // network a message for all tiles would be larger than is worth it, but of few rows. What
        // goes between tiles and folds is of tiles that span shards, which alone are folded.
        let (adds, folds) = (problem.op() == OpKind::GemmReduceScatter, to.0 == Sending::Before);
        let spans = own.stack || adds && (folds || is_ragged(problem) && !channels.network);
        // Of rows that are all there first neither holds. With one peer they were not timed so.
        let at_once = !adds && folds && !own.stack && to.1 > 1;
        let spanning = match (spans, at_once) {
            (true, _) => Self::spanning(problem, channels, to),
            (false, true) => Self::spanning_at_once(problem, channels, to),
            (false, false) => Vec::new(),
        };
        let by_shard = if own.stack || adds && folds { None } else { Some(by_shard()) };
        // Of equals the first: tiles that span shards make one pass over `w`. Four H100 take 3 %
        // less time so of GPT-3 at 1024 and 2048 rows (results/tuning/nccl-tp4.txt, 3.).
        let ways = spanning.into_iter().map(|(call, schedule)| (call.estimate(), schedule)).chain(by_shard);
        let (time, schedule) = ways.min_by_key(|way| way.0).unwrap_or((u64::MAX, *own));
        // Behind messages that go before it a call is one over peers' memory whose rows are all
        // there. Of rows for which all tiles are shared more was timed of those: Llama's
        // GEMM-ReduceScatter at 130 takes 1.16 of serial's time so, and 1.19 in two splits
        // (results/h200-x2-ragged-nccl.json, and that of e110e4c, in the history).
        let few = schedule.stack && to.0 == Sending::Before && is_ragged(problem) && problem.m() <= FEW_ROWS;
        let workers = workers(channels, problem.op(), to, 0);
        let fastest = if few { Schedule::spanning_at_once(problem, workers) } else { None };
        (time, fastest.map_or(schedule, |fastest| Schedule { chunk: Chunk::Shard, ..fastest }))
    }

    /// With tiles that span shards, for the workers that there are, and what a rank has for another
    /// as one message: the tile of the fewest waves, whose `k` may be split; and, where rows are no
    /// whole tiles, each that there is, of which what whole waves leave may be shared.
    fn spanning(problem: &'a Problem, channels: &Channels, to: (Sending, u32)) -> Vec<(Self, Schedule)> {
        let workers = workers(channels, problem.op(), to, place_bytes(problem));
        let few = Schedule::flattened(problem, workers.min(WORKERS));
        let ragged = if is_ragged(problem) { that_span(problem) } else { Vec::new() };
        let costs = |tile| ragged.iter().find(|candidate| candidate.0 == tile).map_or(100, |candidate| candidate.1);
        let shared = ragged.iter().map(|&(tile, cost)| (Schedule::spanning(problem, tile, 1).sharing(problem, workers), cost));
        let ways = std::iter::once((few, costs(few.tile))).chain(shared);
        ways.map(|way| Self::that_spans(problem, channels, to, workers, way)).collect()
    }

    /// The same of any number of rows that are all there when they are read: each tile that there
    /// is, with what whole waves leave shared, and without.
    fn spanning_at_once(problem: &'a Problem, channels: &Channels, to: (Sending, u32)) -> Vec<(Self, Schedule)> {
        let workers = workers(channels, problem.op(), to, 0);
        let ways = that_span_at_once(problem).into_iter().flat_map(|(tile, cost)| {
            let whole = Schedule::spanning(problem, tile, 1);
            let shared = Some(whole.sharing(problem, workers)).filter(|shared| *shared != whole);
            [Some(whole), shared].into_iter().flatten().map(move |schedule| (schedule, cost))
        });
        ways.map(|way| Self::that_spans(problem, channels, to, workers, way)).collect()
    }

    /// With tiles that span shards, of which each step costs so many percent.
    fn that_spans(
        problem: &'a Problem,
        channels: &Channels,
        to: (Sending, u32),
        workers: u32,
        (schedule, cost): (Schedule, u64),
    ) -> (Self, Schedule) {
        let schedule = Schedule { chunk: Chunk::Shard, ..schedule };
        let (grid, splits) = (TileGrid::new(problem.m(), problem.n_local(), schedule.tile), u64::from(schedule.splits));
        let call = Self {
            problem,
            sending: to.0,
            peers: to.1,
            lanes: channels.each,
            workers,
            tile_ns: along_k_ns(problem, schedule.tile) * cost / 100 / splits + TILE_NS,
            shared: Self::shared(problem, &schedule),
            tiles: grid.tiles() * splits,
            flattened: true,
            place_bytes: place_bytes(problem),
            chunks: 1,
            row_blocks: grid.row_blocks().into(),
            of_chunk: grid.row_blocks().into(),
            group: ROW_GROUP.into(),
            band: problem.world().get(),
            alone: 0,
            lends: 0,
            lent: Lent::NONE,
        };
        (call, schedule)
    }

    /// Tiles that a schedule has shared, and the percent of a tile's time that they take.
    fn shared(problem: &Problem, schedule: &Schedule) -> Option<(u64, u64)> {
        let shares = schedule.shared_tiles(problem)?;
        Some((shares.count(), 100 * shares.time() / shares.steps()))
    }

    /// The fastest schedule of this sending whose tiles are of one shard each, some of them lent
    /// where it `lends`, and the nanoseconds that it takes.
    fn fastest(problem: &'a Problem, channels: &Channels, to: (Sending, u32), own: &Schedule, lends: bool) -> (u64, Schedule) {
        let tiles = match own.stack {
            true if problem.m_shard() <= THIN_ROWS => vec![(thin(problem), 100)],
            true => vec![(unless_unsent(problem, own.tile), 100)],
            false => of_shards(problem),
        };
        let counts = if channels.network { NETWORK_CHUNKS.as_slice() } else { &CHUNKS };
        // Those that come together side by side, behind the own one.
        let beside = to.0.peers().min(to.1);
        let side_by_side =
            lends && problem.op() == OpKind::AllGatherGemm && own.band == 1 && !own.stack && to.0 != Sending::Before && beside > 1;
        let orders = std::iter::once(*own).chain(side_by_side.then_some(Schedule { alone: 1, band: beside, by_chunk: to.1, ..*own }));
        let cuts = orders.flat_map(|own| tiles.iter().flat_map(move |&tile| counts.iter().map(move |&chunks| (own, tile, chunks))));
        let ways = cuts.map(|(own, tile, chunks)| {
            let (call, schedule) = Self::new(problem, channels, to, &own, (tile, chunks));
            let (shared, sharing) = if is_ragged(problem) && !own.stack { call.sharing(schedule) } else { (call, schedule) };
            let lending = lends.then(|| call.lending(schedule)).filter(|(_, schedule)| schedule.lent != Lent::NONE);
            std::iter::once((shared.estimate(), sharing)).chain(lending.map(|(call, schedule)| (call.estimate(), schedule)))
        });
        ways.flatten().min_by_key(|way| way.0).unwrap_or((u64::MAX, *own))
    }

    /// As `own` but with this tile, whose steps cost so many percent, and a shard in so many
    /// chunks, if none is smaller than is worth a message.
    fn new(
        problem: &'a Problem,
        channels: &Channels,
        to: (Sending, u32),
        own: &Schedule,
        ((tile, cost), chunks): ((TileShape, u64), u64),
    ) -> (Self, Schedule) {
        let (sending, world) = (to.0, problem.world().get());
        let band = match problem.op() {
            _ if own.stack => world,
            OpKind::AllGatherGemm => own.band,
            OpKind::GemmReduceScatter => own.band.max(sending.peers().min(world)),
        };
        let (available, place_bytes) = cut(problem, tile);
        let least = if sending == Sending::Before { place_bytes } else { channels.least_bytes };
        let together = place_bytes.div_ceil(chunks).max(least).div_ceil(place_bytes.div_ceil(available)).clamp(1, available);
        let chunk = if together == available { Chunk::Shard } else { Chunk::Tiles(together as u32) };
        let schedule = Schedule { tile, chunk, band, splits: 1, k_slices: 1, stack: false, early: 0, ..*own };
        (Self::of_whole_tiles(problem, channels, to, &schedule, cost), schedule)
    }

    /// With tiles of one shard each, none of which is shared, and whose steps cost so many percent.
    fn of_whole_tiles(problem: &'a Problem, channels: &Channels, to: (Sending, u32), schedule: &Schedule, cost: u64) -> Self {
        let (sending, peers) = to;
        let grid = TileGrid::of_shard(problem, schedule.tile);
        let (available, place_bytes) = cut(problem, schedule.tile);
        let together = match schedule.chunk {
            Chunk::Shard => available,
            Chunk::Tiles(together) => u64::from(together).min(available),
        };
        let workers = workers(channels, problem.op(), to, place_bytes.min(together * place_bytes.div_ceil(available)));
        // With ranks in one node as well, what goes along the rail is not all. Over a network
        // messages are on their way as long as the call. Those of one peer take 3 % of the
        // multiprocessors, and were not timed so.
        let lends = sending != Sending::Before && peers > 1 && peers == problem.world().peers() && !channels.network;
        Self {
            problem,
            sending,
            peers,
            lanes: channels.each,
            workers,
            tile_ns: along_k_ns(problem, schedule.tile) * cost / 100 + TILE_NS,
            shared: None,
            tiles: grid.tiles(),
            flattened: false,
            place_bytes,
            chunks: available.div_ceil(together),
            row_blocks: grid.row_blocks().into(),
            of_chunk: together,
            group: if schedule.by_chunk > 0 { together } else { ROW_GROUP.into() },
            band: schedule.band,
            alone: schedule.alone,
            lends: if lends { MULTIPROCESSORS - workers } else { 0 },
            lent: schedule.lent,
        }
    }

    /// The same with what whole waves leave shared, where that gains time. Of shards one by one
    /// that come meanwhile, or chunk by chunk, it gains an AllGather-GEMM nothing (what it lends
    /// may: [`lending`](Self::lending)), and half of what it should a GEMM-ReduceScatter, whose own
    /// tiles come last; of shards side by side an AllGather-GEMM gains 10 and 13 % by half a wave,
    /// and loses 1 and 6 % by an eighth (results/tuning/ragged-nccl.txt, 1. and 2.,
    /// h100-x2-ragged-nccl.json of af866aa, in the history; GPT-3 and Llama at 258 and 350 rows).
    fn sharing(self, schedule: Schedule) -> (Self, Schedule) {
        let gathers = self.problem.op() == OpKind::AllGatherGemm;
        if gathers && (schedule.band == 1 || schedule.alone > 0) && self.sending != Sending::Before {
            return (self, schedule);
        }
        let schedule = schedule.sharing(self.problem, self.workers);
        let shared = Self::shared(self.problem, &schedule);
        if gathers && shared.is_some_and(|(_, percent)| percent > MOST_SHARED) {
            return (self, Schedule { shares: 1, ..schedule });
        }
        let shared = shared.map(|(tiles, percent)| (tiles, if gathers { percent } else { percent.midpoint(100) }));
        (Self { shared, ..self }, schedule)
    }
}

mod estimate;
mod lending;
#[cfg(test)]
mod tests;
mod workers;
