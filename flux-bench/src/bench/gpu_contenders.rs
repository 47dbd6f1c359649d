//! The contenders on GPUs: cuBLASLt, NCCL, both in turn with a kernel for the epilogue behind them,
//! and the fused op.
//!
//! Invariant: a sample is the time between two events on the rank's stream. Before it an all-reduce
//! lines the ranks up, and a spinning kernel hides the launch of every contender alike.

use super::gpu_serial::GpuSerial;
use super::measure::{AnyRows, Contender, Contenders, Sample, slowest};
use super::serial::{self, of_libraries};
use super::watchdog::Watchdog;
use crate::harness::gpu::{Gpu, choice};
use crate::harness::{Defect, OperandSet, Operands, RankContext, Span, Verdict, told};
use anyhow::Context;
use flux_cuda::DeviceBlock;
use flux_kernels::Element;
use flux_ops::FusedLinear;
use flux_transport::internal::nccl::Comm;
use std::time::{Duration, Instant};

/// Operand sets in rotation, so that no call finds its operands in the 60 MB of L2.
pub(crate) const SETS: usize = 3;

/// One rank's contenders.
pub(super) struct GpuContenders<'a, X, Y> {
    ctx: &'a RankContext,
    gpu: &'a Gpu,
    nccl: &'a Comm,
    op: &'a FusedLinear,
    sets: &'a mut [OperandSet<X, Y>],
    serial: GpuSerial<'a, X, Y>,
    word: DeviceBlock,
    spin: Duration,
    watchdog: &'a Watchdog,
}

impl<'a, X: Element, Y: Element> GpuContenders<'a, X, Y> {
    /// The contenders of `op`, on filled operand sets with room for the serial path's rows, to be
    /// prepared before they are timed.
    pub(super) fn new(
        ctx: &'a RankContext,
        nccl: &'a Comm,
        op: &'a FusedLinear,
        sets: &'a mut [OperandSet<X, Y>],
        watchdog: &'a Watchdog,
    ) -> anyhow::Result<Self> {
        let gpu = ctx.gpu().context("this rank has no GPU")?;
        let epilogue = sets.first().context("no operand sets")?.held()?.epilogue;
        let serial = GpuSerial::new(gpu, nccl, ctx.rank(), op.largest(), sets, epilogue)?;
        for (number, set) in sets.iter().enumerate() {
            serial.fill(number, set.held()?)?;
        }
        let word = gpu.alloc(4)?;
        gpu.upload(&word, &[0; 4])?;
        Ok(Self { ctx, gpu, nccl, op, sets, serial, word, spin: choice::SPIN, watchdog })
    }

    /// Chooses what has to be measured first. Collective: the ranks choose one GEMM algorithm.
    pub(super) fn prepare(&mut self) -> anyhow::Result<()> {
        // The GEMM's speed depends on its data, so it reads what a collective has gathered.
        for (number, set) in self.sets.iter().enumerate() {
            self.serial.comm(number, set)?;
            self.serial.interleave(number)?;
        }
        self.choose_algorithm()?;
        self.choose_spin()
    }

    /// Verifies the serial path on the first set. Collective.
    pub(super) fn verify(&mut self) -> anyhow::Result<Verdict> {
        self.watchdog.heartbeat();
        let held = serial::prepare_check(self.ctx, &mut self.sets[0], self.serial.problem)?;
        self.serial.fill(0, self.sets[0].held()?)?;
        self.serial.poison(0)?;
        self.launch(Contender::Serial, 0)?;
        let verdict = serial::check(self.ctx, &self.sets[0])?;
        self.watchdog.heartbeat();
        self.ctx.fill(&mut self.sets[0], held)?;
        self.serial.fill(0, held)?;
        // Random data again, in the GEMM's `x` and in what the collective reads.
        self.launch(Contender::Serial, 0)?;
        Ok(verdict)
    }

    /// Times every candidate on every rank and takes the one whose slowest rank is fastest.
    fn choose_algorithm(&mut self) -> anyhow::Result<()> {
        // Should devices have different candidates, all ranks must still make as many collectives.
        let counts = told(self.ctx.comm(), self.serial.gemm.candidates() as u64)?;
        let common = counts.into_iter().min().unwrap_or(0) as usize;
        let best = choice::fastest(common, |candidate| {
            self.serial.gemm.choose(candidate);
            // The first launch loads a kernel, which can wait for the device: keep it out of
            // collectives.
            self.serial.gemm(0, &self.sets[0])?;
            self.gpu.synchronize()?;
            self.ctx.comm().barrier()?;
            let spans = choice::settled(|call| Ok(self.sample(Contender::Gemm, call)?.span))?;
            Ok(slowest(self.ctx.comm(), &spans)?.median)
        })?;
        self.serial.gemm.choose(best);
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
        let longest = told(self.ctx.comm(), longest.as_nanos() as u64)?.into_iter().max();
        self.spin = choice::spin(Duration::from_nanos(longest.unwrap_or(0)));
        Ok(())
    }

    fn launch(&mut self, contender: Contender, call: usize) -> anyhow::Result<()> {
        let number = call % self.sets.len();
        let set = &mut self.sets[number];
        match contender {
            Contender::Op => self.ctx.forward(self.op, set),
            Contender::Gemm => self.serial.gemm(number, set),
            Contender::Comm => self.serial.comm(number, set),
            Contender::Serial => self.serial.launch(number, set),
        }
    }
}

impl<X: Element, Y: Element> Contenders for GpuContenders<'_, X, Y> {
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

impl<X: Element, Y: Element> AnyRows for GpuContenders<'_, X, Y> {
    fn take(&mut self, operands: Operands) -> anyhow::Result<()> {
        self.watchdog.heartbeat();
        self.serial.take(&operands.problem)?;
        let (padded, largest) = (&self.serial.problem, of_libraries(self.op.largest())?);
        anyhow::ensure!(padded.m() <= largest.m(), "{padded} beyond {largest}");
        for (number, set) in self.sets.iter_mut().enumerate() {
            self.ctx.fill(set, operands)?;
            self.serial.fill(number, operands)?;
        }
        Ok(())
    }

    fn poison(&mut self) -> anyhow::Result<()> {
        self.sets.iter_mut().try_for_each(|set| self.ctx.poison_results(set))
    }

    fn verify_at(&mut self, at: &[(u32, u32)], defect: Defect) -> anyhow::Result<Verdict> {
        self.watchdog.heartbeat();
        super::serving::verify_at(self.ctx, self.op, &mut self.sets[0], at, defect)
    }
}
