//! What a run of the benchmark changes of the ops' own choices, to try schedules out.
//!
//! Invariant: what is left out stays what a user gets who says nothing, and what is given stands in
//! a record as what it comes to.

use anyhow::bail;
use flux_core::program::{Chunk, Lent, Schedule, Sending};
use flux_core::tile::Raster;
use flux_core::{Nodes, OpKind, Problem, TileShape, WorldSize};
use flux_ops::{Builder, Push, own_schedule, own_sending};
use flux_transport::Communicator;

/// How a problem is cut and in which order; what is `None` is left to the op.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::Args)]
pub struct ScheduleArgs {
    /// The N-th schedule to compare over peers' memory, in place of the op's own: 0 is the
    /// heuristic's there, then the fastest by estimate first
    #[arg(long, value_name = "N", help_heading = "Plan")]
    pub candidate: Option<usize>,
    /// Rows and columns of a tile, as in 128x192, in place of the heuristic's choice
    #[arg(long, value_name = "MxN", value_parser = tile, help_heading = "Plan")]
    pub tile: Option<TileShape>,
    /// Tiles that a signal announces (row blocks for ag_gemm); 0 for a whole shard
    #[arg(long, value_name = "TILES", help_heading = "Plan")]
    pub chunk: Option<u32>,
    /// Row blocks that the raster takes together
    #[arg(long, value_name = "ROWS", help_heading = "Plan")]
    pub group: Option<u32>,
    /// Shards that are worked on side by side
    #[arg(long, value_name = "SHARDS", help_heading = "Plan")]
    pub band: Option<u32>,
    /// Shards that are worked on one by one before the first of these bands (ag_gemm)
    #[arg(long, value_name = "SHARDS", help_heading = "Plan")]
    pub alone: Option<u32>,
    /// Peers' shards that are worked on chunk by chunk, the first to come first (ag_gemm)
    #[arg(long, value_name = "SHARDS", help_heading = "Plan")]
    pub by_chunk: Option<u32>,
    /// Most slices that k is announced in (ag_gemm)
    #[arg(long, value_name = "SLICES", help_heading = "Plan")]
    pub k_slices: Option<u32>,
    /// Items that share a tile's k
    #[arg(long, value_name = "ITEMS", help_heading = "Plan")]
    pub splits: Option<u32>,
    /// Workers by groups of whom the tiles that whole waves leave are shared; 1 for none
    #[arg(long, value_name = "WORKERS", help_heading = "Plan")]
    pub shares: Option<u32>,
    /// Partial tiles that are added while a tile is multiplied (gemm_rs)
    #[arg(long, value_name = "TILES", help_heading = "Plan")]
    pub early: Option<u32>,
    /// Items that are launched on the multiprocessors of messages beside the kernel, ahead of the
    /// first message and behind the last, at most (nccl): 0,0 for none
    #[arg(long, value_parser = lent, value_name = "FIRST,LAST", help_heading = "Plan")]
    pub lent: Option<Lent>,
    /// Tiles span shards
    #[arg(long, overrides_with = "no_stack", help_heading = "Plan")]
    pub stack: bool,
    /// Tiles do not span shards
    #[arg(long, overrides_with = "stack", help_heading = "Plan")]
    pub no_stack: bool,
}

/// The options; what is `None` is left to the op.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct Plan {
    /// The schedule, the same on all ranks
    #[command(flatten)]
    pub schedule: ScheduleArgs,
    /// Who carries the shard of ag_gemm on GPUs: auto, kernel or copy-engine
    #[arg(long, value_parser = push, help_heading = "Plan")]
    pub push: Option<Push>,
    /// When messages go (nccl): before what they bring is read, or to so many peers at once beside
    /// the kernel: before, all or a number
    #[arg(long, value_parser = sending, value_name = "PEERS", help_heading = "Plan")]
    pub sending: Option<Sending>,
    /// Percent of the time that there is over which the kernel spreads its traffic
    #[arg(long, value_name = "PERCENT", help_heading = "Plan")]
    pub spread: Option<u32>,
    /// Workers of a rank: CTAs, or threads on the host
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..), help_heading = "Plan")]
    pub workers: Option<u32>,
}

fn tile(word: &str) -> Result<TileShape, String> {
    let parsed = word.split_once('x').and_then(|(m, n)| Some(TileShape::new(m.parse().ok()?, n.parse().ok()?, 64)));
    parsed.ok_or_else(|| format!("{word:?} is not of the form 128x256"))
}

/// Who pushes, by its word.
pub(crate) fn push(word: &str) -> Result<Push, String> {
    match word {
        "auto" => Ok(Push::Auto),
        "kernel" => Ok(Push::Kernel),
        "copy-engine" => Ok(Push::CopyEngine),
        _ => Err(format!("{word:?} is none of auto, kernel, copy-engine")),
    }
}

fn sending(word: &str) -> Result<Sending, String> {
    match (word, word.parse()) {
        ("before", _) => Ok(Sending::Before),
        ("all", _) => Ok(Sending::ALL),
        (_, Ok(peers @ 1..)) => Ok(Sending::Beside { peers }),
        _ => Err(format!("{word:?} is none of before, all and a number of peers")),
    }
}

fn lent(word: &str) -> Result<Lent, String> {
    let parsed = word.split_once(',').and_then(|(first, last)| Some(Lent { first: first.parse().ok()?, last: last.parse().ok()? }));
    parsed.ok_or_else(|| format!("{word:?} is not of the form 12,36"))
}

/// Refuses an option of one op where only others are asked for.
///
/// # Errors
/// Names the option.
pub(crate) fn check_op(option: &str, op: OpKind, given: bool, ops: &[OpKind]) -> anyhow::Result<()> {
    match ops.first() {
        Some(other) if given && !ops.contains(&op) => bail!("{option} is for {op}, and changes nothing of {other}: leave it out"),
        _ => Ok(()),
    }
}

impl ScheduleArgs {
    /// Refuses what is of none of `ops`, and more shards than `world` has: either would change
    /// nothing, and stand in the words of the schedule all the same.
    ///
    /// # Errors
    /// Names the option.
    pub fn check(&self, ops: &[OpKind], world: WorldSize) -> anyhow::Result<()> {
        for (option, op, given) in [
            ("--alone", OpKind::AllGatherGemm, self.alone.is_some()),
            ("--by-chunk", OpKind::AllGatherGemm, self.by_chunk.is_some()),
            ("--k-slices", OpKind::AllGatherGemm, self.k_slices.is_some()),
            ("--early", OpKind::GemmReduceScatter, self.early.is_some()),
        ] {
            check_op(option, op, given, ops)?;
        }
        let (all, peers) = (world.get(), world.get() - 1);
        for (option, given, limit, shards) in [
            ("--band", self.band, all, "shards"),
            ("--alone", self.alone, all, "shards"),
            ("--by-chunk", self.by_chunk, peers, "shards of peers"),
        ] {
            if let Some(given) = given.filter(|&given| given > limit) {
                bail!("{option} {given}: there are {limit} {shards}, so more than {limit} changes nothing: give less");
            }
        }
        Ok(())
    }

    /// Refuses a candidate that there is not.
    ///
    /// # Errors
    /// Says how many there are.
    pub fn check_candidate(&self, problem: &Problem) -> anyhow::Result<()> {
        let Some(number) = self.candidate else { return Ok(()) };
        let count = Schedule::candidates(problem).len();
        if number >= count {
            bail!("--candidate {number}: {problem} has {count}, so {} is the last", count - 1);
        }
        Ok(())
    }

    /// The op's own schedule with what is not left out, as far as it is [in
    /// effect](Schedule::in_effect): with options for both ops, an op leaves out those of the
    /// other.
    pub fn over(&self, own: Schedule, problem: &Problem, nodes: Nodes) -> Schedule {
        let candidate = self.candidate.and_then(|number| Schedule::candidates(problem).get(number).copied());
        let own = candidate.unwrap_or(own);
        // Not every tile has a kernel where tiles do not span shards.
        let own = if self.no_stack && self.tile.is_none() { own.per_shard(problem) } else { own };
        let asked = self.asked(own);
        let Self { candidate: _, tile: _, chunk, group, band, alone, by_chunk, k_slices, splits, shares, early, lent, stack, no_stack } =
            *self;
        let ran = asked.in_effect(problem, nodes);
        let shards = if band.or(alone).or(by_chunk).is_some() { ran } else { asked };
        let given = |given: bool| if given { ran } else { asked };
        Schedule {
            tile: asked.tile,
            chunk: given(chunk.is_some()).chunk,
            raster: given(group.is_some()).raster,
            // Which shards come together is said by three that go with each other.
            band: shards.band,
            alone: shards.alone,
            by_chunk: shards.by_chunk,
            k_slices: given(k_slices.is_some()).k_slices,
            splits: given(splits.is_some()).splits,
            shares: given(shares.is_some()).shares,
            stack: given(stack || no_stack).stack,
            early: given(early.is_some()).early,
            lent: given(lent.is_some()).lent,
        }
    }

    /// The op's own schedule with every word that is given.
    fn asked(&self, own: Schedule) -> Schedule {
        let Self { candidate: _, tile, chunk, group, band, alone, by_chunk, k_slices, splits, shares, early, lent, stack, no_stack } =
            *self;
        let chunk = chunk.map(|tiles| if tiles == 0 { Chunk::Shard } else { Chunk::Tiles(tiles) });
        Schedule {
            tile: tile.unwrap_or(own.tile),
            chunk: chunk.unwrap_or(own.chunk),
            raster: group.map_or(own.raster, Raster::RowGroups),
            band: band.unwrap_or(own.band),
            alone: alone.unwrap_or(own.alone),
            by_chunk: by_chunk.unwrap_or(own.by_chunk),
            k_slices: k_slices.unwrap_or(own.k_slices),
            splits: splits.unwrap_or(own.splits),
            shares: shares.unwrap_or(own.shares),
            early: early.unwrap_or(own.early),
            lent: lent.unwrap_or(own.lent),
            stack: (own.stack || stack) && !no_stack,
        }
    }
}

impl Plan {
    /// A plan with so many workers and nothing else of its own.
    pub fn with_workers(workers: u32) -> Self {
        Self { workers: Some(workers), ..Self::default() }
    }

    /// Refuses what only GPUs have: on the host it would change nothing, and stand in the command
    /// of a record all the same.
    ///
    /// # Errors
    /// Names the option.
    pub fn check_host(&self) -> anyhow::Result<()> {
        let given = [
            ("--push", self.push.is_some()),
            ("--sending", self.sending.is_some()),
            ("--spread", self.spread.is_some()),
            ("--lent", self.schedule.lent.is_some()),
        ];
        match given.into_iter().find(|&(_, given)| given) {
            Some((option, _)) => bail!("{option} is for GPUs, and changes nothing on the host: leave it out"),
            None => Ok(()),
        }
    }

    /// As [`ScheduleArgs::check`], of all that is planned.
    ///
    /// # Errors
    /// Names the option.
    pub fn check(&self, ops: &[OpKind], world: WorldSize) -> anyhow::Result<()> {
        check_op("--push", OpKind::AllGatherGemm, self.push.is_some(), ops)?;
        let peers = world.peers();
        if let Some(Sending::Beside { peers: given }) = self.sending.filter(|&sending| sending != Sending::ALL && sending.peers() > peers) {
            bail!("--sending {given}: there are {peers} peers, so more than {peers} changes nothing: give less, or all");
        }
        self.schedule.check(ops, world)
    }

    /// Tells a builder what is not left out.
    pub fn apply<Op>(&self, mut builder: Builder<Op>, problem: &Problem, comm: &Communicator) -> Builder<Op> {
        let Self { schedule, push, sending, spread, workers } = *self;
        let own = own_schedule(comm, problem, sending.unwrap_or_else(|| own_sending(comm, problem, None)));
        let schedule = schedule.over(own, problem, comm.nodes());
        if schedule != own {
            builder = builder.schedule(schedule);
        }
        builder = builder.push(push.unwrap_or_default());
        if let Some(sending) = sending {
            builder = builder.sending(sending);
        }
        if let Some(percent) = spread {
            builder = builder.spread(percent);
        }
        if let Some(workers) = workers {
            builder = builder.workers(workers);
        }
        builder
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::program::TileProgram;
    use flux_core::{DType, Rank};
    use flux_kernels::Variant;

    #[test]
    fn what_is_left_out_stays_the_ops_own() {
        let own = Schedule { k_slices: 3, stack: true, ..Schedule::of(TileShape::new(128, 256, 64)) };
        let problem = problem(OpKind::AllGatherGemm);
        let over = |args: ScheduleArgs| args.over(own, &problem, Nodes::apart(problem.world()));
        assert_eq!(over(ScheduleArgs::default()), own);
        let args = ScheduleArgs { splits: Some(2), no_stack: true, ..ScheduleArgs::default() };
        assert_eq!(over(args), Schedule { splits: 2, stack: false, ..own });
    }

    #[test]
    fn a_candidate_stands_in_the_place_of_the_ops_own() {
        let problem = Problem::new(OpKind::AllGatherGemm, 258, 28672, 8192, DType::Bf16, WorldSize::new(2).unwrap()).unwrap();
        let own = Schedule::heuristic(&problem);
        let over = |args: ScheduleArgs| args.over(own, &problem, Nodes::apart(problem.world()));
        let candidate = |number| ScheduleArgs { candidate: Some(number), ..ScheduleArgs::default() };
        let all = Schedule::candidates(&problem);
        assert!(own == all[0] && over(candidate(0)) == own && over(candidate(3)) == all[3] && all[3] != own);
        assert!(candidate(all.len() - 1).check_candidate(&problem).is_ok() && ScheduleArgs::default().check_candidate(&problem).is_ok());
        let refused = candidate(all.len()).check_candidate(&problem).unwrap_err().to_string();
        assert_eq!(refused, format!("--candidate {0}: {problem} has {0}, so {1} is the last", all.len(), all.len() - 1));
        assert_eq!(over(ScheduleArgs { k_slices: Some(1), ..candidate(3) }), Schedule { k_slices: 1, ..all[3] });
    }

    #[test]
    fn there_is_a_kernel_for_each_candidate() {
        for world in [2, 4, 8].map(|world| WorldSize::new(world).unwrap()) {
            for (op, n, k) in [(OpKind::AllGatherGemm, 49152, 12288), (OpKind::GemmReduceScatter, 8192, 28672)] {
                for m in [136, 320, 768, 1152, 4096] {
                    let problem = Problem::new(op, m, n, k, DType::Bf16, world).unwrap();
                    for schedule in Schedule::candidates(&problem) {
                        let program = TileProgram::build(&problem, Rank::new(0), &schedule).unwrap();
                        Variant::of(&program).unwrap_or_else(|why| panic!("{problem}, {schedule}: {why}"));
                    }
                }
            }
        }
    }

    /// There is no kernel for the op's own tile then.
    #[test]
    fn tiles_of_one_shard_each_are_tiles_that_there_is_a_kernel_for() {
        let (rs, world) = (OpKind::GemmReduceScatter, WorldSize::new(2).unwrap());
        let problem = Problem::new(rs, 258, 12288, 49152, DType::Bf16, world).unwrap();
        let tile = |no_stack| {
            let args = ScheduleArgs { no_stack, ..ScheduleArgs::default() };
            let schedule = args.over(Schedule::heuristic(&problem), &problem, Nodes::apart(world));
            let program = TileProgram::build(&problem, Rank::new(0), &schedule).unwrap();
            Variant::of(&program).unwrap();
            (schedule.tile.m, schedule.tile.n)
        };
        assert_eq!([false, true].map(tile), [(144, 192), (144, 256)]);
    }

    /// Of 4 shards of 4 by 4 tiles, with 16 steps along k.
    fn problem(op: OpKind) -> Problem {
        let (n, k) = if op == OpKind::AllGatherGemm { (4096, 1024) } else { (1024, 4096) };
        Problem::new(op, 2048, n, k, DType::Bf16, WorldSize::new(4).unwrap()).unwrap()
    }

    #[test]
    fn what_is_given_is_told_as_what_it_comes_to() {
        let own = Schedule { raster: Raster::RowGroups(8), ..Schedule::of(TileShape::new(128, 256, 64)) };
        let with = |args: ScheduleArgs, op| args.over(own, &problem(op), Nodes::apart(WorldSize::new(4).unwrap()));
        let none = ScheduleArgs::default();
        let beyond = ScheduleArgs { splits: Some(u32::MAX), chunk: Some(99), group: Some(99), ..none };
        for op in [OpKind::AllGatherGemm, OpKind::GemmReduceScatter] {
            assert_eq!(with(beyond, op), Schedule { splits: 16, raster: Raster::RowGroups(4), ..own });
            // Of both ops the one that it is for.
            let [gathers, scatters] = [OpKind::AllGatherGemm, OpKind::GemmReduceScatter].map(|of| u32::from(op == of));
            assert_eq!(with(ScheduleArgs { early: Some(1), ..none }, op), Schedule { early: scatters, ..own });
            assert_eq!(with(ScheduleArgs { by_chunk: Some(1), ..none }, op), Schedule { by_chunk: gathers, ..own });
            // All by themselves, however wide the bands after them are.
            let alone = ScheduleArgs { alone: Some(4), ..none };
            assert_eq!(alone.over(Schedule { band: 3, ..own }, &problem(op), Nodes::apart(WorldSize::new(4).unwrap())).alone, 0);
        }
    }

    #[test]
    fn messages_to_more_peers_than_there_are_are_refused() {
        let check =
            |sending| Plan { sending: Some(sending), ..Plan::default() }.check(&[OpKind::AllGatherGemm], WorldSize::new(4).unwrap());
        for sending in [Sending::Before, Sending::ALL, Sending::Beside { peers: 3 }] {
            assert!(check(sending).is_ok(), "{sending}");
        }
        let refused = check(Sending::Beside { peers: 4 }).unwrap_err().to_string();
        assert_eq!(refused, "--sending 4: there are 3 peers, so more than 3 changes nothing: give less, or all");
    }

    #[test]
    fn what_only_gpus_have_is_refused_on_the_host() {
        assert!(Plan::with_workers(2).check_host().is_ok());
        let given = [
            Plan { push: Some(Push::CopyEngine), ..Plan::default() },
            Plan { sending: Some(Sending::Before), ..Plan::default() },
            Plan { spread: Some(77), ..Plan::default() },
            Plan { schedule: ScheduleArgs { lent: Some(Lent { first: 0, last: 8 }), ..ScheduleArgs::default() }, ..Plan::default() },
        ];
        for (plan, option) in given.into_iter().zip(["--push", "--sending", "--spread", "--lent"]) {
            assert!(plan.check_host().unwrap_err().to_string().starts_with(&format!("{option} is for GPUs")));
        }
    }

    #[test]
    fn words_are_read_or_refused() {
        assert_eq!(tile("128x192"), Ok(TileShape::new(128, 192, 64)));
        assert!(tile("128").is_err() && tile("x").is_err() && push("gpu").is_err());
        assert_eq!(push("copy-engine"), Ok(Push::CopyEngine));
        assert_eq!(["before", "all", "2"].map(sending), [Ok(Sending::Before), Ok(Sending::ALL), Ok(Sending::Beside { peers: 2 })]);
        assert!(sending("0").is_err() && sending("after").is_err());
    }
}
