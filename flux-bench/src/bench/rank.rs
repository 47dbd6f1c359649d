//! One rank's part of the benchmark, as a thread or a process.
//!
//! Invariant: every rank takes the same steps. Nothing is exchanged inside a timed interval but the
//! host's barrier, which stands for a collective's own waits.

use super::gpu_contenders::{GpuContenders, SETS};
use super::host_contenders::HostContenders;
use super::serial::of_libraries;
use super::serving::{self, Trace};
use super::watchdog::Watchdog;
use super::{
    BenchCase, BenchJob, BenchResult, Contenders, Measurement, SEED, WARM_UP, gpu_serial, measure,
    sustain,
};
use crate::harness::{Fill, OperandSet, Operands, RankContext, Verdict, build_with};
use crate::plan::Overrides;
use crate::report::{
    Measured, Origin, Placement, Row, RowTable, ServingRow, Sustained, of_rounds, setup,
};
use crate::{end, machine, out, progress};
use anyhow::Context;
use flux_kernels::{Element, with_elements};
use flux_ops::FusedLinear;
use flux_transport::internal::nccl::{Comm, UniqueId};
use flux_transport::{Communicator, World};
use indicatif::ProgressBar;
use std::time::Duration;

/// Measures all cases, on one communicator, as a program would. Collective.
pub(super) fn run(job: &BenchJob<'_>, world: &World) -> anyhow::Result<BenchResult> {
    let ctx = RankContext::connect(world, job.args.transport)?;
    let placement = Placement::of(world, ctx.comm())?;
    let first = world.rank().get() == 0;
    let table = (first && job.rows.is_none()).then(|| begin_table(job, &ctx, placement));
    let rank = RankBench { job, ctx: &ctx, bar: bar(job, first), table };
    let rows = with_elements!(job.numerics, X, Y, rank.measure::<X, Y>(world))?;
    rank.bar.finish_and_clear();
    Ok(BenchResult { transport: ctx.comm().transport(), placement, rows })
}

/// Prints the head of the table of rounds, whose rows follow as they are measured.
fn begin_table(job: &BenchJob<'_>, ctx: &RankContext, placement: Placement) -> RowTable {
    let origin = Origin::of(job.on_gpus, job.world.get(), placement.ranks);
    let (transport, heads) =
        (ctx.comm().transport().to_string(), job.cases.iter().map(BenchCase::head));
    let head = heads.clone().next();
    let setup = setup(&origin, (&transport, placement), origin.nccl().as_ref(), head.as_ref());
    let table = RowTable::of(heads);
    out::print(&(setup + &of_rounds(&transport, job.samples) + &table.head()));
    table
}

/// Of all rounds; rank 0 shows it.
fn bar(job: &BenchJob<'_>, shown: bool) -> ProgressBar {
    let (steps, step) = job
        .rows
        .as_ref()
        .map_or((WARM_UP + job.samples as usize, "rounds"), |rows| (rows.calls(), "calls"));
    progress::bar((job.cases.len() * steps) as u64, step, shown)
}

struct RankBench<'a> {
    job: &'a BenchJob<'a>,
    ctx: &'a RankContext,
    bar: ProgressBar,
    /// Of rank 0, where rounds are measured.
    table: Option<RowTable>,
}

/// What a rank on a device has beside the op.
struct Baseline<'a> {
    world: &'a World,
    nccl: &'a Comm,
    watchdog: &'a Watchdog,
}

impl RankBench<'_> {
    fn measure<X: Element, Y: Element>(&self, world: &World) -> anyhow::Result<Measurement> {
        Ok(match &self.job.rows {
            None => Measurement::Rounds(self.each(world, |case, baseline| {
                let row = self.rounds::<X, Y>(case, baseline)?;
                if let Some(table) = &self.table {
                    self.bar.suspend(|| out::print(&table.row(&row)));
                }
                Ok(row)
            })?),
            Some(rows) => Measurement::Serving(
                self.each(world, |case, baseline| self.serve::<X, Y>(case, rows, baseline))?,
            ),
        })
    }

    /// What `of` finds of each case; there is a baseline on devices. A failure there may leave a
    /// collective of NCCL behind, and memory must not be freed after it.
    fn each<R>(
        &self,
        world: &World,
        of: impl Fn(&BenchCase, Option<&Baseline<'_>>) -> anyhow::Result<R>,
    ) -> anyhow::Result<Vec<R>> {
        let (job, ctx) = (self.job, self.ctx);
        if !job.on_gpus {
            return job.cases.iter().map(|case| of(case, None)).collect();
        }
        let all = || {
            let need = job
                .cases
                .iter()
                .map(|case| gpu_serial::device_bytes(&case.problem, case.epilogue, SETS))
                .max()
                .unwrap_or(0);
            tracing::debug!(bytes = need, "operands on each device");
            let device = ctx.gpu().context("the communicator is not on a device")?.device().clone();
            let (id, limit) = (unique_id(ctx.comm())?, Duration::from_mins(1));
            let nccl = Comm::join(&device, id, world.rank().get(), world.size().get(), limit)?;
            let watchdog = Watchdog::start(world, ctx.comm().deadline() * 2)?;
            let baseline = Baseline { world, nccl: &nccl, watchdog: &watchdog };
            job.cases.iter().map(|case| of(case, Some(&baseline))).collect::<anyhow::Result<_>>()
        };
        Ok(all().unwrap_or_else(|error| end::give_up(world.rank(), &error)))
    }

    /// A case's op, and the threads that it has on the host.
    fn built(&self, case: &BenchCase) -> anyhow::Result<(FusedLinear, u32)> {
        self.bar.set_message(case.problem.to_string());
        let (comm, problem) = (self.ctx.comm(), &case.problem);
        let asked = self.job.args.execution.on(comm, problem)?;
        let threads = asked.workers.unwrap_or((machine::cores() / problem.world().get()).max(1));
        let workers = if self.job.on_gpus { asked.workers } else { Some(threads) };
        Ok((build_with(problem, comm, Overrides { workers, ..asked }, case.epilogue)?, threads))
    }

    fn serve<X: Element, Y: Element>(
        &self,
        case: &BenchCase,
        rows: &Trace,
        baseline: Option<&Baseline<'_>>,
    ) -> anyhow::Result<ServingRow> {
        let (ctx, defect, tick) = (self.ctx, self.job.args.defect, || self.bar.inc(1));
        let (op, threads) = self.built(case)?;
        let padded = of_libraries(&case.problem)?;
        let mut sets = [ctx.operand_set_with::<X, Y>(&padded, case.epilogue)?];
        ctx.fill(&mut sets[0], Operands::new(case.problem, SEED, 0, Fill::Uniform))?;
        let Some(Baseline { world, nccl, watchdog }) = baseline else {
            let mut contenders = HostContenders::new(ctx, &op, &mut sets[0], threads)?;
            return serving::serve(&mut contenders, ctx, case, rows, defect, &tick);
        };
        let mut contenders = GpuContenders::new(ctx, nccl, &op, &mut sets, watchdog)?;
        let served = watchdog.guard(|| {
            contenders.prepare()?;
            serving::serve(&mut contenders, ctx, case, rows, defect, &tick)
        });
        // Here, while all that a collective may still use is there.
        Ok(served.unwrap_or_else(|error| end::give_up(world.rank(), &error)))
    }

    fn rounds<X: Element, Y: Element>(
        &self,
        case: &BenchCase,
        baseline: Option<&Baseline<'_>>,
    ) -> anyhow::Result<Row> {
        let (ctx, padded) = (self.ctx, of_libraries(&case.problem)?);
        let (op, threads) = self.built(case)?;
        let count = if baseline.is_some() { SETS } else { 1 };
        let sets = (0..count).map(|_| ctx.operand_set_with::<X, Y>(&padded, case.epilogue));
        let mut sets = sets.collect::<anyhow::Result<Vec<_>>>()?;
        let verdict = self.verify(case, &op, &mut sets[0])?;
        let (serial, times) = if let Some(Baseline { world, nccl, watchdog }) = baseline {
            for (call, set) in sets.iter_mut().enumerate() {
                // The serial path's further rows stay.
                for problem in [padded, case.problem] {
                    let operands = Operands::new(problem, SEED, call as u64, Fill::Uniform);
                    ctx.fill(set, operands.with_epilogue(case.epilogue))?;
                }
            }
            let mut contenders = GpuContenders::new(ctx, nccl, &op, &mut sets, watchdog)?;
            let measured = watchdog.guard(|| {
                contenders.prepare()?;
                Ok((contenders.verify()?, self.times(case, &mut contenders)?))
            });
            // Here, while all that a collective may still use is there.
            measured.unwrap_or_else(|error| end::give_up(world.rank(), &error))
        } else {
            let mut contenders = HostContenders::new(ctx, &op, &mut sets[0], threads)?;
            (contenders.verify()?, self.times(case, &mut contenders)?)
        };
        let verdict = verdict.merge(self.verify(case, &op, &mut sets[0])?);
        self.row(case, &op, &times, verdict, serial)
    }

    /// Verifies one call with integers, exactly, and one with random data, within the bound.
    fn verify<X: Element, Y: Element>(
        &self,
        case: &BenchCase,
        op: &FusedLinear,
        set: &mut OperandSet<X, Y>,
    ) -> anyhow::Result<Verdict> {
        let (ctx, job) = (self.ctx, self.job);
        let mut call = |fill| {
            let operands = Operands::new(case.problem, SEED, 0, fill);
            ctx.fill(set, operands.with_epilogue(case.epilogue))?;
            ctx.poison_results(set)?;
            ctx.forward(op, set)?;
            ctx.sync(op)?;
            job.args.defect.apply(ctx, set)?;
            ctx.verify(set, &op.plan(op.max_m())?)
        };
        let exact = call(Fill::SmallInts)?.of_wrong_elements();
        Ok(exact.merge(call(Fill::Uniform)?))
    }

    fn times(
        &self,
        case: &BenchCase,
        contenders: &mut dyn Contenders,
    ) -> anyhow::Result<(Measured, Option<Sustained>)> {
        let comm = self.ctx.comm();
        let measured = measure(contenders, comm, self.job.samples as usize, &|| self.bar.inc(1))?;
        let sustained = case
            .sustained
            .map(|seconds| sustain(contenders, comm, &measured.times, seconds))
            .transpose()?;
        Ok((measured, sustained))
    }

    /// The row, of what all ranks found of op and serial path. Collective.
    fn row(
        &self,
        case: &BenchCase,
        op: &FusedLinear,
        times: &(Measured, Option<Sustained>),
        of_op: Verdict,
        of_serial: Verdict,
    ) -> anyhow::Result<Row> {
        let comm = self.ctx.comm();
        let (of_op, of_serial) = (of_op.of_all_ranks(comm)?, of_serial.of_all_ranks(comm)?);
        for (of, verdict) in [("", &of_op), (", the serial path", &of_serial)] {
            if !verdict.ok() && comm.rank().get() == 0 {
                out::note(&format!("{}{of}: {verdict}", case.problem));
            }
        }
        let verdict = of_op.merge(of_serial);
        let &(measured, sustained) = times;
        let row = Row::new(
            &case.model,
            &case.problem,
            op.plan(op.max_m())?.to_string(),
            measured,
            verdict,
            self.job.samples,
        );
        let padded = of_libraries(&case.problem)?.m();
        let serial_m = (padded != case.problem.m()).then_some(padded);
        let execution = Some(op.execution(op.max_m())?.clone().into());
        Ok(Row { execution, serial_m, sustained, ..row })
    }
}

/// Rank 0's id for a communicator of NCCL, on every rank.
fn unique_id(comm: &Communicator) -> anyhow::Result<UniqueId> {
    let mine =
        if comm.rank().get() == 0 { UniqueId::new().map(UniqueId::to_bytes) } else { Ok([0; 128]) };
    let all = comm.exchange(mine.as_ref().map_or(&[], <[u8; 128]>::as_slice))?;
    mine.context("the serial baseline needs NCCL")?;
    let id = all.first().and_then(|said| said.as_slice().try_into().ok());
    Ok(UniqueId::from_bytes(id.context("rank 0 has no NCCL, which the serial baseline needs")?))
}
