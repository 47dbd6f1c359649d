//! Random cases: problems from tiny to a few thousand, with tails, and plans for them.
//!
//! Invariant: a case is a function of seed, number, world and target, so all ranks agree on it
//! without a word, and it can be had again. What ranks must agree on is drawn from the case alone;
//! what each may choose for itself, from case and rank.

use crate::harness::{EpilogueSpec, data};
use crate::plan::{Plan, ScheduleArgs};
use flux_core::program::{Lent, Sending};
use flux_core::{DType, OpKind, Problem, ProblemError, Rank, TileShape, WorldSize};
use flux_ops::Push;
use std::fmt;

/// Where ranks work, which decides the sizes: all ranks of a host share its few cores, and their
/// code may be built for debugging.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// Threads of this machine.
    Host,
    /// A GPU that runs so many CTAs of a rank at once.
    Gpu {
        /// CTAs.
        ctas: u32,
        /// Whether no other rank works there. Where one does, copies may stand in the device's
        /// queues behind its kernel that waits for them, so the kernels push.
        alone: bool,
    },
}

/// One problem with the plan that all ranks share.
#[derive(Clone, Debug)]
pub(super) struct RandomCase {
    /// What it is called by: with the seed it says everything.
    pub(super) number: u64,
    /// The problem.
    pub(super) problem: Problem,
    /// What the op does to its sums.
    pub(super) epilogue: EpilogueSpec,
    /// The schedule; what a rank chooses for itself is left out.
    pub(super) shared: ScheduleArgs,
    /// When messages go, where there are any.
    pub(super) sending: Option<Sending>,
    /// Calls in a row.
    pub(super) calls: u64,
    /// Of its data, its delays and the ranks' own choices.
    pub(super) seed: u64,
}

impl RandomCase {
    /// Case `number` of `seed`.
    ///
    /// # Errors
    /// None for the worlds that there are; they would be a fault of this function.
    pub(super) fn new(seed: u64, number: u64, world: WorldSize, target: Target) -> Result<Self, ProblemError> {
        let mut draw = Draw::new(data::seed(seed, 1, number));
        let (most_rows, most) = match target {
            Target::Host => (24, 12),
            Target::Gpu { .. } => (2048, 512),
        };
        let op = draw.of(&[OpKind::AllGatherGemm, OpKind::GemmReduceScatter]);
        let dtype = draw.of(&[DType::Bf16, DType::F16]);
        let ranks = world.index();
        let m = draw.extent(most_rows, 128) as usize * ranks;
        let (split, whole) = (8 * draw.extent(most, 16) as usize * ranks, 8 * draw.extent(most, 16) as usize);
        let (n, k) = match op {
            OpKind::AllGatherGemm => (split, whole),
            OpKind::GemmReduceScatter => (whole, split),
        };
        let problem = Problem::new(op, m, n, k, dtype, world)?;
        let mut shared = ScheduleArgs::default();
        // In one of four cases the op chooses.
        if draw.below(4) > 0 {
            let tile = match target {
                Target::Host => TileShape::new(1 + draw.below(48), 8 * (1 + draw.below(12)), 64),
                Target::Gpu { .. } => draw.of(&TileShape::all().collect::<Vec<_>>()),
            };
            shared.tile = Some(tile);
            // 0 is the whole shard.
            shared.chunk = Some(draw.below(6));
            shared.group = Some(draw.of(&[1, 2, 3, 8, 1 << 20]));
            shared.band = Some(1 + draw.below(world.get() + 1));
            shared.alone = Some(draw.below(3));
            shared.by_chunk = Some(draw.below(3));
            shared.k_slices = Some(draw.of(&[1, 1, 2, 3, 6]));
            shared.splits = Some(draw.of(&[1, 1, 2, 3]));
            let any = 2 + draw.below(140);
            shared.shares = Some(draw.of(&[1, any, 132]));
            shared.early = Some(draw.below(world.get() + 1));
            // On the host every tile is either.
            let any = op == OpKind::AllGatherGemm || matches!(target, Target::Host);
            shared.stack = draw.below(2) > 0 && (any || tile.scatters()) || !(any || tile.sends_partials());
            shared.no_stack = !shared.stack;
            let few = Lent { first: draw.below(9), last: draw.below(9) };
            let lent = draw.of(&[Lent::NONE, few, Lent { first: u32::MAX, last: u32::MAX }]);
            shared.lent = matches!(target, Target::Gpu { .. }).then_some(lent);
        }
        let calls = 4 + u64::from(draw.below(13));
        let epilogues: Vec<EpilogueSpec> = std::iter::once(EpilogueSpec::default()).chain(EpilogueSpec::with_bias(op)).collect();
        let epilogue = EpilogueSpec { bias: draw.below(2) > 0, ..draw.of(&epilogues) };
        // Partial sums that are folded can, of the plans that say whether they are.
        let last = if op == OpKind::AllGatherGemm || shared.stack { Sending::Before } else { Sending::ALL };
        let sending = draw.of(&[None, Some(Sending::Beside { peers: 1 }), Some(Sending::Beside { peers: 2 }), Some(last)]);
        Ok(Self { number, problem, epilogue, shared, sending, calls, seed: data::seed(seed, 2, number) })
    }

    /// The same with a plan for messages: no slices, and tiles that span shards with one signal for
    /// all. Where messages go on to `mates`, no tile spans shards; where they `may_come_first` they
    /// may all go before what they bring is read.
    #[must_use]
    pub(super) fn in_whole_chunks(self, mates: bool, may_come_first: bool) -> Self {
        let sending = self.sending.filter(|&sending| may_come_first || sending != Sending::Before);
        let stack = self.shared.stack && !mates;
        let chunk = self.shared.chunk.map(|chunk| if stack && self.problem.op() == OpKind::GemmReduceScatter { 0 } else { chunk });
        // What the op chooses itself stays.
        let no_stack = self.shared.no_stack || self.shared.stack && mates;
        // The ops' own in place of a kernel's that has no partial tiles.
        let sends = mates && self.problem.op() == OpKind::GemmReduceScatter;
        let tile = self.shared.tile.filter(|&tile| !sends || tile.sends_partials() || !tile.scatters());
        Self {
            shared: ScheduleArgs { tile, k_slices: self.shared.k_slices.and(Some(1)), chunk, stack, no_stack, ..self.shared },
            sending,
            ..self
        }
    }

    /// The whole plan of `rank`: with its own choice of workers, mover and pace.
    pub(super) fn plan(&self, rank: Rank, target: Target) -> Plan {
        let mut draw = Draw::new(data::seed(self.seed, 3, u64::from(rank.get())));
        let workers = match target {
            Target::Host => 1 + draw.below(3),
            Target::Gpu { ctas, .. } => {
                let any = 1 + draw.below(ctas);
                draw.of(&[ctas, ctas, ctas - ctas / 8, any])
            }
        };
        let drawn = draw.of(&[Push::Auto, Push::Kernel, Push::CopyEngine]);
        let push = Some(if matches!(target, Target::Gpu { alone: false, .. }) { Push::Kernel } else { drawn });
        Plan { schedule: self.shared, workers: Some(workers), push, sending: self.sending, spread: Some(draw.of(&[0, 10, 40, 100])) }
    }
}

impl fmt::Display for RandomCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, problem, epilogue, shared, sending, calls, .. } = self;
        write!(f, "case {number}, {problem}{epilogue}, {calls} calls in a row, ")?;
        if let Some(sending) = sending {
            write!(f, "{sending}, ")?;
        }
        let ScheduleArgs { tile: Some(tile), chunk: Some(chunk), group: Some(group), band: Some(band), .. } = shared else {
            return f.write_str("default schedule");
        };
        let (alone, by_chunk, early) = (shared.alone.unwrap_or(0), shared.by_chunk.unwrap_or(0), shared.early.unwrap_or(0));
        let (slices, splits, shares) = (shared.k_slices.unwrap_or(1), shared.splits.unwrap_or(1), shared.shares.unwrap_or(1));
        let Lent { first, last } = shared.lent.unwrap_or_default();
        let stack = if shared.stack { ", flattened" } else { "" };
        write!(
            f,
            "tile {}x{}, chunk {chunk}, group {group}, band {band} after {alone} of one, {by_chunk} by chunk, {slices} slices, {splits} splits, {shares} shares, {early} early, {first} and {last} lent{stack}",
            tile.m, tile.n
        )
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
