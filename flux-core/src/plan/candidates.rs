//! The legal plans of a problem.
//!
//! Invariant: every candidate is canonical, legal for the problem and the target, and listed once.

use super::derive::RASTER_GROUP;
use super::{Chunk, CommMode, KSplit, Links, Mover, Plan, RowMapping, Target};
use crate::layout::{gather_place_bytes, slot_bytes};
use crate::tile::TileGrid;
use crate::{Problem, SumsTo, TileShape};
use std::collections::HashSet;

/// Bytes of a chunk over peer memory: about ten signal latencies of a link, so that a reader starts
/// after a fraction of a large shard.
const PEER_CHUNK_BYTES: u64 = 4 << 20;
/// Bytes of a chunk through host memory, where each chunk costs two copies of about 5 us.
const STAGED_CHUNK_BYTES: u64 = 2 << 20;
/// Least rows of a chunk through host memory, so that a pass over `w` serves enough rows.
const STAGED_CHUNK_ROWS: u32 = 256;
/// Least bytes of a slice of `k`: about three signal latencies of a link.
const SLICE_BYTES: u64 = 1 << 20;
/// Numbers of slices of `k`.
const K_SLICES: [u32; 9] = [1, 2, 3, 4, 5, 6, 8, 10, 12];
/// Numbers of parts of a split tile.
const SPLITS: [u32; 2] = [2, 3];
/// Numbers of messages of a shard.
const MESSAGES: [u32; 4] = [1, 2, 4, 8];

impl Plan {
    /// Every candidate for `problem` on `target`.
    pub fn candidates(problem: &Problem, target: &Target) -> Vec<Self> {
        let (mut all, mut known) = (Vec::new(), HashSet::new());
        for tile in target.machine.generation.tiles(problem.numerics()) {
            for rows in row_mappings(problem, target)
                .into_iter()
                .filter(|&rows| has_kernel(problem, target, tile, rows))
            {
                for plan in of_tile(problem, target, Self { rows, ..Self::of(tile) }) {
                    let plan = plan.canonical(problem, target);
                    if plan.has_wanted_order(problem, target) && known.insert(plan) {
                        all.push(plan);
                    }
                }
            }
        }
        all
    }

    /// Whether a kernel executes the plan for `problem` as the target asks.
    pub(super) fn is_executable(&self, problem: &Problem, target: &Target) -> bool {
        self.has_wanted_order(problem, target)
            && target.machine.generation.tiles(problem.numerics()).any(|tile| tile == self.tile)
            && has_kernel(problem, target, self.tile, self.rows)
    }
}

/// Whether a kernel of this tile sends partial sums as the op needs it. An AllGather-GEMM sends
/// none.
fn has_kernel(problem: &Problem, target: &Target, tile: TileShape, rows: RowMapping) -> bool {
    let (generation, numerics) = (target.machine.generation, problem.numerics());
    match (problem.op().sums_to(), rows) {
        (SumsTo::Nothing, _) => true,
        (_, RowMapping::Flattened | RowMapping::FlattenedTwoExchanges) => {
            generation.scatters(tile, numerics)
        }
        (_, RowMapping::PerShard { .. }) if problem.world().peers() == 0 => true,
        (_, RowMapping::PerShard { .. }) => generation.sends_partials(tile, numerics),
    }
}

/// Row mappings: groups of one, two, all peers' or all shards, and flattened rows.
fn row_mappings(problem: &Problem, target: &Target) -> Vec<RowMapping> {
    let (world, peers) = (problem.world().get(), problem.world().peers());
    let widest = target.widest_group(problem);
    let mut groups: Vec<u32> =
        [1, 2, peers, world].into_iter().map(|group| group.clamp(1, widest)).collect();
    groups.sort_unstable();
    groups.dedup();
    let all_reduces = peers > 0 && problem.op().sums_to() == SumsTo::All;
    // The GEMM of a library's AllReduce is of all rows.
    let is_one_gemm = all_reduces && target.has_collectives(problem);
    let flattened =
        (peers > 0 && (is_one_gemm || !target.nodes.are_mixed())).then_some(RowMapping::Flattened);
    let two_exchanges =
        flattened.filter(|_| all_reduces).map(|_| RowMapping::FlattenedTwoExchanges);
    groups
        .into_iter()
        .map(|group| RowMapping::PerShard { group })
        .chain(flattened)
        .chain(two_exchanges)
        .filter(|&rows| !all_reduces || Some(rows) == flattened || target.exchanges_results(rows))
        .collect()
}

/// The plans of one tile and row mapping.
fn of_tile(problem: &Problem, target: &Target, plan: Plan) -> Vec<Plan> {
    let mut all = Vec::new();
    for comm in comm_modes(problem, target, &plan) {
        for chunk in chunks(problem, target, &plan, comm) {
            for k_slices in slices(problem, target, &plan) {
                let whole = Plan { chunk, k_slices, comm, ..plan };
                all.extend(split_k(problem, target, &whole).map(|k| Plan { k, ..whole }));
            }
        }
    }
    all
}

fn comm_modes(problem: &Problem, target: &Target, plan: &Plan) -> Vec<CommMode> {
    let [kernel, copies] =
        [Mover::Kernel, Mover::CopyEngine].map(|mover| CommMode::Fused { mover });
    let flattened = plan.is_flattened();
    match (target.links, problem.op().sums_to()) {
        // The model takes the first of equal plans: copy engines need no SM.
        (Links::PeerMemory, SumsTo::Nothing) if !flattened => vec![copies, kernel],
        (Links::PeerMemory, _) => vec![kernel],
        (Links::HostStaged, _) if problem.op().reduces() && flattened => vec![kernel, copies],
        (Links::HostStaged, _) => vec![copies],
        (Links::Messages(_), SumsTo::All) if problem.world().peers() > 0 => {
            // Messages carry every rank's rows to all, in place of the library's sum.
            let messages = CommMode::Overlapped { peers: problem.world().peers() };
            let has_collectives = target.has_collectives(problem);
            let comm = if has_collectives && !target.batch_invariant {
                Some(CommMode::Sequential)
            } else {
                (!target.nodes.are_mixed()).then_some(messages)
            };
            comm.filter(|_| flattened).into_iter().collect()
        }
        (Links::Messages(_), _) => {
            // A GEMM-ReduceScatter sends chunks of all shards of a group at once.
            let peers = problem.world().peers().max(1);
            let at_once = match (problem.op().sums_to(), plan.rows) {
                (SumsTo::Nothing, _) => 1..=peers,
                (_, RowMapping::PerShard { group }) => group.min(peers)..=group.min(peers),
                (_, RowMapping::Flattened | RowMapping::FlattenedTwoExchanges) => peers..=peers,
            };
            let sequential = flattened && target.has_collectives(problem);
            let overlapped = at_once.map(|peers| CommMode::Overlapped { peers });
            overlapped.chain(sequential.then_some(CommMode::Sequential)).collect()
        }
    }
}

fn chunks(problem: &Problem, target: &Target, plan: &Plan, comm: CommMode) -> Vec<Chunk> {
    let grid = TileGrid::of_shard(problem, plan.tile);
    let tiles = |tiles: u64| Chunk::Tiles(u32::try_from(tiles).unwrap_or(u32::MAX).max(1));
    let is_small = gather_place_bytes(problem) <= PEER_CHUNK_BYTES;
    let row_block =
        gather_place_bytes(problem) / u64::from(problem.m_shard()) * u64::from(plan.tile.m);
    let staged_tiles = STAGED_CHUNK_BYTES / slot_bytes(problem, plan.tile);
    let by_kernel = matches!(comm, CommMode::Fused { mover: Mover::Kernel });
    match (target.links, problem.op().sums_to()) {
        // The kernel announces tiles of partial sums one by one.
        (Links::PeerMemory | Links::HostStaged, _) if problem.op().reduces() && by_kernel => {
            vec![Chunk::Tiles(1)]
        }
        _ if plan.is_flattened() => vec![Chunk::Shard],
        (Links::PeerMemory, _) if is_small => vec![Chunk::Shard],
        (Links::PeerMemory, _) => vec![tiles(PEER_CHUNK_BYTES / row_block)],
        (Links::HostStaged, SumsTo::Nothing) => {
            let least = STAGED_CHUNK_ROWS.div_ceil(plan.tile.m);
            [least, 2 * least]
                .map(|least| tiles((STAGED_CHUNK_BYTES / row_block).max(least.into())))
                .to_vec()
        }
        (Links::HostStaged, SumsTo::Rows) => vec![tiles(staged_tiles)],
        // Chunks pass four copies, one after the other. Those of whole columns of a raster group
        // are blocks of few copies.
        (Links::HostStaged, SumsTo::All) => {
            let group = u64::from(RASTER_GROUP);
            [staged_tiles, staged_tiles / 2, 2 * staged_tiles]
                .map(|count| tiles(if count < group { count } else { count / group * group }))
                .to_vec()
        }
        (Links::Messages(channels), _) => {
            let of_shard =
                if problem.op().gathers() { grid.row_blocks().into() } else { grid.tiles() };
            let bytes = if problem.op().gathers() {
                gather_place_bytes(problem)
            } else {
                grid.tiles() * slot_bytes(problem, plan.tile)
            };
            let worth = MESSAGES
                .iter()
                .filter(|&&parts| parts == 1 || bytes / u64::from(parts) >= channels.least_bytes);
            worth.map(|&parts| tiles(of_shard.div_ceil(parts.into()))).collect()
        }
    }
}

fn slices(problem: &Problem, target: &Target, plan: &Plan) -> Vec<u32> {
    let shards = match plan.rows {
        RowMapping::PerShard { group } => group,
        RowMapping::Flattened | RowMapping::FlattenedTwoExchanges => problem.world().get(),
    };
    if problem.op().reduces() || shards == 1 || target.has_messages() {
        return vec![1];
    }
    let sent = gather_place_bytes(problem) * u64::from(shards - 1);
    K_SLICES
        .into_iter()
        .filter(|&slices| slices == 1 || sent / u64::from(slices) >= SLICE_BYTES)
        .collect()
}

/// Ways to divide `k`. Split tiles must fit one wave.
fn split_k<'a>(
    problem: &Problem,
    target: &Target,
    plan: &'a Plan,
) -> impl Iterator<Item = KSplit> + use<'a> {
    let tiles = plan.tiles(problem);
    let workers = u64::from(target.machine.multiprocessors);
    let split = SPLITS
        .into_iter()
        .filter(move |&split_k| plan.k_slices == 1 && tiles * u64::from(split_k) <= workers);
    [KSplit::Whole, KSplit::StreamK].into_iter().chain(split.map(KSplit::SplitK))
}
