//! The canonical form of a plan.
//!
//! Invariant: a plan and its canonical form have the same tile programs; canonical forms of
//! different programs differ. Tables, records and the ranks' agreement hold canonical plans.

use super::{Chunk, CommMode, KSplit, Links, Mover, Plan, RowMapping, Target};
use crate::tile::TileGrid;
use crate::{Problem, SumsTo};

impl Plan {
    /// The plan without values that have no effect for `problem` on `target`.
    ///
    /// ```
    /// use flux_core::plan::{KSplit, Plan, Target};
    /// use flux_core::machine::Machine;
    /// use flux_core::{DType, OpKind, Problem, TileShape, WorldSize};
    /// let world = WorldSize::new(4).unwrap();
    /// let p = Problem::new(OpKind::GemmReduceScatter, 512, 1024, 4096, DType::Bf16, world)?;
    /// let plain = Plan::of(TileShape::new(128, 128, 64));
    /// let asked = Plan { k: KSplit::SplitK(99), k_slices: 4, ..plain };
    /// // k has 16 steps on a rank, and only AllGather-GEMM has slices.
    /// let canonical = asked.canonical(&p, &Target::peer_memory(Machine::H100, &p));
    /// assert_eq!(canonical, Plan { k: KSplit::SplitK(16), ..plain });
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn canonical(&self, problem: &Problem, target: &Target) -> Self {
        let (gathers, peers) = (problem.op().gathers(), problem.world().peers());
        if peers == 0 {
            let prologue = Self {
                rows: RowMapping::PerShard { group: 1 },
                chunk: Chunk::Shard,
                k_slices: 1,
                ..*self
            };
            let comm = CommMode::Fused { mover: Mover::Kernel };
            return Self { k: prologue.canonical_split(problem, target), comm, ..prologue };
        }
        if self.comm == CommMode::Sequential || target.prefers_collectives(problem, self.comm) {
            let plan =
                Self { rows: RowMapping::Flattened, chunk: Chunk::Shard, k_slices: 1, ..*self };
            let comm = if target.has_collectives(problem) {
                CommMode::Sequential
            } else {
                plan.canonical_mover(problem, target)
            };
            return Self { comm, k: plan.canonical_split(problem, target), ..plan };
        }
        let rows = match self.rows {
            rows if problem.op().sums_to() == SumsTo::All && !target.exchanges_results(rows) => {
                RowMapping::Flattened
            }
            RowMapping::PerShard { group } => {
                RowMapping::PerShard { group: group.min(target.widest_group(problem)).max(1) }
            }
            RowMapping::FlattenedTwoExchanges if problem.op().sums_to() == SumsTo::All => {
                RowMapping::FlattenedTwoExchanges
            }
            RowMapping::Flattened | RowMapping::FlattenedTwoExchanges => RowMapping::Flattened,
        };
        let plan = Self { rows, ..*self };
        let plan = Self { chunk: plan.canonical_chunk(problem), ..plan };
        let k_steps = self.least_k_steps(problem);
        let width = k_steps.div_ceil(self.k_slices.max(1));
        let comm = match self.comm {
            CommMode::Overlapped { peers: at_once } if target.has_messages() => {
                let most = match rows {
                    RowMapping::PerShard { group } if !gathers => group.min(peers),
                    RowMapping::PerShard { .. }
                    | RowMapping::Flattened
                    | RowMapping::FlattenedTwoExchanges => peers,
                };
                CommMode::Overlapped { peers: at_once.clamp(1, most) }
            }
            _ => plan.canonical_mover(problem, target),
        };
        let cuts_k = gathers && !target.has_messages() && !problem.rows_carry_scales();
        let k_slices = if cuts_k { k_steps.div_ceil(width.max(1)) } else { 1 };
        let plan = Self { k_slices, comm, ..plan };
        Self { k: plan.canonical_split(problem, target), ..plan }
    }

    fn canonical_split(&self, problem: &Problem, target: &Target) -> KSplit {
        match self.k {
            KSplit::SplitK(workers) => match workers.min(self.least_k_steps(problem)) {
                ..=1 => KSplit::Whole,
                workers => KSplit::SplitK(workers),
            },
            KSplit::StreamK if target.nodes.are_mixed() || !self.shares_tiles(problem, target) => {
                KSplit::Whole
            }
            k => k,
        }
    }

    /// Steps along `k` of the rank with the least.
    const fn least_k_steps(&self, problem: &Problem) -> u32 {
        problem.k_local(problem.least_rank()).div_ceil(self.tile.k)
    }

    /// Whether stream-K shares tiles on some rank. The first and the last have the most and the
    /// least columns; each other rank is like one of them.
    fn shares_tiles(&self, problem: &Problem, target: &Target) -> bool {
        let schedule = self.schedule(problem, target);
        problem.distinct_ranks().any(|rank| schedule.stream_k_tiles(problem, rank).is_some())
    }

    fn canonical_chunk(&self, problem: &Problem) -> Chunk {
        let shard = TileGrid::of_shard(problem, self.tile);
        let Chunk::Tiles(tiles) = self.chunk else { return Chunk::Shard };
        let all = match (problem.op().sums_to(), self.rows) {
            (SumsTo::Nothing, _) => shard.row_blocks().into(),
            (_, RowMapping::PerShard { .. }) => shard.tiles(),
            (_, RowMapping::Flattened | RowMapping::FlattenedTwoExchanges) => self.tiles(problem),
        };
        match u64::from(tiles) < all {
            false => Chunk::Shard,
            // Flattened tiles are announced together or one by one.
            true if problem.op().reduces() && self.is_flattened() => Chunk::Tiles(1),
            true => Chunk::Tiles(tiles),
        }
    }

    /// The mover that the links dictate, or the plan's own.
    fn canonical_mover(&self, problem: &Problem, target: &Target) -> CommMode {
        let (gathers, by_tile) = (problem.op().gathers(), self.chunk != Chunk::Shard);
        let mover = match (target.links, self.comm) {
            (Links::PeerMemory, CommMode::Fused { mover }) if gathers && !self.is_flattened() => {
                mover
            }
            (Links::PeerMemory, _) => Mover::Kernel,
            // Kernels store only rows of single tiles to host memory.
            (Links::HostStaged, _) if !gathers && self.is_flattened() && by_tile => Mover::Kernel,
            (Links::HostStaged, _) => Mover::CopyEngine,
            (Links::Messages(_), _) => {
                return CommMode::Overlapped { peers: problem.world().peers() };
            }
        };
        CommMode::Fused { mover }
    }
}
