//! The contenders on the host: the fused op's executor for the GEMM too, copies for the
//! collectives.
//!
//! Invariant: all contenders have the same number of threads, so ratios of times compare schedules.
//! The times say nothing about GPUs.

use super::gpu_contenders::with_equal_shards;
use super::measure::{AnyRows, Contender, Contenders, Sample};
use super::shared_files::SharedFiles;
use crate::harness::{
    Buffer, Defect, HostBuffer, OperandSet, Operands, RankContext, Span, Verdict, build, elements,
    x_window, y_window,
};
use crate::plan::Overrides;
use anyhow::{Context, bail};
use flux_core::{OpKind, Problem, SumsTo, WorldSize};
use flux_kernels::Element;
use flux_ops::FusedLinear;
use flux_transport::{Communicator, Options, Select, World};

/// One rank's contenders.
pub(super) struct HostContenders<'a, T> {
    ctx: &'a RankContext,
    op: &'a FusedLinear,
    set: &'a mut OperandSet<T>,
    shown: SharedFiles,
    /// Of the serial path. Its shards are equal, so it pads the rows of a call.
    problem: Problem,
    /// One rank's whole part as a problem of a world of one, on a communicator of its own.
    gemm: FusedLinear,
    gemm_ctx: RankContext,
    gemm_set: OperandSet<T>,
}

impl<'a, T: Element> HostContenders<'a, T> {
    /// The contenders of `op`, on the operands that `set` holds; collective.
    pub(super) fn new(
        ctx: &'a RankContext,
        op: &'a FusedLinear,
        set: &'a mut OperandSet<T>,
        workers: u32,
    ) -> anyhow::Result<Self> {
        let problem = *op.largest();
        let alone = WorldSize::new(1).context("a world of one")?;
        let (m, n, k) = (
            problem.m() as usize,
            problem.n_local(ctx.rank()) as usize,
            problem.k_local(ctx.rank()) as usize,
        );
        let part = Problem::new(OpKind::AllGatherGemm, m, n, k, problem.numerics(), alone)?;
        let comm = Communicator::connect_blocking(&World::single(), Options::from(Select::Host))?;
        let gemm = build(&part, &comm, Overrides::with_workers(workers))?;
        let gemm_ctx = RankContext::new(comm)?;
        let mut gemm_set = gemm_ctx.operand_set(&part)?;
        // The time does not depend on the values.
        let Some(held) = set.holds else { bail!("the operands must be filled first") };
        gemm_ctx.fill(&mut gemm_set, Operands { problem: part, ..held })?;
        let shown = if problem.op().gathers() {
            elements(x_window(&problem, ctx.rank()))
        } else {
            m * problem.n() as usize
        };
        let shown = SharedFiles::new::<T>(ctx.comm(), shown)?;
        if problem.op().gathers()
            && let Buffer::Host(x) = &set.x
        {
            shown.show(x.elements())?;
        }
        Ok(Self { ctx, op, set, shown, problem, gemm, gemm_ctx, gemm_set })
    }

    fn gemm(&mut self) -> anyhow::Result<()> {
        self.gemm_ctx.forward(&self.gemm, &mut self.gemm_set)
    }

    /// Every rank's shard, in rank order, into the GEMM's `x`.
    fn all_gather(&mut self) -> anyhow::Result<()> {
        let Buffer::Host(gathered) = &mut self.gemm_set.x else { bail!("not host memory") };
        let shard = elements(x_window(&self.problem, self.ctx.rank()));
        let shards = gathered.elements_mut().chunks_exact_mut(shard);
        self.problem
            .world()
            .ranks()
            .zip(shards)
            .try_for_each(|(rank, shard)| self.shown.read(rank, 0, shard))
    }

    /// Adds every rank's partial sums of the rows of `y` in rank order in fp32, and rounds once
    /// into `y`.
    fn reduce(&mut self) -> anyhow::Result<()> {
        let Buffer::Host(y) = &mut self.set.y else { bail!("not host memory") };
        let rows = elements(y_window(&self.problem, self.ctx.rank()));
        let first = self.problem.y_rows(self.ctx.rank()).start as usize * self.problem.n() as usize;
        let mut sum = vec![0.0_f32; rows];
        let mut wide = vec![0.0_f32; rows];
        let mut part = HostBuffer::new(rows)?;
        for rank in self.problem.world().ranks() {
            self.shown.read(rank, first, part.elements_mut())?;
            T::widen(part.elements(), &mut wide);
            sum.iter_mut().zip(&wide).for_each(|(sum, part)| *sum += part);
        }
        T::narrow(&sum, &mut y.elements_mut()[..rows]);
        Ok(())
    }

    /// Lets the other ranks read the GEMM's result.
    fn show_partials(&self) -> anyhow::Result<()> {
        let Buffer::Host(y) = &self.gemm_set.y else { bail!("not host memory") };
        self.shown.show(&y.elements()[..self.problem.m() as usize * self.problem.n() as usize])
    }

    fn call(&mut self, contender: Contender) -> anyhow::Result<()> {
        match (contender, self.problem.op().sums_to()) {
            (Contender::Gemm, _) => self.gemm(),
            (Contender::Comm, SumsTo::Nothing) => self.all_gather(),
            (Contender::Comm, SumsTo::Rows | SumsTo::All) => self.reduce(),
            (Contender::Serial, _) => self.serial(),
            (Contender::Op, _) => self.ctx.forward(self.op, self.set),
        }
    }

    fn serial(&mut self) -> anyhow::Result<()> {
        if self.problem.op().gathers() {
            self.all_gather()?;
            self.gemm()
        } else {
            self.gemm()?;
            self.show_partials()?;
            self.ctx.comm().barrier()?;
            self.reduce()
        }
    }
}

impl<T: Element> Contenders for HostContenders<'_, T> {
    fn sample(&mut self, contender: Contender, _call: usize) -> anyhow::Result<Sample> {
        Ok(Sample { span: self.block(contender, 1)?, enqueued: None, late: false })
    }

    fn block(&mut self, contender: Contender, calls: usize) -> anyhow::Result<Span> {
        self.ctx.comm().barrier()?;
        let start = clock();
        (0..calls).try_for_each(|_| self.call(contender))?;
        Ok(Span { start, end: clock() })
    }
}

impl<T: Element> AnyRows for HostContenders<'_, T> {
    fn take(&mut self, operands: Operands) -> anyhow::Result<()> {
        self.problem = with_equal_shards(&operands.problem)?;
        anyhow::ensure!(
            self.problem.m() <= self.op.largest().m(),
            "{} beyond {}",
            self.problem,
            self.op.largest()
        );
        self.ctx.fill(self.set, operands)?;
        // The time does not depend on the values.
        let part = self.gemm.largest().with_m(self.problem.m())?;
        self.gemm_set.holds = Some(Operands { problem: part, ..operands });
        if self.problem.op().gathers()
            && let Buffer::Host(x) = &self.set.x
        {
            self.shown.show(x.elements())?;
        }
        Ok(())
    }

    fn poison(&mut self) -> anyhow::Result<()> {
        self.ctx.poison(&mut self.set.y)
    }

    fn verify_at(&mut self, at: &[(u32, u32)], defect: Defect) -> anyhow::Result<Verdict> {
        super::serving::verify_at(self.ctx, self.op, self.set, at, defect)
    }
}

/// Milliseconds of the clock that all processes of a machine share.
fn clock() -> f64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as f64 * 1e3 + now.tv_nsec as f64 * 1e-6
}
