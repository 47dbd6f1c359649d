//! The contenders on GPUs: cuBLASLt, NCCL, both in turn, and the fused op.
//!
//! Invariant: a sample is the time between two events on the rank's stream. Before it an all-reduce
//! lines the ranks up, and a spinning kernel hides the launch of every contender alike.

use super::SEED;
use super::measure::{AnyRows, Contender, Contenders, Sample, slowest};
use super::watchdog::Watchdog;
use crate::harness::Fill;
use crate::harness::gpu::Gpu;
use crate::harness::gpu::choice;
use crate::harness::gpu::cublas::Gemm;
use crate::harness::{
    Buffer, Defect, OperandSet, Operands, RankContext, Span, elements, w_window, x_window, y_window,
};
use crate::harness::{Verdict, Violation};
use anyhow::{Context, bail};
use flux_core::{Nodes, OpKind, Problem, Rank, SumsTo, WorldSize};
use flux_cuda::DeviceBlock;
use flux_kernels::Element;
use flux_ops::FusedLinear;
use flux_transport::CollectiveKind;
use flux_transport::internal::nccl::{Comm, ElementType};
use std::time::{Duration, Instant};

/// Operand sets in rotation, so that no call finds its operands in the 60 MB of L2.
pub(crate) const SETS: usize = 3;

/// One rank's contenders.
pub(super) struct GpuContenders<'a, T> {
    ctx: &'a RankContext,
    gpu: &'a Gpu,
    nccl: &'a Comm,
    op: &'a FusedLinear,
    sets: &'a mut [OperandSet<T>],
    gemm: Gemm,
    /// Of the serial path. Its shards are equal, so it pads the rows of a call.
    problem: Problem,
    /// Per operand set, what collective and GEMM pass on: the gathered `x`, or all partial sums.
    between: Vec<DeviceBlock>,
    word: DeviceBlock,
    spin: Duration,
    watchdog: &'a Watchdog,
}

impl<'a, T: Element> GpuContenders<'a, T> {
    /// The contenders of `op`, on filled operand sets, to be prepared before they are timed.
    pub(super) fn new(
        ctx: &'a RankContext,
        nccl: &'a Comm,
        op: &'a FusedLinear,
        sets: &'a mut [OperandSet<T>],
        watchdog: &'a Watchdog,
    ) -> anyhow::Result<Self> {
        let gpu = ctx.gpu().context("this rank has no GPU")?;
        let problem = op.largest();
        let bytes = between_elements(problem) as usize * size_of::<T>();
        let between = sets.iter().map(|_| gpu.alloc(bytes)).collect::<anyhow::Result<_>>()?;
        let gemm =
            Gemm::new(gpu.device(), gemm_shape(problem, ctx.rank()), problem.numerics().operand)?;
        let word = gpu.alloc(4)?;
        gpu.upload(&word, &[0; 4])?;
        Ok(Self {
            ctx,
            gpu,
            nccl,
            op,
            sets,
            gemm,
            problem: *problem,
            between,
            word,
            spin: choice::SPIN,
            watchdog,
        })
    }

    /// Chooses what has to be measured first. Collective: the ranks choose one GEMM algorithm.
    pub(super) fn prepare(&mut self) -> anyhow::Result<()> {
        // The GEMM's speed depends on its data, so it reads what a collective has gathered.
        (0..self.sets.len()).try_for_each(|set| self.comm(set))?;
        self.choose_algorithm()?;
        self.choose_spin()
    }

    /// Verifies the baseline on integers: for AllGather-GEMM the serial path, for the
    /// sums over ranks the GEMM alone, as NCCL rounds its sums in an order of its own.
    /// Collective.
    pub(super) fn verify(&mut self) -> anyhow::Result<Verdict> {
        self.watchdog.heartbeat();
        let held = self.sets[0].holds.context("the operands must be filled first")?;
        self.gpu.poison(self.between[0].address(), self.between[0].bytes())?;
        let verdict = if held.problem.op().gathers() {
            self.ctx.fill(&mut self.sets[0], Operands { fill: Fill::SmallInts, ..held })?;
            self.ctx.poison(&mut self.sets[0].y)?;
            self.launch(Contender::Serial, 0)?;
            self.ctx.verify(&self.sets[0], &self.op.plan(self.op.max_m())?)?
        } else {
            self.verify_gemm()?
        };
        self.ctx.fill(&mut self.sets[0], held)?;
        // Random data again, in the GEMM's `x` and in what the collective reads.
        self.launch(Contender::Serial, 0)?;
        Ok(verdict)
    }

    /// Verifies the GEMM of a sum over the ranks on the first set, which it overwrites.
    fn verify_gemm(&mut self) -> anyhow::Result<Verdict> {
        let (gpu, problem, set) = (self.gpu, self.op.largest(), &mut self.sets[0]);
        let (world, first) = (WorldSize::new(1).context("a world of one")?, Rank::new(0));
        let (m, n, k) = gemm_shape(problem, self.ctx.rank());
        let [m, n, k] = [m, n, k].map(|extent| extent as usize);
        let alone = Problem::new(OpKind::AllGatherGemm, m, n, k, problem.numerics(), world)?;
        let operands = Operands::new(alone, SEED, 0, Fill::SmallInts);
        set.holds = None;
        gpu.fill(
            block(&set.x)?,
            x_window(&alone, first),
            operands.seed_x,
            operands.fill,
            alone.numerics().operand,
        )?;
        gpu.fill(
            block(&set.w)?,
            w_window(&alone, first),
            operands.seed_w,
            operands.fill,
            alone.numerics().operand,
        )?;
        self.gemm(0)?;
        let verdict = gpu.verify(
            &operands,
            first,
            self.between[0].address(),
            (false, false, Nodes::apart(world)),
        )?;
        let rank = self.ctx.rank().get();
        Ok(Verdict { first: verdict.first.map(|first| Violation { rank, ..first }), ..verdict })
    }

    /// Times every candidate on every rank and takes the one whose slowest rank is fastest.
    fn choose_algorithm(&mut self) -> anyhow::Result<()> {
        // Should devices have different candidates, all ranks must still make as many collectives.
        let counts = self.ctx.comm().exchange(&(self.gemm.candidates() as u64).to_le_bytes())?;
        let common = counts
            .iter()
            .map(|c| bytemuck::pod_read_unaligned::<u64>(c) as usize)
            .min()
            .unwrap_or(0);
        let best = choice::fastest(common, |candidate| {
            self.gemm.choose(candidate);
            // The first launch loads a kernel, which can wait for the device: keep it out of
            // collectives.
            self.gemm(0)?;
            self.gpu.synchronize()?;
            self.ctx.comm().barrier()?;
            let spans = choice::settled(|call| Ok(self.sample(Contender::Gemm, call)?.span))?;
            Ok(slowest(self.ctx.comm(), &spans)?.median)
        })?;
        self.gemm.choose(best);
        Ok(())
    }

    /// Sets the spin to more than the slowest enqueue on any rank.
    fn choose_spin(&mut self) -> anyhow::Result<()> {
        let longest = choice::longest_enqueue(&Contender::ALL, |contender, call| {
            self.watchdog.heartbeat();
            self.ctx.comm().barrier()?;
            let start = Instant::now();
            self.launch(contender, call)?;
            let took = start.elapsed();
            self.gpu.synchronize()?;
            Ok(took)
        })?;
        let mine = (longest.as_nanos() as u64).to_le_bytes();
        let all = self.ctx.comm().exchange(&mine)?;
        let longest =
            all.iter().map(|ns| bytemuck::pod_read_unaligned::<u64>(ns)).max().unwrap_or(0);
        self.spin = choice::spin(Duration::from_nanos(longest));
        Ok(())
    }

    fn launch(&mut self, contender: Contender, call: usize) -> anyhow::Result<()> {
        let set = call % self.sets.len();
        match (contender, self.problem.op().sums_to()) {
            (Contender::Op, _) => self.ctx.forward(self.op, &mut self.sets[set]),
            (Contender::Gemm, _) => self.gemm(set),
            (Contender::Comm, _) => self.comm(set),
            (Contender::Serial, SumsTo::Nothing) => {
                self.comm(set)?;
                self.gemm(set)
            }
            (Contender::Serial, SumsTo::Rows | SumsTo::All) => {
                self.gemm(set)?;
                self.comm(set)?;
                self.add_norm(set)
            }
        }
    }

    fn gemm(&self, set: usize) -> anyhow::Result<()> {
        let (set, between) = (&self.sets[set], self.between[set].address());
        let (x, y) = if self.problem.op().gathers() {
            (between, address(&set.y)?)
        } else {
            (address(&set.x)?, between)
        };
        self.gpu.device().bind()?;
        // SAFETY: the operands have the shapes of `new`, and everything is on this one stream.
        unsafe { self.gemm.launch(x, address(&set.w)?, y, self.gpu.raw_stream())? };
        Ok(())
    }

    /// What follows the collective of a set with residual and norm.
    fn add_norm(&self, set: usize) -> anyhow::Result<()> {
        let set = &self.sets[set];
        let (Some(residual), Some((gain, y_norm))) = (&set.residual, &set.norm) else {
            return Ok(());
        };
        let rows = self.problem.y_rows(self.ctx.rank()).len() as u32;
        self.gpu.add_rms_norm(
            &self.problem,
            rows,
            [block(&set.y)?, block(residual)?, block(gain)?, block(y_norm)?],
        )
    }

    fn comm(&self, set: usize) -> anyhow::Result<()> {
        let problem = &self.problem;
        let of = ElementType::from(problem.collective_dtype());
        let (set, between, stream) =
            (&self.sets[set], self.between[set].address(), self.gpu.raw_stream());
        let rank = self.ctx.rank();
        let (kind, ends, window) = match problem.op().sums_to() {
            SumsTo::Nothing => {
                let ends = (address(&set.x)?, between);
                (CollectiveKind::AllGather, ends, x_window(problem, rank))
            }
            SumsTo::Rows => {
                let ends = (between, address(&set.y)?);
                (CollectiveKind::ReduceScatter, ends, y_window(problem, rank))
            }
            SumsTo::All => {
                let ends = (between, address(&set.y)?);
                (CollectiveKind::AllReduce, ends, y_window(problem, rank))
            }
        };
        // SAFETY: `between` holds all rows, `x` and `y` this rank's window; all on this one stream.
        unsafe { self.nccl.collective(kind, ends, elements(window), of, stream) }?;
        Ok(())
    }
}

impl<T: Element> Contenders for GpuContenders<'_, T> {
    fn sample(&mut self, contender: Contender, call: usize) -> anyhow::Result<Sample> {
        self.watchdog.heartbeat();
        self.gpu.line_up(self.nccl, &self.word, self.spin)?;
        // The device may spin from here on.
        let (gpu, begun, mut took) = (self.gpu, Instant::now(), Duration::ZERO);
        let end = gpu.time(|| {
            self.launch(contender, call)?;
            took = begun.elapsed();
            Ok(())
        })?;
        Ok(Sample { span: Span { start: 0.0, end }, enqueued: Some(took), late: took > self.spin })
    }

    fn block(&mut self, contender: Contender, calls: usize) -> anyhow::Result<Span> {
        self.watchdog.heartbeat();
        self.gpu.line_up(self.nccl, &self.word, self.spin)?;
        let gpu = self.gpu;
        let end = gpu.time(|| (0..calls).try_for_each(|call| self.launch(contender, call)))?;
        self.op.status()?;
        Ok(Span { start: 0.0, end })
    }
}

impl<T: Element> AnyRows for GpuContenders<'_, T> {
    fn take(&mut self, operands: Operands) -> anyhow::Result<()> {
        self.watchdog.heartbeat();
        self.problem = with_equal_shards(&operands.problem)?;
        anyhow::ensure!(
            self.problem.m() <= self.op.largest().m(),
            "{} beyond {}",
            self.problem,
            self.op.largest()
        );
        self.gemm.reshape(gemm_shape(&self.problem, self.ctx.rank()))?;
        self.sets.iter_mut().try_for_each(|set| self.ctx.fill(set, operands))
    }

    fn poison(&mut self) -> anyhow::Result<()> {
        self.sets.iter_mut().try_for_each(|set| self.ctx.poison(&mut set.y))
    }

    fn verify_at(&mut self, at: &[(u32, u32)], defect: Defect) -> anyhow::Result<Verdict> {
        self.watchdog.heartbeat();
        super::serving::verify_at(self.ctx, self.op, &mut self.sets[0], at, defect)
    }
}

/// `m`, `n` and `k` of a rank's GEMM.
const fn gemm_shape(problem: &Problem, rank: Rank) -> (u32, u32, u32) {
    (problem.m(), problem.n_local(rank), problem.k_local(rank))
}

/// The problem with its rows padded, where a collective needs shards of equal length.
pub(super) fn with_equal_shards(problem: &Problem) -> anyhow::Result<Problem> {
    let padded = match problem.op().sums_to() {
        SumsTo::Nothing | SumsTo::Rows => problem.m().next_multiple_of(problem.world().get()),
        SumsTo::All => problem.m(),
    };
    Ok(problem.with_m(padded)?)
}

/// Bytes of device memory that a row takes on one rank, the workspace left out.
pub(super) fn device_bytes(problem: &Problem, with_norm: bool) -> u64 {
    let windows = [x_window, w_window, y_window].map(|w| elements(w(problem, Rank::new(0))) as u64);
    let epilogue = if with_norm { 2 * windows[2] + u64::from(problem.n()) } else { 0 };
    (windows.iter().sum::<u64>() + epilogue + between_elements(problem))
        * SETS as u64
        * problem.numerics().operand.bytes() as u64
}

/// Of all rows: the gathered `x`, or one rank's partial sums.
fn between_elements(problem: &Problem) -> u64 {
    let columns = if problem.op().gathers() { problem.k() } else { problem.n() };
    u64::from(problem.m()) * u64::from(columns)
}

fn block<T>(buffer: &Buffer<T>) -> anyhow::Result<&DeviceBlock> {
    match buffer {
        Buffer::Cuda { block, .. } => Ok(block),
        Buffer::Host(_) => bail!("host memory on a rank that works on a device"),
    }
}

fn address<T>(buffer: &Buffer<T>) -> anyhow::Result<u64> {
    Ok(block(buffer)?.address())
}
