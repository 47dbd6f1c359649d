//! One shape, simulated, and the table of many.
//!
//! Invariant: the op and the GEMM alone are simulated on the same machine, each with its own plan.

use super::LEAST_ROWS;
use crate::harness::{FIRST, PlannedLayer};
use crate::plan::PlanArgs;
use crate::report::{Head, aligned, ms};
use crate::shapes::Layer;
use anyhow::{Context, ensure};
use flux_core::Problem;
use flux_core::machine::Machine;
use flux_core::metrics;
use flux_core::plan::{CommMode, Mover, Plan, Target};
use flux_core::program::TileProgram;
use flux_core::simulate::simulate;
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
        let ranks = case.problem.world().get();
        ensure!(
            !machine.host_staged || ranks <= 2,
            "GPUs of {} meet in memory of the host, and no rate is known of {ranks} that share it: \
             take --tp 2",
            machine.name
        );
        let programs = case
            .problem
            .world()
            .ranks()
            .map(|rank| case.program(rank))
            .collect::<Result<Vec<TileProgram>, _>>()?;
        let mover = match case.plan.comm {
            CommMode::Fused { mover } => mover,
            CommMode::Overlapped { .. } | CommMode::Sequential => Mover::Kernel,
        };
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

    /// Overlap efficiency, in percent: how much of the collective the op hides.
    pub fn efficiency(&self) -> f64 {
        metrics::overlap_efficiency(self.op, self.gemm, self.serial)
            .map_or(0.0, |efficiency| 100.0 * efficiency)
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
    let unseen = if machine.is_measured() { "" } else { ", which nothing measured has confirmed" };
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

/// The rows as text.
pub fn table(rows: &[Simulation], machine: &Machine) -> String {
    let head = [
        "op", "model", "m", "n", "k", "tp", "T_op ms", "T_gemm", "T_serial", "on links", "lost ms",
        "E %", "",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    lines.extend(rows.iter().map(|row| {
        let lost = millis(row.op) - millis(row.gemm);
        let times =
            [millis(row.op), millis(row.gemm), millis(row.serial), millis(row.links), lost].map(ms);
        let kernel = [
            format!("{:.1}", row.efficiency()),
            if row.kernel { "" } else { NO_KERNEL }.to_owned(),
        ];
        row.head
            .cells()
            .into_iter()
            .chain([row.head.tp.to_string()])
            .chain(times)
            .chain(kernel)
            .collect()
    }));
    format!("{}\n{}", heading(machine, rows.iter().map(|row| row.head.m)), aligned(&lines))
}

/// The rows' plans, one to a line.
pub fn plans(rows: &[Simulation]) -> String {
    let lines: Vec<String> = rows.iter().map(|row| format!("{}: {}", row.head, row.plan)).collect();
    lines.join("\n") + "\n"
}

pub(super) fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
