//! A roofline model that ranks plans.
//!
//! Invariant: figures are rates and latencies of the [`Machine`](crate::machine::Machine), but for
//! `OVERLAP` and `BESIDE_MESSAGES`; none depends on a shape or a world size. Times are in ns,
//! rates in operations or bytes per ns.

#![allow(clippy::cast_sign_loss, reason = "extents, counts and times are not negative")]

use super::{Chunk, CommMode, KSplit, Links, Mover, Plan, RowMapping, Target};
use crate::layout::{RowLayout, gather_place_bytes, scatter_place_bytes, slot_bytes};
use crate::program::Schedule;
use crate::tile::Generation;
use crate::tile::TileGrid;
use crate::{Problem, Rank, SumsTo};

/// Margin of calls beside library messages, whose schedule on SMs is unknown. A sequential plan,
/// which has no such uncertainty, is taken unless the gain is larger. Chosen by hand after one run
/// on four H200, where the model was about a fifth short beside messages.
const BESIDE_MESSAGES: f64 = 1.15;

/// Exponent of the soft maximum of two overlapping streams: equal streams take an eighth longer
/// than one, and a stream of half the length hides.
const OVERLAP: i32 = 6;

impl Plan {
    /// The candidates, the fastest by the model first. Those within half a percent keep the order
    /// of candidates, simplest first.
    pub fn ranked(problem: &Problem, target: &Target) -> Vec<Self> {
        let mut ranked = Self::candidates(problem, target);
        ranked.sort_by_cached_key(|plan| {
            (plan.cost_ns(problem, target).max(1.0).ln() * 200.0).round() as i64
        });
        ranked
    }

    /// Modelled time of a call on the slowest rank, in ns.
    pub fn cost_ns(&self, problem: &Problem, target: &Target) -> f64 {
        let cost = PlanCost::new(self, problem, target);
        let body = cost.body();
        let exposed = match (self.comm, problem.op().sums_to()) {
            (_, _) if problem.world().peers() == 0 => 0.0,
            (CommMode::Sequential, _) => cost.collective(),
            (_, SumsTo::Nothing) => cost.exposed_gather(body),
            (_, SumsTo::Rows | SumsTo::All) => cost.exposed_scatter(body),
        };
        match self.comm {
            CommMode::Overlapped { .. } => (body + exposed) * BESIDE_MESSAGES,
            CommMode::Fused { .. } | CommMode::Sequential => body + exposed,
        }
    }
}

/// A plan's call, with terms that several parts of its time share.
struct PlanCost<'a> {
    plan: &'a Plan,
    problem: &'a Problem,
    target: &'a Target,
    schedule: Schedule,
    workers: f64,
    /// Tiles of a shard.
    of_shard: f64,
    tiles: f64,
    /// Time of one worker for one tile.
    tile_ns: f64,
    /// Bytes that a rank sends in a ns.
    link: f64,
}

impl<'a> PlanCost<'a> {
    fn new(plan: &'a Plan, problem: &'a Problem, target: &'a Target) -> Self {
        let of_shard = TileGrid::of_shard(problem, plan.tile).tiles() as f64;
        let tiles = plan.tiles(problem) as f64;
        let (machine, operand) = (&target.machine, problem.numerics().operand);
        let ops = 2.0
            * f64::from(plan.tile.m)
            * f64::from(plan.tile.n)
            * f64::from(problem.k_shard().next_multiple_of(plan.tile.k));
        // Tensor cores idle while sums leave them, and shared memory is not faster then. Timed
        // plans of 16-bit products show no such time: with it, the model is further behind the
        // fastest.
        let percent = if machine.generation == Generation::Hopper && problem.numerics().promotes() {
            plan.tile.wgmma_step_percent(operand)
        } else {
            100
        };
        let multiply_ns = ops / machine.ops_per_ns(operand) * percent as f64 / 100.0;
        // Every step loads a column of both operands from L2, of x as many rows as there are.
        let rows = if plan.is_flattened() { problem.m() } else { problem.m_shard() };
        let elements =
            f64::from(plan.tile.m.min(rows) + plan.tile.n) * f64::from(problem.k_shard());
        let l2 = machine.l2_bytes_per_us as f64 / 1000.0 / f64::from(machine.multiprocessors);
        let load_ns = elements * operand.bytes() as f64 / l2;
        let through = machine.generation.shared_elements(plan.tile, problem.numerics());
        let through = f64::from(through.unwrap_or(0)) * f64::from(problem.k_shard());
        let shared_ns = through * operand.bytes() as f64 / machine.shared_bytes_per_ns();
        let steps_ns = multiply_ns.max(load_ns).max(shared_ns);
        let link = machine.both_ways_bytes_per_us as f64 / 1000.0;
        // SMs of the messages beside the kernel, and their rate.
        let (taken, link) = match (target.links, plan.comm) {
            (Links::Messages(channels), CommMode::Overlapped { peers }) => {
                let taken = channels
                    .of_message(message_bytes(plan, problem))
                    .saturating_mul(peers.min(problem.world().peers()))
                    .min(channels.all);
                (
                    taken,
                    (f64::from(taken.max(1)) * machine.message_bytes_per_us as f64 / 1000.0)
                        .min(link),
                )
            }
            _ => (0, link),
        };
        let workers = f64::from(machine.multiprocessors.saturating_sub(taken).max(1));
        let schedule = plan.schedule(problem, target);
        Self { plan, problem, target, schedule, workers, of_shard, tiles, tile_ns: steps_ns, link }
    }

    /// Multiplication and operand reads, overlapped, and the fix-up of shared tiles behind both.
    fn body(&self) -> f64 {
        let sum = self.multiply().powi(OVERLAP) + self.read().powi(OVERLAP);
        sum.powf(1.0 / f64::from(OVERLAP)) + self.fix_up()
    }

    /// Split-K partials of the last tiles: each is stored, announced by a signal, awaited and
    /// loaded, one after the other, when no operand is read any more.
    fn fix_up(&self) -> f64 {
        let parts = match self.plan.k {
            KSplit::Whole => return 0.0,
            KSplit::SplitK(parts) => f64::from(parts),
            KSplit::StreamK => 2.0,
        };
        2.0 * self.workers * self.tile_elements() * 4.0 / self.memory()
            + parts * self.target.machine.signal_ns as f64
    }

    /// Waves of tiles.
    fn multiply(&self) -> f64 {
        let fixed = self.target.machine.tile_ns as f64;
        match self.plan.k {
            KSplit::Whole => (self.tiles / self.workers).ceil() * (self.tile_ns + fixed),
            KSplit::SplitK(parts) => {
                let parts = f64::from(parts);
                let waves = (self.tiles * parts / self.workers).ceil();
                waves * (self.tile_ns / parts + fixed)
            }
            KSplit::StreamK => {
                let share = self
                    .schedule
                    .stream_k_tiles(self.problem, Rank::new(0))
                    .map_or(1.0, |stream_k| stream_k.time() as f64 / stream_k.steps() as f64);
                let whole = (self.tiles / self.workers).floor();
                whole * (self.tile_ns + fixed) + share * self.tile_ns + fixed
            }
        }
    }

    /// Reads of `w`, once a pass, and of `x`.
    fn read(&self) -> f64 {
        let bytes = self.problem.numerics().operand.bytes() as f64;
        let w = f64::from(self.problem.n_shard()) * f64::from(self.problem.k_shard()) * bytes;
        let x = f64::from(self.problem.m()) * f64::from(self.problem.k_shard()) * bytes;
        (self.passes() * w + x) / self.memory()
    }

    fn passes(&self) -> f64 {
        let world = self.problem.world().get();
        let passes = match (self.plan.rows, self.problem.op().sums_to()) {
            (RowMapping::PerShard { group }, SumsTo::Nothing) => {
                let prologue = self.schedule.prologue.min(world);
                // Chunk order takes one pass a chunk.
                let chunks = if self.schedule.chunk_ordered > 0 { self.chunks() as u32 } else { 1 };
                prologue + (world - prologue).div_ceil(group) * chunks
            }
            (RowMapping::PerShard { group }, SumsTo::Rows | SumsTo::All) => {
                (world - 1).div_ceil(group) + 1
            }
            (RowMapping::Flattened | RowMapping::FlattenedTwoExchanges, _) => {
                self.problem.m().div_ceil(self.plan.tile.m).div_ceil(super::derive::RASTER_GROUP)
            }
        };
        passes.into()
    }

    /// Exposed time of an AllGather-GEMM: the largest delay of a group's rows against the wave that
    /// begins it, and any link time beyond the body. Workers take tiles strided, so a late group
    /// delays the whole call.
    fn exposed_gather(&self, body: f64) -> f64 {
        let world = self.problem.world();
        let groups: Vec<_> = if self.plan.is_flattened() {
            std::iter::once(0..world.get()).collect()
        } else {
            self.schedule.groups(world).collect()
        };
        let place = gather_place_bytes(self.problem) as f64 / self.link;
        let (chunks, slices) = (self.chunks(), f64::from(self.plan.k_slices));
        let (mut moved, mut waited) = (self.mover_begins(), 0_f64);
        for group in groups {
            let peers = f64::from(group.end - group.start.max(1));
            if peers == 0.0 {
                continue;
            }
            let (piece, bytes) = (self.piece(peers, chunks, slices), peers * place);
            let first = match (group.len(), self.plan.is_flattened()) {
                // A single shard begins with its first chunk.
                (1, false) => piece + bytes / chunks / slices,
                _ => chunks * piece + bytes / slices,
            };
            let begins =
                (f64::from(group.start) * self.of_shard / self.workers).floor() * self.tile_ns;
            let signal = self.target.machine.signal_ns as f64;
            let last = chunks * slices * piece + bytes;
            // A sliced tile ends after its last slice.
            let until_last =
                if slices > 1.0 { last - self.tile_ns * (1.0 - 1.0 / slices) } else { first };
            waited = waited.max(moved + first.max(until_last) + signal - begins);
            moved += last;
        }
        waited + (moved - body - waited).max(0.0)
    }

    fn mover_begins(&self) -> f64 {
        let machine = &self.target.machine;
        match self.plan.comm {
            CommMode::Fused { mover: Mover::CopyEngine } => machine.copy_begins_ns as f64,
            CommMode::Overlapped { .. } => 0.0,
            _ => machine.push_begins_ns as f64,
        }
    }

    /// The mover's fixed time of a piece to this many peers.
    fn piece(&self, peers: f64, chunks: f64, slices: f64) -> f64 {
        let machine = &self.target.machine;
        match self.plan.comm {
            CommMode::Fused { mover: Mover::CopyEngine } => peers * machine.copy_ns as f64,
            CommMode::Overlapped { peers: at_once } => {
                (peers / f64::from(at_once)).ceil() * machine.message_ns as f64
            }
            _ => {
                let rows = (f64::from(self.problem.m_shard()) / chunks).ceil() as u64;
                let row_bytes = (f64::from(self.problem.k_shard()) / slices).ceil() as u64
                    * self.problem.numerics().operand.bytes() as u64;
                let ranks = peers as u64 + u64::from(self.plan.is_flattened());
                machine.push_overhead(rows, row_bytes, ranks).as_nanos() as f64
            }
        }
    }

    /// Exposed time of a GEMM-ReduceScatter: link time beyond the body, the last wave's bytes, and
    /// additions after the mainloop.
    fn exposed_scatter(&self, body: f64) -> f64 {
        let (machine, peers) = (&self.target.machine, f64::from(self.problem.world().peers()));
        let signal = machine.signal_ns as f64;
        let slot = slot_bytes(self.problem, self.plan.tile) as f64;
        let last_wave = self.tiles - ((self.tiles - 1.0) / self.workers).floor() * self.workers;
        if self.plan.is_flattened() {
            let place = scatter_place_bytes(self.problem, self.schedule.rows) as f64;
            let (sent, rows) = (place * peers, place * (peers + 1.0));
            let reduced = 2.0 * rows / self.memory() + 2.0 * signal;
            // A whole shard leaves when the last tile is done.
            if self.plan.chunk == Chunk::Shard {
                return sent / self.link + 2.0 * machine.message_ns as f64 + reduced;
            }
            let last = sent * (last_wave / self.tiles).min(1.0);
            // Reductions load peers' rows from host memory, where kernels have stored them.
            let loaded =
                if self.target.links == Links::HostStaged { sent / self.link } else { 0.0 };
            // Sums leave when all tiles are done, and are then copied.
            let shared = if self.schedule.rows.has_two_exchanges() {
                sent / self.link + 2.0 * sent / self.memory() + 2.0 * signal
            } else {
                0.0
            };
            return (sent / self.link - body).max(0.0)
                + last / self.link
                + loaded
                + reduced
                + shared;
        }
        // Own tiles of the last wave.
        let own = self.own_in_last_wave(last_wave);
        let of_peers = (last_wave - own).max(0.0);
        let late = peers - f64::from(self.schedule.in_mainloop);
        let tiles_of_chunk = f64::from(self.schedule.chunk_of(self.of_shard as u32));
        let sent = self.of_shard * slot * peers;
        // The link begins after the first wave. Staged chunks and messages go on when whole.
        let whole_chunk = |latency: u64| {
            let latency = latency as f64;
            (tiles_of_chunk * slot / self.link + 2.0 * latency, latency)
        };
        let (whole_chunk, latency) = match self.plan.comm {
            CommMode::Fused { mover: Mover::Kernel } => (0.0, 0.0),
            CommMode::Fused { mover: Mover::CopyEngine } => whole_chunk(machine.copy_ns),
            CommMode::Overlapped { .. } | CommMode::Sequential => whole_chunk(machine.message_ns),
        };
        // The last partial tiles are for the shard before the own one, whose tiles hide them.
        let hidden = (self.of_shard / self.workers).floor() * self.tile_ns;
        let chunk = (whole_chunk - hidden).max(0.0);
        if self.problem.op().sums_to() == SumsTo::All {
            // Finished tiles travel as often as partial ones, the last behind all tiles, and are
            // then copied.
            let finished = slot * self.problem.numerics().output.bytes() as f64
                / self.problem.numerics().partial_bytes() as f64;
            let results = own * peers * finished;
            let all = sent + self.of_shard * finished * peers;
            // Both wait for whole chunks, of the shards of a group side by side.
            let side_by_side = f64::from(self.schedule.group).min(peers);
            let first = (side_by_side * tiles_of_chunk / self.workers).ceil() * self.tile_ns;
            let chunks = 2.0 * peers * (self.of_shard / tiles_of_chunk).ceil();
            let link = (first + all / self.link + chunks * latency - body).max(0.0)
                + of_peers * slot / self.link
                + results / self.link;
            let added = peers * slot / (machine.add_bytes_per_us as f64 / 1000.0);
            let copied = 2.0 * results / self.memory();
            return link + chunk + added + whole_chunk + copied + 2.0 * signal;
        }
        let link = (self.tile_ns + sent / self.link - body).max(0.0) + chunk;
        link + of_peers * slot / self.link
            + late * slot / (machine.add_bytes_per_us as f64 / 1000.0)
            + signal
    }

    /// Own tiles among those of the last wave: all that fit. A GEMM-AllReduce may have its own tiles
    /// last, or work on its peers' shards side by side. Own tiles then follow theirs.
    fn own_in_last_wave(&self, last_wave: f64) -> f64 {
        let (world, early) = (
            f64::from(self.problem.world().get()),
            self.schedule.group >= self.problem.world().peers()
                || self.schedule.own_lag == u32::MAX,
        );
        if self.problem.op().sums_to() == SumsTo::All && early {
            let behind = f64::from(self.schedule.own_lag) / world;
            return (last_wave / world + behind).min(self.of_shard).min(last_wave);
        }
        self.of_shard
    }

    /// Time of the library collective alone.
    fn collective(&self) -> f64 {
        let place = place_bytes(self.problem) as f64;
        self.target.machine.message_ns as f64
            + place * f64::from(self.problem.world().peers()) / self.link
    }

    fn chunks(&self) -> f64 {
        let available = TileGrid::of_shard(self.problem, self.plan.tile).row_blocks();
        f64::from(available.div_ceil(self.schedule.chunk_of(available).max(1)))
    }

    fn tile_elements(&self) -> f64 {
        f64::from(self.plan.tile.m) * f64::from(self.plan.tile.n)
    }

    fn memory(&self) -> f64 {
        self.target.machine.memory_bytes_per_us as f64 / 1000.0
    }
}

/// Bytes of one message: a chunk, or all bytes of a place.
fn message_bytes(plan: &Plan, problem: &Problem) -> u64 {
    let grid = TileGrid::of_shard(problem, plan.tile);
    match (plan.chunk, problem.op().sums_to()) {
        (Chunk::Tiles(tiles), SumsTo::Nothing) => {
            gather_place_bytes(problem) * u64::from(tiles.min(grid.row_blocks()))
                / u64::from(grid.row_blocks())
        }
        (Chunk::Tiles(tiles), SumsTo::Rows | SumsTo::All) => {
            slot_bytes(problem, plan.tile) * u64::from(tiles).min(grid.tiles())
        }
        (Chunk::Shard, _) => place_bytes(problem),
    }
}

/// Bytes that one rank gives another.
fn place_bytes(problem: &Problem) -> u64 {
    if problem.op().gathers() {
        gather_place_bytes(problem)
    } else {
        scatter_place_bytes(problem, RowLayout::Flattened)
    }
}
