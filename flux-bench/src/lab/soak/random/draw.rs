//! Random cases: problems from tiny to a few thousand, with partial tiles, and plans for them.
//!
//! Invariant: a case is a function of seed, number, world, processor and links, so ranks agree
//! without an exchange and cases can be repeated.

use crate::harness::epilogue::{for_columns_of, problem_with, suffix, with_bias};
use crate::harness::{EpilogueSpec, data};
use crate::plan::Overrides;
use flux_core::plan::{Chunk, CommMode, KSplit, Mover, Plan, RowMapping};
use flux_core::problem::MAX_WEIGHTS;
use flux_core::tile::Generation;
use flux_core::{
    DType, Numerics, OpKind, Partials, Problem, ProblemError, Rank, Scales, SumsTo, TileShape,
    WorldSize,
};
use flux_ops::Operand;
use std::fmt;

/// Where ranks compute, which bounds the sizes: a host's ranks share its few cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Processor {
    Host,
    /// A GPU that runs so many CTAs of a rank at once.
    Gpu {
        ctas: u32,
        /// Its kernel.
        generation: Generation,
        /// Whether no other rank works there. Copies would wait behind another rank's kernel, so
        /// shared devices have the kernel as their mover.
        alone: bool,
    },
}

/// What a transport can do with a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Legal {
    All,
    /// Through host memory, where a GEMM-AllReduce has flattened rows, as over messages.
    Staged,
    /// Whole chunks as messages.
    Messages,
    /// The same, between nodes of several ranks.
    Mixed,
}

impl Legal {
    const fn ops(self) -> &'static [OpKind] {
        match self {
            Self::All | Self::Staged | Self::Messages => &OpKind::ALL,
            Self::Mixed => &[OpKind::AllGatherGemm, OpKind::GemmReduceScatter],
        }
    }
}

/// One problem with its plan.
#[derive(Clone, Debug)]
pub(super) struct RandomCase {
    /// What it is called by: with the seed it says everything.
    pub(super) number: u64,
    pub(super) problem: Problem,
    /// What the op does to its sums.
    pub(super) epilogue: EpilogueSpec,
    /// The plan; the op's own where there is none.
    pub(super) plan: Option<Plan>,
    /// Whether the op chooses among plans with one order of sums.
    pub(super) batch_invariant: bool,
    pub(super) calls: u64,
    /// Of its data, its delays and the ranks' own choices.
    pub(super) seed: u64,
}

impl RandomCase {
    /// Case `number` of `seed`.
    pub(super) fn new(
        seed: u64,
        number: u64,
        world: WorldSize,
        processor: Processor,
        legal: Legal,
    ) -> Result<Self, ProblemError> {
        let mut draw = Draw::new(data::seed(seed, 1, number));
        let (most_rows, most) = match processor {
            Processor::Host => (24, 12),
            Processor::Gpu { .. } => (2048, 512),
        };
        let op = draw.of(legal.ops());
        let scaled = |scales| Numerics::e4m3(scales, DType::Bf16);
        let numerics = draw.of(&[
            DType::Bf16.into(),
            DType::F16.into(),
            scaled(Scales::Tensor),
            scaled(Scales::Row),
        ]);
        let group = numerics.row_multiple() as usize;
        let ranks = world.index();
        // Equal shards in half of the cases, else some with a row less, or none.
        let less = if draw.below(2) > 0 { draw.below(world.get()) as usize } else { 0 };
        let m = draw.extent(most_rows, 128) as usize * ranks - less;
        // Equal parts of what is split in half of the cases, else a group more on the first ranks.
        let more = if draw.below(2) > 0 { draw.below(world.get()) as usize } else { 0 };
        let (split, whole) = (
            group * (draw.extent(most, 16) as usize * ranks + more),
            group * draw.extent(most, 16) as usize,
        );
        let (n, k) = if op.gathers() { (split, whole) } else { (whole, split) };
        let problem = Problem::new(op, m, n, k, numerics, world)?;
        // In one of four cases the op chooses.
        let plan = (draw.below(4) > 0).then(|| plan(&mut draw, &problem, processor, legal));
        let calls = 4 + u64::from(draw.below(13));
        let epilogues: Vec<EpilogueSpec> =
            std::iter::once(EpilogueSpec::default()).chain(with_bias(op)).collect();
        let (has_bias, epilogue) = (draw.below(2) > 0, draw.of(&epilogues));
        let operands = epilogue.operands.with(Operand::Bias, has_bias);
        let epilogue = EpilogueSpec { operands, ..epilogue };
        let epilogue = for_columns_of(epilogue, &problem, plan.as_ref());
        // Across nodes a sum has no such order.
        let has_order = legal != Legal::Mixed || op.gathers();
        let batch_invariant = draw.below(2) > 0 && plan.is_none() && has_order;
        // A library's sum has no fp32 partial sums.
        let sums_itself = plan.is_none_or(|plan| plan.comm != CommMode::Sequential);
        let partials =
            if draw.below(3) == 0 && sums_itself { Partials::F32 } else { Partials::Output };
        let problem = problem_with(epilogue, problem)?.with_partials(partials);
        // Several weights in one of three cases that can have them.
        let one = op.reduces() || epilogue.gates.is_some() || draw.below(3) > 0;
        let columns = if one { vec![problem.n()] } else { columns(&mut draw, &problem) };
        let problem = problem.with_weights(&columns)?;
        Ok(Self {
            number,
            problem,
            epilogue,
            plan,
            batch_invariant,
            calls,
            seed: data::seed(seed, 2, number),
        })
    }

    /// The plan with `rank`'s own number of workers.
    pub(super) fn execution(&self, rank: Rank, processor: Processor) -> Overrides {
        let mut draw = Draw::new(data::seed(self.seed, 3, u64::from(rank.get())));
        let workers = match processor {
            Processor::Host => 1 + draw.below(3),
            Processor::Gpu { ctas, .. } => {
                let any = 1 + draw.below(ctas);
                draw.of(&[ctas, ctas, ctas - ctas / 8, any])
            }
        };
        let (plan, batch_invariant) = (self.plan, self.batch_invariant);
        Overrides { plan, workers: Some(workers), batch_invariant, trace: false }
    }
}

/// The output columns of up to four weights, `n` in all; of one where there is no room for more.
fn columns(draw: &mut Draw, problem: &Problem) -> Vec<u32> {
    // Each has a group on each rank.
    let group = problem.numerics().row_multiple();
    let least = group * problem.world().get();
    let (mut columns, mut left) = (Vec::new(), problem.n());
    for _ in 0..=draw.below(MAX_WEIGHTS as u32 - 1) {
        if left >= 2 * least {
            let own = least + group * draw.below((left - 2 * least) / group + 1);
            columns.push(own);
            left -= own;
        }
    }
    columns.push(left);
    columns
}

/// A plan that the transport can execute.
fn plan(draw: &mut Draw, problem: &Problem, processor: Processor, legal: Legal) -> Plan {
    let scatters = problem.op().reduces();
    let (world, numerics) = (problem.world(), problem.numerics());
    let tile = match processor {
        Processor::Host => TileShape::new(1 + draw.below(48), 8 * (1 + draw.below(12)), 64),
        Processor::Gpu { generation, .. } => {
            draw.of(&generation.tiles(numerics).collect::<Vec<_>>())
        }
    };
    // On the host every tile can do both.
    let (can_flatten, can_send) = match processor {
        Processor::Gpu { generation, .. } if scatters => {
            (generation.scatters(tile, numerics), generation.sends_partials(tile, numerics))
        }
        _ => (true, true),
    };
    let one_exchange = problem.op().sums_to() == SumsTo::All && legal != Legal::All;
    let flattened =
        legal != Legal::Mixed && (one_exchange || can_flatten && (draw.below(2) > 0 || !can_send));
    // Where only one of both will do, a tile that can do both.
    let tile = if if flattened { can_flatten } else { can_send } {
        tile
    } else {
        TileShape::new(128, 128, tile.k)
    };
    let rows = match flattened {
        true if draw.below(2) > 0 => RowMapping::FlattenedTwoExchanges,
        true => RowMapping::Flattened,
        false => RowMapping::PerShard { group: 1 + draw.below(world.get() + 1) },
    };
    let chunk = match draw.below(6) {
        0 => Chunk::Shard,
        // One signal for all, as messages are of whole shards.
        _ if matches!(legal, Legal::Messages | Legal::Mixed) && flattened && scatters => {
            Chunk::Shard
        }
        tiles => Chunk::Tiles(tiles),
    };
    let k = draw.of(&[
        KSplit::Whole,
        KSplit::Whole,
        KSplit::StreamK,
        KSplit::SplitK(2),
        KSplit::SplitK(3),
    ]);
    let k_slices = draw.of(&[1, 1, 2, 3, 6]);
    let shared = matches!(processor, Processor::Gpu { alone: false, .. });
    let fused = |mover| CommMode::Fused { mover };
    let mover = if shared { Mover::Kernel } else { draw.of(&[Mover::Kernel, Mover::CopyEngine]) };
    let peers = draw.of(&[1, 2, world.peers().max(1)]);
    let comm = match legal {
        Legal::All | Legal::Staged => fused(mover),
        // The one kernel of sequential calls has flattened rows.
        Legal::Messages if flattened => {
            draw.of(&[CommMode::Overlapped { peers }, CommMode::Sequential])
        }
        Legal::Messages | Legal::Mixed => CommMode::Overlapped { peers },
    };
    Plan { tile, rows, k, chunk, k_slices, comm }
}

impl fmt::Display for RandomCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, problem, epilogue, plan, batch_invariant, calls, .. } = self;
        write!(f, "case {number}, {problem}{}, {calls} calls in a row, ", suffix(*epilogue))?;
        match plan {
            Some(plan) => write!(f, "{plan}"),
            None if *batch_invariant => f.write_str("the op's own plan, batch-invariant"),
            None => f.write_str("the op's own plan"),
        }
    }
}

/// A sequence of random numbers.
#[derive(Clone)]
struct Draw {
    seed: u64,
    drawn: u64,
}

impl Draw {
    const fn new(seed: u64) -> Self {
        Self { seed, drawn: 0 }
    }

    /// Below `end`.
    fn below(&mut self, end: u32) -> u32 {
        self.drawn += 1;
        // The top bits are the best mixed.
        let random = u64::from(data::raw(self.seed, 0, self.drawn as u32));
        (random * u64::from(end) / u64::from(data::RAW_END)) as u32
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u32) as usize]
    }

    /// From 1 to `most`: tiny, next to a multiple of `tile`, or of any order of magnitude.
    fn extent(&mut self, most: u32, tile: u32) -> u32 {
        let drawn = match self.below(4) {
            0 => 1 + self.below(4),
            1 => (1 + self.below((most / tile).clamp(1, 8))) * tile + self.below(3) - 1,
            _ => {
                let limit = most >> self.below(most.ilog2());
                1 + self.below(limit)
            }
        };
        drawn.min(most)
    }
}
