//! The contenders on the host: the fused op's executor for the GEMM too, copies for the
//! collectives.
//!
//! Invariant: all contenders have the same number of threads, so ratios of times compare schedules.
//! The times say nothing about GPUs.

use super::measure::{AnyRows, Contender, Contenders, Sample};
use super::serial::{self, of_libraries};
use super::shared_files::SharedFiles;
use crate::harness::{
    Buffer, Defect, HostBuffer, OperandSet, Operands, RankContext, Span, Verdict, Weight,
    build_with, elements, y_window,
};
use crate::machine::now_ns;
use crate::plan::Overrides;
use anyhow::{Context, bail};
use flux_core::problem::Shape;
use flux_core::{Partials, Problem, Rank, SumsTo, WorldSize};
use flux_kernels::Element;
use flux_ops::{EpilogueSpec, FusedLinear, GateLayout, Operand};
use flux_transport::{Communicator, Options, Select, Stream, World};

/// One rank's contenders.
pub(super) struct HostContenders<'a, X, Y> {
    ctx: &'a RankContext,
    op: &'a FusedLinear,
    set: &'a mut OperandSet<X, Y>,
    shown: SharedFiles,
    /// Of the serial path.
    problem: Problem,
    /// One rank's whole part as a problem of a world of one, on a communicator of its own. Of
    /// gathered rows it has the op's epilogue.
    gemm: FusedLinear,
    /// The gathered rows of `x`, which carry their scales; none of another op.
    gathered: Buffer<X>,
    /// All partial sums; none where rows are gathered.
    partials: Buffer<Y>,
}

/// Elements of a rank's shard of gathered rows, with their scales.
fn shard_elements(problem: &Problem, rank: Rank) -> usize {
    problem.x_shape(rank).rows as usize * problem.gathered_columns() as usize
}

impl<'a, X: Element, Y: Element> HostContenders<'a, X, Y> {
    /// The contenders of `op`, on the operands that `set` holds, with room for the serial path's
    /// rows; collective.
    pub(super) fn new(
        ctx: &'a RankContext,
        op: &'a FusedLinear,
        set: &'a mut OperandSet<X, Y>,
        workers: u32,
    ) -> anyhow::Result<Self> {
        let (problem, epilogue) = (of_libraries(op.largest())?, set.held()?.epilogue);
        let part = part(&problem, ctx.rank())?;
        let comm = Communicator::connect_blocking(&World::single(), Options::from(Select::Host))?;
        let gathers = problem.op().gathers();
        let epilogue = if gathers { epilogue } else { EpilogueSpec::default() };
        let gemm = build_with(&part, &comm, Overrides::with_workers(workers), epilogue)?;
        let (gathered, partials, shown) = if gathers {
            let shard = shard_elements(&problem, ctx.rank());
            (shard * problem.world().index(), 0, shard * size_of::<X>())
        } else {
            let all = part.y_shape(Rank::new(0)).elements();
            (0, all, all * size_of::<Y>())
        };
        let shown = SharedFiles::new(ctx.comm(), shown)?;
        let (gathered, partials) = (ctx.alloc(gathered)?, ctx.alloc(partials)?);
        let contenders = Self { ctx, op, set, shown, problem, gemm, gathered, partials };
        contenders.show_rows()?;
        Ok(contenders)
    }

    /// Verifies the serial path. Collective.
    pub(super) fn verify(&mut self) -> anyhow::Result<Verdict> {
        let held = serial::prepare_check(self.ctx, self.set, self.problem)?;
        self.show_rows()?;
        self.ctx.comm().barrier()?;
        self.serial()?;
        let verdict = serial::check(self.ctx, self.set)?;
        // All have read what they check before others change it.
        self.ctx.comm().barrier()?;
        self.ctx.fill(self.set, held)?;
        self.show_rows()?;
        Ok(verdict)
    }

    fn gemm(&mut self) -> anyhow::Result<()> {
        let (ctx, part, alone) = (self.ctx, part(&self.problem, self.ctx.rank())?, Rank::new(0));
        let Shape { rows, cols } = part.y_shape(alone);
        let product = GateLayout::result_shape(self.set.gates, Shape { rows, cols });
        let OperandSet { x, scale_x, weights, scales_w, .. } = &mut *self.set;
        let Weight { w, bias, y } = &mut weights[0];
        let gathers = self.problem.op().gathers();
        let (x, y) = if gathers { (&mut self.gathered, y) } else { (x, &mut self.partials) };
        let mut operands = ctx.call_of(&part, alone, x, scale_x.as_mut());
        operands.add_weight(ctx.raw(w, part.w_shape(alone)), ctx.raw(y, product));
        if let Some(scales) = scales_w.first_mut() {
            operands.set(Operand::ScaleW, 0, ctx.scale_of_w(&part, alone, scales));
        }
        if let Some(bias) = bias.as_mut().filter(|_| gathers) {
            operands.set(Operand::Bias, 0, ctx.row(bias));
        }
        // SAFETY: the memory is the set's and this object's, both exclusively borrowed, and is used
        // until the call returns.
        unsafe { self.gemm.run(&operands, Stream::Host) }?;
        Ok(())
    }

    /// Lets the other ranks read this one's rows of `x`, where they gather them.
    fn show_rows(&self) -> anyhow::Result<()> {
        if !self.problem.op().gathers() {
            return Ok(());
        }
        self.shown.show(&host(&self.set.x)?[..shard_elements(&self.problem, self.ctx.rank())])
    }

    /// Every rank's shard, in rank order, into the GEMM's `x`.
    fn all_gather(&mut self) -> anyhow::Result<()> {
        let shard = shard_elements(&self.problem, self.ctx.rank());
        let shards = host_mut(&mut self.gathered)?.chunks_exact_mut(shard);
        self.problem
            .world()
            .ranks()
            .zip(shards)
            .try_for_each(|(rank, shard)| self.shown.read(rank, 0, shard))
    }

    /// Adds every rank's partial sums of the rows of `y` in rank order in fp32, and rounds once
    /// into `y`.
    fn reduce(&mut self) -> anyhow::Result<()> {
        let rows = elements(y_window(&self.problem, self.ctx.rank()));
        let first = self.problem.y_rows(self.ctx.rank()).start as usize * self.problem.n() as usize;
        let mut sum = vec![0.0_f32; rows];
        let mut wide = vec![0.0_f32; rows];
        let mut part = HostBuffer::new(rows)?;
        for rank in self.problem.world().ranks() {
            self.shown.read(rank, first, part.elements_mut())?;
            Y::widen(part.elements(), &mut wide);
            sum.iter_mut().zip(&wide).for_each(|(sum, part)| *sum += part);
        }
        Y::narrow(&sum, &mut host_mut(&mut self.set.weights[0].y)?[..rows]);
        Ok(())
    }

    /// Adds bias and residual to the rounded sums, and normalises the rows.
    fn epilogue(&mut self) -> anyhow::Result<()> {
        let (cols, epilogue) = (self.problem.n() as usize, self.set.held()?.epilogue);
        if epilogue == EpilogueSpec::default() {
            return Ok(());
        }
        let rows = self.problem.y_rows(self.ctx.rank()).len();
        let OperandSet { weights, residual, norm, .. } = &mut *self.set;
        let Weight { bias, y, .. } = &mut weights[0];
        let y = host_mut(y)?;
        let bias = bias.as_ref().map(host).transpose()?;
        let residual = residual.as_ref().map(host).transpose()?;
        for (row, line) in y.chunks_exact_mut(cols).take(rows).enumerate() {
            for (col, y) in line.iter_mut().enumerate() {
                let bias = bias.map_or(0.0, |bias| bias[col].to_f32());
                let residual = residual.map_or(0.0, |rows| rows[row * cols + col].to_f32());
                *y = Y::from_f32(y.to_f32() + bias + residual);
            }
        }
        let (Some(norm), Some(eps)) = (norm, epilogue.rms_norm.map(|norm| norm.eps.get())) else {
            return Ok(());
        };
        let gain = host(&norm.gain)?;
        let out = host_mut(&mut norm.y_norm)?.chunks_exact_mut(cols);
        for (row, out) in y.chunks_exact(cols).take(rows).zip(out) {
            let squares: f32 = row.iter().map(|y| y.to_f32() * y.to_f32()).sum();
            let scale = (squares / cols as f32 + eps).sqrt().recip();
            for ((out, y), gain) in out.iter_mut().zip(row).zip(gain) {
                *out = Y::from_f32(y.to_f32() * scale * gain.to_f32());
            }
        }
        Ok(())
    }

    /// Lets the other ranks read the GEMM's result.
    fn show_partials(&self) -> anyhow::Result<()> {
        let elements = self.problem.m() as usize * self.problem.n() as usize;
        self.shown.show(&host(&self.partials)?[..elements])
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
            self.reduce()?;
            self.epilogue()
        }
    }
}

impl<X: Element, Y: Element> Contenders for HostContenders<'_, X, Y> {
    fn sample(&mut self, contender: Contender, _call: usize) -> anyhow::Result<Sample> {
        Ok(Sample { span: self.block(contender, 1)?, enqueued: None, late: false })
    }

    fn block(&mut self, contender: Contender, calls: usize) -> anyhow::Result<Span> {
        self.ctx.comm().barrier()?;
        let clock = || now_ns() as f64 * 1e-6;
        let start = clock();
        (0..calls).try_for_each(|_| self.call(contender))?;
        Ok(Span { start, end: clock() })
    }
}

impl<X: Element, Y: Element> AnyRows for HostContenders<'_, X, Y> {
    fn take(&mut self, operands: Operands) -> anyhow::Result<()> {
        self.problem = of_libraries(&operands.problem)?;
        let largest = of_libraries(self.op.largest())?;
        anyhow::ensure!(self.problem.m() <= largest.m(), "{} beyond {largest}", self.problem);
        self.ctx.fill(self.set, operands)?;
        self.show_rows()
    }

    fn poison(&mut self) -> anyhow::Result<()> {
        self.ctx.poison_results(self.set)
    }

    fn verify_at(&mut self, at: &[(u32, u32)], defect: Defect) -> anyhow::Result<Verdict> {
        super::serving::verify_at(self.ctx, self.op, self.set, at, defect)
    }
}

/// A rank's part of a problem with all rows, as one of a world of one.
fn part(problem: &Problem, rank: Rank) -> anyhow::Result<Problem> {
    let [m, n, k] =
        [problem.m(), problem.n_local(rank), problem.k_local(rank)].map(|extent| extent as usize);
    let numerics = problem.numerics().with_partials(Partials::Output);
    let alone = WorldSize::new(1).context("a world of one")?;
    Ok(Problem::new(problem.op(), m, n, k, numerics, alone)?)
}

fn host<T: Element>(buffer: &Buffer<T>) -> anyhow::Result<&[T]> {
    match buffer {
        Buffer::Host(buffer) => Ok(buffer.elements()),
        Buffer::Cuda { .. } => bail!("memory of a device on a rank that works on the host"),
    }
}

fn host_mut<T: Element>(buffer: &mut Buffer<T>) -> anyhow::Result<&mut [T]> {
    match buffer {
        Buffer::Host(buffer) => Ok(buffer.elements_mut()),
        Buffer::Cuda { .. } => bail!("memory of a device on a rank that works on the host"),
    }
}
