//! A rank process of the fault suite.
//!
//! Invariant: every output is compared to the bit with a verified one. Calls alternate between ops
//! and data, and outputs are filled with NaN first.

use super::messages::{FailureKind, Reply, Request};
use super::progress::ProgressReporter;
use super::usage::Usage;
use super::{Args, shape};
use crate::end;
use crate::harness::{Fill, OperandSet, Operands, RankContext, build, ops_on};
use crate::machine::now_ns;
use crate::plan::Overrides;
use anyhow::{Context, bail, ensure};
use flux_core::Problem;
use flux_cuda::CudaDevice;
use flux_ops::FusedLinear;
use flux_transport::{Communicator, FLUX_LOCAL_RANK, Failure, Fault, Options, Rebuild, World};
use half::bf16;
use std::io::{BufRead, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Calls that are verified on a new communicator.
const FRESH_CALLS: u64 = 6;
/// Deadlines that a call may take to end: two for a stalled stream, and as long for the abort.
const DEADLINES: u32 = 5;

/// The rank's communicator, and what it calls.
struct Group {
    ctx: RankContext,
    ops: Vec<CheckedOp>,
    calls: u64,
    /// Whether other ranks work on the same device.
    shared: bool,
    /// For a call to come to its end, however it ends.
    limit: Duration,
    progress: Arc<ProgressReporter>,
}

/// An op with its operands, and the result that was verified.
struct CheckedOp {
    op: FusedLinear,
    set: OperandSet<bf16>,
    expected: Option<Vec<bf16>>,
}

struct CallsMade {
    wrong: u64,
    failed: Option<(Failure, u64, u64)>,
}

/// The whole life of a rank process.
pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    // The program that started this one may die; nothing is to be left of it.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let progress = ProgressReporter::start()?;
    // Opening the device takes longer than the deadline of the ranks that it joins, so it comes
    // first.
    let local: Option<u32> = std::env::var(FLUX_LOCAL_RANK).ok().and_then(|rank| rank.parse().ok());
    let device = local
        .filter(|_| args.on_gpus())
        .map(|local| CudaDevice::open(local / args.ranks_per_gpu))
        .transpose()?;
    let world = World::from_env()?;
    let options = crate::machine::options(args.transport, world.local_rank(), args.ranks_per_gpu);
    let options = Options { deadline: args.deadline(), nodes: args.nodes, ..options };
    let mut group = Group::new(Communicator::connect_blocking(&world, options)?, args, &progress)?;
    drop((world, device));
    let ready = group.ready()?;
    say(&ready)?;
    let mut kept = Vec::new();
    if args.defects.litter {
        std::fs::write(std::env::temp_dir().join(format!("left-{}", std::process::id())), [])?;
    }
    progress.step("awaits an order");
    for line in std::io::stdin().lock().lines() {
        let report = match serde_json::from_str(&line?)? {
            Request::Run { .. } if args.defects.stall && group.is_last() => loop {
                progress.step("stalls");
                std::thread::park();
            },
            Request::Run { calls } => group.run(calls),
            Request::Rebuild { whole } => group.rebuild(whole, args).and_then(|rebuilt| {
                group = rebuilt;
                if args.defects.leak {
                    kept.push(std::fs::File::open("/dev/null")?);
                }
                group.ready()
            }),
            Request::Quit => break,
        };
        say(&report.unwrap_or_else(|error| Reply::Error { text: end::words(&error) }))?;
        progress.step("awaits an order");
    }
    progress.uses(None);
    progress.step("ends");
    Ok(())
}

fn say(report: &Reply) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, report)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}

impl Group {
    fn new(
        comm: Communicator,
        args: &Args,
        progress: &Arc<ProgressReporter>,
    ) -> anyhow::Result<Self> {
        progress.uses(Some(comm.clone()));
        progress.step("builds");
        let ctx = RankContext::new(comm)?;
        let mut ops = Vec::new();
        for call in 0..2 {
            for &op in ops_on(ctx.comm()) {
                let (m, n, k) = shape(op, args.ranks, ctx.gpu().is_some());
                let problem =
                    Problem::new(op, m, n, k, flux_core::DType::Bf16, ctx.comm().world_size())?;
                let mut set = ctx.operand_set(&problem)?;
                ctx.fill(&mut set, Operands::new(problem, args.seed, call, Fill::SmallInts))?;
                ops.push(CheckedOp {
                    op: build(&problem, ctx.comm(), Overrides::default())?,
                    set,
                    expected: None,
                });
            }
        }
        let limit = args.deadline() * DEADLINES;
        Ok(Self {
            ctx,
            ops,
            calls: 0,
            shared: args.ranks_per_gpu > 1,
            limit,
            progress: Arc::clone(progress),
        })
    }

    /// Verifies calls, and tells what the process holds.
    fn ready(&mut self) -> anyhow::Result<Reply> {
        let ran = self.calls(FRESH_CALLS)?;
        if let Some((failure, ..)) = ran.failed {
            bail!("a call on a new communicator failed: {failure}");
        }
        let world = self.ctx.comm().world_size().get();
        Ok(Reply::Ready {
            world,
            wrong: ran.wrong,
            usage: settled_usage()?,
            device: self.device_memory()?,
        })
    }

    /// Bytes in use of the rank's device; `None` where ranks share it.
    fn device_memory(&self) -> anyhow::Result<Option<u64>> {
        let Some(ordinal) = self.ctx.comm().device().ordinal().filter(|_| !self.shared) else {
            return Ok(None);
        };
        let device = CudaDevice::open(ordinal)?;
        // What was freed in a stream's order goes back at this; every call has ended.
        device.synchronize()?;
        let (free, total) = device.memory()?;
        Ok(Some(total - free))
    }

    fn run(&mut self, calls: u64) -> anyhow::Result<Reply> {
        let CallsMade { wrong, failed } = self.calls(calls)?;
        let Some((failure, began, ended)) = failed else { return Ok(Reply::Done { wrong }) };
        let text = failure.to_string();
        let how = match failure.fault {
            Fault::Timeout { late, .. } => {
                FailureKind::Timeout { late: late.iter().map(|rank| rank.get()).collect() }
            }
            Fault::PeerLost { rank, .. } => FailureKind::PeerLost { rank: rank.get() },
            Fault::Aborted { rank, .. } => FailureKind::Aborted { by: rank.get() },
            other => bail!("a fault of an unknown kind: {other}"),
        };
        let again = self.calls(1)?;
        ensure!(again.failed.is_some(), "a call after a failed one succeeded");
        Ok(Reply::Failed { how, began, ended, wrong, text })
    }

    /// Makes calls until one fails.
    fn calls(&mut self, calls: u64) -> anyhow::Result<CallsMade> {
        let mut wrong = 0;
        for _ in 0..calls {
            let Self { ctx, ops, calls, limit, progress, .. } = self;
            let at = (*calls % ops.len() as u64) as usize;
            let checked = &mut ops[at];
            progress.step("poisons");
            ctx.poison_results(&mut checked.set)?;
            let began = now_ns();
            progress.step("launches");
            let called = ctx.forward(&checked.op, &mut checked.set).and_then(|()| {
                progress.step("waits for its stream");
                ctx.sync_within(&checked.op, *limit)
            });
            let ended = now_ns();
            if let Err(error) = called {
                let failure = ctx.comm().failure().cloned();
                return Ok(CallsMade {
                    wrong,
                    failed: Some((failure.context(error)?, began, ended)),
                });
            }
            *calls += 1;
            progress.step("downloads");
            let y = ctx.download(&checked.set.weights[0].y)?;
            progress.step("verifies");
            let right = match &checked.expected {
                Some(expected) => bits(expected) == bits(&y),
                None => ctx.verify(&checked.set, &checked.op.plan(checked.op.max_m())?)?.ok(),
            };
            wrong += u64::from(!right);
            checked.expected.get_or_insert(y);
        }
        Ok(CallsMade { wrong, failed: None })
    }

    /// Whether it is the rank with the highest number.
    fn is_last(&self) -> bool {
        self.ctx.rank().get() + 1 == self.ctx.comm().world_size().get()
    }

    fn rebuild(&self, whole: bool, args: &Args) -> anyhow::Result<Self> {
        let how = if whole { Rebuild::Whole } else { Rebuild::Survivors };
        self.progress.step("rebuilds");
        Self::new(self.ctx.comm().rebuild_blocking(how)?, args, &self.progress)
    }
}

fn bits(elements: &[bf16]) -> &[u8] {
    bytemuck::cast_slice(elements)
}

/// What the process holds when ended threads are gone, which the system forgets after the join.
fn settled_usage() -> std::io::Result<Usage> {
    let (mut usage, end) = (Usage::now()?, Instant::now() + Duration::from_millis(50));
    while Instant::now() < end {
        std::thread::sleep(Duration::from_millis(2));
        let now = Usage::now()?;
        if now == usage {
            break;
        }
        usage = now;
    }
    Ok(usage)
}
