//! One shape, simulated, and the table of many.
//!
//! Invariant: the op and the GEMM alone are simulated on the same machine, each with its own plan.

use super::LEAST_ROWS;
use crate::harness::{FIRST, PlannedLayer};
use crate::plan::PlanArgs;
use crate::record::SimulatedRow;
use crate::report::{Head, columns, dashed, ms};
use crate::shapes::Layer;
use crate::timeline::Call;
use anyhow::{Context, ensure};
use flux_core::machine::Machine;
use flux_core::plan::{CommMode, Mover, Plan, Target};
use flux_core::program::TileProgram;
use flux_core::simulate::simulate;
use flux_core::{Problem, metrics};
use flux_kernels::{KernelTarget, Variant};
use std::time::Duration;

/// Marks a tile without a kernel.
pub(super) const NO_KERNEL: &str = "no kernel of this tile";

/// What one op takes at one shape by simulation.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulation {
    /// What it is of.
    pub head: Head,
    /// With this plan.
    pub plan: Plan,
    /// The fused op, until the last rank is done.
    pub op: Duration,
    /// One rank's part as a world of 1, by the faster of the model's plan for it and the op's.
    pub gemm: Duration,
    /// Whether there is a kernel of this tile.
    pub kernel: bool,
    /// The time of the op's bytes on the busiest link.
    pub links: Duration,
    /// The GEMM, and a library's collective with as many bytes.
    pub serial: Duration,
}

impl Simulation {
    /// Simulates `layer` with the op's own plan, or the one that is asked for.
    ///
    /// # Errors
    /// There is no such plan.
    pub fn of_layer(layer: Layer, args: PlanArgs, machine: &Machine) -> anyhow::Result<Self> {
        let case = PlannedLayer::new(layer, args, *machine)?;
        Self::of(&case, machine).with_context(|| case.problem.to_string())
    }

    pub(super) fn of(case: &PlannedLayer, machine: &Machine) -> anyhow::Result<Self> {
        ensure_known(case, machine)?;
        let (mover, programs) = (mover(case), programs(case)?);
        let op = simulate(&programs, machine, mover)?;
        let alone = [Some(case.core()?), own_program(&case.alone, machine)?];
        let times = alone
            .into_iter()
            .flatten()
            .map(|program| Ok(simulate(&[program], machine, mover)?.time));
        let gemm = times.collect::<anyhow::Result<Vec<_>>>()?.into_iter().min().unwrap_or_default();
        let head = Head::new(&case.name, &case.problem);
        let kernel = programs.iter().all(|program| {
            Variant::of(program, KernelTarget::of_generation(machine.generation)).is_ok()
        });
        let serial = gemm.saturating_add(op.collective(machine));
        Ok(Self {
            head,
            plan: case.plan,
            op: op.time,
            gemm,
            kernel,
            links: op.on_links(machine),
            serial,
        })
    }

    /// How many times as long the serial path takes; `None` where its time is not known within 10
    /// %: of few rows, and through memory of the host, NCCL's own latencies are not in the model.
    pub fn speed_up(&self, machine: &Machine) -> Option<f64> {
        let known = self.head.m >= LEAST_ROWS && !machine.host_staged;
        known.then(|| self.serial.as_secs_f64() / self.op.as_secs_f64())
    }

    /// What the record has of it.
    pub(super) fn row(&self, machine: &Machine) -> SimulatedRow {
        let [t_op_ms, t_gemm_ms, t_serial_ms, on_links_ms] =
            [self.op, self.gemm, self.serial, self.links].map(millis);
        SimulatedRow {
            head: self.head.clone(),
            plan: self.plan.to_string(),
            t_op_ms,
            t_gemm_ms,
            t_serial_ms,
            on_links_ms,
            speed_up: self.speed_up(machine),
            kernel: self.kernel,
        }
    }

    /// Overlap efficiency, in percent: how much of the collective the op hides.
    pub fn efficiency(&self) -> f64 {
        metrics::overlap_efficiency(self.op, self.gemm, self.serial)
            .map_or(0.0, |efficiency| 100.0 * efficiency)
    }
}

/// The time line of a layer's op.
///
/// # Errors
/// As [`Simulation::of_layer`].
pub(crate) fn timeline(case: &PlannedLayer, machine: &Machine) -> anyhow::Result<Call> {
    ensure_known(case, machine)?;
    let call = simulate(&programs(case)?, machine, mover(case))?;
    let title = format!("SIMULATED {}", case.problem);
    let rows = std::iter::once(case.problem.m());
    let mut about: Vec<String> = heading(machine, rows).lines().map(str::to_owned).collect();
    about.push(case.plan.to_string());
    Ok(Call::simulated(title, about, call))
}

fn ensure_known(case: &PlannedLayer, machine: &Machine) -> anyhow::Result<()> {
    let ranks = case.problem.world().get();
    ensure!(
        !machine.host_staged || ranks <= 2,
        "GPUs of {} meet in memory of the host, and no rate is known of {ranks} that share it: \
         take --tp 2",
        machine.name
    );
    Ok(())
}

fn programs(case: &PlannedLayer) -> anyhow::Result<Vec<TileProgram>> {
    Ok(case.problem.world().ranks().map(|rank| case.program(rank)).collect::<Result<_, _>>()?)
}

const fn mover(case: &PlannedLayer) -> Mover {
    match case.plan.comm {
        CommMode::Fused { mover } => mover,
        CommMode::Overlapped { .. } | CommMode::Sequential => Mover::Kernel,
    }
}

/// The program of a world of 1 with the model's plan for it.
fn own_program(alone: &Problem, machine: &Machine) -> anyhow::Result<Option<TileProgram>> {
    let target = Target::peer_memory(*machine, alone);
    let plan = Plan::ranked(alone, &target).into_iter().next();
    Ok(plan
        .map(|plan| TileProgram::build(alone, FIRST, &plan.schedule(alone, &target)))
        .transpose()?)
}

/// The head of every table of simulated times.
pub(super) fn heading(machine: &Machine, rows: impl Iterator<Item = u32>) -> String {
    let few = if rows.min().is_some_and(|m| m < LEAST_ROWS) {
        format!("rows with m < {LEAST_ROWS} are outside of what the model is meant for\n")
    } else {
        String::new()
    };
    let unseen = if machine.is_measured() {
        ""
    } else {
        ", by its data sheet: no kernel of flux ever ran on that card"
    };
    let way = if machine.host_staged {
        "through memory of the host".to_owned()
    } else {
        format!("over {}", machine.wires)
    };
    format!(
        "SIMULATED, not measured: a model of {} {way}{unseen} (flux_core::simulate)\n{few}",
        machine.gpu
    )
}

/// What the columns of a table are.
const COLUMNS: &str = "\
T_op: the op, until the last rank is done; T_gemm: one rank's GEMM; T_serial: that GEMM and a
library's collective in turn; on links: the op's bytes on the busiest link; lost: T_op - T_gemm
speed-up: T_serial / T_op; E: how much of the collective the op hides, 1 - (T_op - T_gemm) /
(T_serial - T_gemm); a dash where T_serial is not known within 10 %
";

/// The rows as text.
pub fn table(rows: &[Simulation], machine: &Machine) -> String {
    let shown = columns(
        rows,
        (Head::COLUMNS, |row| &row.head),
        &[
            ("tp", &|row| row.head.tp.to_string()),
            ("T_op ms", &|row| ms(millis(row.op))),
            ("T_gemm", &|row| ms(millis(row.gemm))),
            ("T_serial", &|row| ms(millis(row.serial))),
            ("on links", &|row| ms(millis(row.links))),
            ("lost ms", &|row| ms(millis(row.op) - millis(row.gemm))),
            ("speed-up", &|row| dashed(row.speed_up(machine).map(|times| format!("{times:.2}")))),
            ("E %", &|row| {
                dashed(row.speed_up(machine).map(|_| format!("{:.1}", row.efficiency())))
            }),
            ("", &|row| if row.kernel { "" } else { NO_KERNEL }.to_owned()),
        ],
    );
    format!("{}{COLUMNS}\n{shown}", heading(machine, rows.iter().map(|row| row.head.m)))
}

/// The rows' plans, one to a line.
pub fn plans(rows: &[Simulation]) -> String {
    let lines: Vec<String> = rows.iter().map(|row| format!("{}: {}", row.head, row.plan)).collect();
    lines.join("\n") + "\n"
}

pub(super) fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
