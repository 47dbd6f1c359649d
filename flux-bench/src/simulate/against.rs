//! Simulated times beside measured ones.
//!
//! Invariant: a row that was measured with another plan says so.

use super::LEAST_ROWS;
use super::row::{NO_KERNEL, Simulation, heading, millis};
use crate::harness::{PlannedLayer, Times};
use crate::plan::PlanArgs;
use crate::report::{Head, Report, Row, columns, dashed, ms};
use crate::shapes::Layer;
use anyhow::{Context, ensure};
use flux_core::machine::Machine;
use serde::Serialize;

/// Farthest that a simulated serial path may be off, in percent, where a gain over it is told.
const KNOWN: f64 = 10.0;

/// Milliseconds of a call.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Both {
    /// The median.
    pub measured: f64,
    /// By simulation.
    pub simulated: f64,
}

impl Both {
    /// The simulation's deviation from the measured time, in percent.
    pub fn off(self) -> f64 {
        (self.simulated / self.measured - 1.0) * 100.0
    }
}

/// A measured row and its simulation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// What it is of.
    #[serde(flatten)]
    pub head: Head,
    /// The op.
    pub t_op_ms: Both,
    /// The serial path.
    pub t_serial_ms: Both,
    /// Whether there is a kernel of the tile that is simulated.
    pub kernel: bool,
    /// Whether what was measured had the plan that is simulated.
    pub same_plan: bool,
}

impl Compared {
    fn of(row: &Row, args: PlanArgs, machine: &Machine) -> anyhow::Result<Self> {
        let layer = Layer { name: row.head.model.clone(), problem: row.head.problem()? };
        let case = PlannedLayer::new(layer, args, *machine)?;
        let simulation = Simulation::of(&case, machine)?;
        Ok(Self {
            head: row.head.clone(),
            t_op_ms: Both { measured: row.t_op_ms.median, simulated: millis(simulation.op) },
            t_serial_ms: Both {
                measured: row.t_serial_ms.median,
                simulated: millis(simulation.serial),
            },
            kernel: simulation.kernel,
            same_plan: row.plan == case.plan.to_string(),
        })
    }

    /// How many times as long the serial path takes; `None` where it is simulated too far off.
    pub fn speed_up(&self) -> Option<Both> {
        let Self { t_op_ms: op, t_serial_ms: serial, .. } = self;
        (serial.off().abs() <= KNOWN).then(|| Both {
            measured: serial.measured / op.measured,
            simulated: serial.simulated / op.simulated,
        })
    }
}

/// Simulates every row of `report`.
///
/// # Errors
/// Where it was measured on other GPUs, or over another transport.
pub fn compare(
    report: &Report,
    args: PlanArgs,
    machine: &Machine,
) -> anyhow::Result<Vec<Compared>> {
    let device = &report.origin.device;
    ensure!(machine.is_of(device), "measured on {device}, and {} would be simulated", machine.gpu);
    let transport = if machine.host_staged { "pcie" } else { "nvlink" };
    ensure!(
        report.transport == transport,
        "measured over {}, and only {transport} is simulated of {}",
        report.transport,
        machine.name
    );
    report
        .rows
        .iter()
        .map(|row| Compared::of(row, args, machine).with_context(|| row.head.to_string()))
        .collect()
}

/// The rows as text, and the verdict on the model.
pub(super) fn table(rows: &[Compared], machine: &Machine) -> String {
    let shown = columns(
        rows,
        (Head::COLUMNS, |row| &row.head),
        &[
            ("tp", &|row| row.head.tp.to_string()),
            ("T_op ms", &|row| ms(row.t_op_ms.measured)),
            ("simulated", &|row| ms(row.t_op_ms.simulated)),
            ("off %", &|row| format!("{:+.1}", row.t_op_ms.off())),
            ("T_serial", &|row| ms(row.t_serial_ms.measured)),
            ("simulated", &|row| ms(row.t_serial_ms.simulated)),
            ("off %", &|row| format!("{:+.1}", row.t_serial_ms.off())),
            ("speed-up", &|row| dashed(row.speed_up().map(|both| format!("{:.2}", both.measured)))),
            ("simulated", &|row| {
                dashed(row.speed_up().map(|both| format!("{:.2}", both.simulated)))
            }),
            ("", &|row| match (row.kernel, row.same_plan) {
                (false, _) => NO_KERNEL.to_owned(),
                (true, false) => "other plan".to_owned(),
                (true, true) => String::new(),
            }),
        ],
    );
    format!(
        "{}measured times beside simulated ones; speed-up: T_serial / T_op, a dash where T_serial \
         is off by more than {KNOWN} %\n\n{shown}{}",
        heading(machine, rows.iter().map(|row| row.head.m)),
        summary(rows)
    )
}

/// How far the simulation is off in the model's range, over rows with the same plan.
fn summary(rows: &[Compared]) -> String {
    let (same, others): (Vec<&Compared>, Vec<_>) =
        rows.iter().filter(|row| row.head.m >= LEAST_ROWS).partition(|row| row.same_plan);
    let left_out = if others.is_empty() {
        String::new()
    } else {
        format!("; {} of another plan left out", others.len())
    };
    let off = |of: fn(&Compared) -> Both| {
        let off: Vec<f64> = same.iter().map(|row| of(row).off().abs()).collect();
        let most = off.iter().copied().fold(0.0, f64::max);
        Some(format!("off by {:.1} % (median), {most:.1} % at most", Times::of(&off)?.median))
    };
    let found = off(|row| row.t_op_ms).zip(off(|row| row.t_serial_ms)).map(|(op, serial)| {
        let rows = if same.len() == 1 { "row" } else { "rows" };
        format!("{} {rows}, T_op {op}, T_serial {serial}", same.len())
    });
    match found {
        None if others.is_empty() => String::new(),
        found => {
            format!("\nm >= {LEAST_ROWS}: {}{left_out}\n", found.as_deref().unwrap_or("no rows"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::{DType, OpKind, Problem};

    fn row(m: u32, measured: f64, simulated: f64, same_plan: bool) -> Compared {
        let problem = Problem::new(
            OpKind::AllGatherGemm,
            m as usize,
            64,
            64,
            DType::Bf16,
            crate::shapes::world(2).unwrap(),
        )
        .unwrap();
        Compared {
            head: Head::new("gpt3", &problem),
            t_op_ms: Both { measured, simulated },
            t_serial_ms: Both { measured: 2.0 * measured, simulated: 2.2 * measured },
            kernel: true,
            same_plan,
        }
    }

    #[test]
    fn a_table_says_that_it_is_simulated_and_counts_only_what_the_model_is_for() {
        let rows =
            [row(256, 1.0, 2.0, true), row(512, 2.0, 1.9, true), row(1024, 4.0, 4.12, false)];
        let text = table(&rows, &Machine::H200);
        assert!(
            text.starts_with(
                "SIMULATED, not measured: a model of H200 over NVLink (flux_core::simulate)\nrows \
                 with m < 512"
            ),
            "{text}"
        );
        assert!(text.contains("  -5.0  ") && text.contains("  other plan\n"), "{text}");
        assert!(
            text.ends_with(
                "\nm >= 512: 1 row, T_op off by 5.0 % (median), 5.0 % at most, T_serial off by 10.0 \
                 % (median), 10.0 % at most; 1 of another plan left out\n"
            ),
            "{text}"
        );
        let alike = [row(512, 2.0, 1.9, true), row(1024, 4.0, 4.12, true)];
        assert!(
            table(&alike, &Machine::H200)
                .contains("\nm >= 512: 2 rows, T_op off by 4.0 % (median), 5.0 % at most, ")
        );
        assert!(
            table(&rows[2..], &Machine::H200)
                .ends_with("\nm >= 512: no rows; 1 of another plan left out\n")
        );
        assert!(!table(&rows[..1], &Machine::H200).contains("m >= 512"));
        assert!(table(&rows, &Machine::H100_PAIR_BY_HOST).starts_with(
            "SIMULATED, not measured: a model of H100 through memory of the host (flux"
        ));
        let known = table(&rows[1..2], &Machine::H800);
        assert!(
            known.starts_with(
                "SIMULATED, not measured: a model of H800 over NVLink, by its data sheet: no kernel \
                 of flux ever ran on that card"
            ),
            "{known}"
        );
        assert!(!known.contains("m < 512"), "{known}");
    }

    #[test]
    fn a_gain_is_told_where_the_serial_path_is_known() {
        let known = row(512, 2.0, 1.6, true);
        let far = |simulated| Compared {
            t_serial_ms: Both { measured: 4.0, simulated },
            ..known.clone()
        };
        let told = far(4.3).speed_up().unwrap();
        assert!((told.measured - 2.0).abs() < 1e-9 && (told.simulated - 2.6875).abs() < 1e-9);
        assert_eq!((far(4.5).speed_up(), far(3.5).speed_up()), (None, None));
        let text = table(&[far(4.3), far(4.5)], &Machine::H200);
        assert!(text.contains("+7.5      2.00       2.69\n"), "{text}");
        assert!(text.contains("+12.5         -          -\n"), "{text}");
    }
}
