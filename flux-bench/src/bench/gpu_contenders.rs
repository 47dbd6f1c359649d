//! The contenders on GPUs: cuBLASLt, NCCL, both in turn with a kernel for the epilogue behind them,
//! and the fused op.
//!
//! Invariant: a sample is the time between two events on the rank's stream. Before it an all-reduce
//! lines the ranks up, and a spinning kernel hides the launch of every contender alike.

use super::measure::{AnyRows, Contender, Contenders, Sample, slowest};
use super::serial::{self, with_equal_shards};
use super::watchdog::Watchdog;
use crate::harness::gpu::Gpu;
use crate::harness::gpu::choice;
use crate::harness::gpu::cublas::{Gemm, GemmOperands, GemmShape};
use crate::harness::{
    Buffer, Defect, OperandSet, Operands, RankContext, Span, Verdict, elements, w_window, x_window,
    y_window,
};
use anyhow::{Context, bail};
use flux_core::{Problem, Rank, SumsTo};
use flux_cuda::DeviceBlock;
use flux_kernels::Element;
use flux_kernels::cuda::{Matrix, RmsNormArgs};
use flux_kernels::harness::UnfusedEpilogue;
use flux_ops::{EpilogueSpec, Epsilon, FusedLinear, Operand};
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
    /// Of the serial path.
    problem: Problem,
    epilogue: EpilogueSpec,
    /// Per operand set, what collective and GEMM pass on: the gathered `x`, or all partial sums.
    between: Vec<DeviceBlock>,
    /// Per operand set, the product of gathered rows; none without an epilogue, where it is `y`.
    products: Vec<DeviceBlock>,
    word: DeviceBlock,
    spin: Duration,
    watchdog: &'a Watchdog,
}

impl<'a, T: Element> GpuContenders<'a, T> {
    /// The contenders of `op`, on filled operand sets with room for the serial path's rows, to be
    /// prepared before they are timed.
    pub(super) fn new(
        ctx: &'a RankContext,
        nccl: &'a Comm,
        op: &'a FusedLinear,
        sets: &'a mut [OperandSet<T>],
        watchdog: &'a Watchdog,
    ) -> anyhow::Result<Self> {
        let gpu = ctx.gpu().context("this rank has no GPU")?;
        let problem = with_equal_shards(op.largest())?;
        let epilogue = sets.first().context("no operand sets")?.held()?.epilogue;
        let blocks = |elements: u64| {
            let bytes = elements as usize * size_of::<T>();
            sets.iter().map(|_| gpu.alloc(bytes)).collect::<anyhow::Result<Vec<_>>>()
        };
        let between = blocks(between_elements(&problem))?;
        let products = match product_elements(&problem, epilogue, ctx.rank()) {
            0 => Vec::new(),
            elements => blocks(elements)?,
        };
        let gemm = Gemm::new(gpu.device(), gemm_shape(&problem, ctx.rank()), problem.numerics())?;
        let word = gpu.alloc(4)?;
        gpu.upload(&word, &[0; 4])?;
        Ok(Self {
            ctx,
            gpu,
            nccl,
            op,
            sets,
            gemm,
            problem,
            epilogue,
            between,
            products,
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

    /// Verifies the serial path on the first set. Collective.
    pub(super) fn verify(&mut self) -> anyhow::Result<Verdict> {
        self.watchdog.heartbeat();
        let held = serial::prepare_check(self.ctx, &mut self.sets[0], self.problem)?;
        for block in self.between.first().into_iter().chain(self.products.first()) {
            self.gpu.poison(block.address(), block.bytes())?;
        }
        self.launch(Contender::Serial, 0)?;
        let verdict = serial::check(self.ctx, &self.sets[0])?;
        self.watchdog.heartbeat();
        self.ctx.fill(&mut self.sets[0], held)?;
        // Random data again, in the GEMM's `x` and in what the collective reads.
        self.launch(Contender::Serial, 0)?;
        Ok(verdict)
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
                self.gemm(set)?;
                self.epilogue(set)
            }
            (Contender::Serial, SumsTo::Rows | SumsTo::All) => {
                self.gemm(set)?;
                self.comm(set)?;
                self.epilogue(set)
            }
        }
    }

    fn gemm(&self, set: usize) -> anyhow::Result<()> {
        let (between, product) = (self.between[set].address(), self.product(set)?);
        let OperandSet { x, weights, .. } = &self.sets[set];
        let (x, y) = if self.problem.op().gathers() {
            (between, product)
        } else {
            (block(x)?.address(), between)
        };
        let w = block(&weights[0].w)?.address();
        self.gpu.device().bind()?;
        // SAFETY: the operands have the shapes of `new`, and everything is on this one stream.
        unsafe {
            self.gemm.launch(GemmOperands { x, w, y, scales: None }, self.gpu.raw_stream())?;
        };
        Ok(())
    }

    /// Where the sums of a set are that an epilogue finishes, or `y` itself.
    fn product(&self, set: usize) -> anyhow::Result<u64> {
        let product = match self.products.get(set) {
            Some(product) => product,
            None => block(&self.sets[set].weights[0].y)?,
        };
        Ok(product.address())
    }

    /// What follows GEMM and collective, by one kernel.
    fn epilogue(&self, set: usize) -> anyhow::Result<()> {
        if self.epilogue == EpilogueSpec::default() {
            return Ok(());
        }
        let (sums, held) = (self.product(set)?, self.sets[set].held()?);
        let OperandSet { weights, residual, norm, .. } = &self.sets[set];
        let window = Operands { problem: self.problem, ..held }.y_window(self.ctx.rank());
        let dtype = self.problem.numerics().output;
        let row_bytes = |cols: u32| u64::from(cols) * dtype.bytes() as u64;
        let matrix = |address, cols| Matrix { address, row_bytes: row_bytes(cols) };
        let address = |buffer: &Option<Buffer<T>>| {
            buffer.as_ref().map(|buffer| block(buffer).map(DeviceBlock::address)).transpose()
        };
        let (gain, y_norm) = match norm {
            Some(norm) => (block(&norm.gain)?.address(), block(&norm.y_norm)?.address()),
            None => (0, 0),
        };
        let norm = RmsNormArgs {
            y: matrix(block(&weights[0].y)?.address(), window.cols),
            gain,
            out: matrix(y_norm, window.cols),
            rows: window.rows,
            cols: window.cols,
            eps: self.epilogue.rms_norm.map_or(0.0, Epsilon::get),
            programmatic: false,
            stream: self.gpu.raw_stream(),
        };
        let args = UnfusedEpilogue {
            norm,
            sums: matrix(sums, y_window(&self.problem, self.ctx.rank()).cols),
            bias: address(&weights[0].bias)?,
            residual: address(residual)?,
            activation: self.epilogue.activation,
            gates: self.epilogue.gates,
        };
        // SAFETY: the set and the product were allocated for these rows, `y` of gathered rows is
        // apart from its product, and all is used on this one stream.
        unsafe { self.gpu.unfused_epilogue(&args, dtype) }
    }

    fn comm(&self, set: usize) -> anyhow::Result<()> {
        let problem = &self.problem;
        let of = ElementType::from(problem.collective_dtype());
        let (between, stream) = (self.between[set].address(), self.gpu.raw_stream());
        let OperandSet { x, weights, .. } = &self.sets[set];
        let (x, y) = (block(x)?.address(), block(&weights[0].y)?.address());
        let rank = self.ctx.rank();
        let (kind, ends, window) = match problem.op().sums_to() {
            SumsTo::Nothing => (CollectiveKind::AllGather, (x, between), x_window(problem, rank)),
            SumsTo::Rows => (CollectiveKind::ReduceScatter, (between, y), y_window(problem, rank)),
            SumsTo::All => (CollectiveKind::AllReduce, (between, y), y_window(problem, rank)),
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
        self.sets.iter_mut().try_for_each(|set| self.ctx.poison_results(set))
    }

    fn verify_at(&mut self, at: &[(u32, u32)], defect: Defect) -> anyhow::Result<Verdict> {
        self.watchdog.heartbeat();
        super::serving::verify_at(self.ctx, self.op, &mut self.sets[0], at, defect)
    }
}

/// A rank's GEMM.
const fn gemm_shape(problem: &Problem, rank: Rank) -> GemmShape {
    GemmShape { m: problem.m(), n: problem.n_local(rank), k: problem.k_local(rank) }
}

/// Bytes of device memory that a row takes on one rank, the workspace left out.
pub(super) fn device_bytes(problem: &Problem, epilogue: EpilogueSpec) -> u64 {
    let first = Rank::new(0);
    let windows = [x_window, w_window, y_window].map(|w| elements(w(problem, first)) as u64);
    let outputs = u64::from(epilogue.operands.has(Operand::Residual))
        + u64::from(epilogue.rms_norm.is_some());
    let vectors = 2 * u64::from(problem.n());
    let products = product_elements(problem, epilogue, first);
    (windows.iter().sum::<u64>()
        + outputs * windows[2]
        + vectors
        + products
        + between_elements(problem))
        * SETS as u64
        * problem.numerics().operand.bytes() as u64
}

/// Of all rows: the gathered `x`, or one rank's partial sums.
fn between_elements(problem: &Problem) -> u64 {
    let columns = if problem.op().gathers() { problem.k() } else { problem.n() };
    u64::from(problem.m()) * u64::from(columns)
}

/// Of a product of gathered rows, where an epilogue follows.
fn product_elements(problem: &Problem, epilogue: EpilogueSpec, rank: Rank) -> u64 {
    let apart = problem.op().gathers() && epilogue != EpilogueSpec::default();
    if apart { elements(y_window(problem, rank)) as u64 } else { 0 }
}

fn block<T>(buffer: &Buffer<T>) -> anyhow::Result<&DeviceBlock> {
    match buffer {
        Buffer::Cuda { block, .. } => Ok(block),
        Buffer::Host(_) => bail!("host memory on a rank that works on a device"),
    }
}
