//! `flux-bench simulate`: times of calls on a machine that need not be there.
//!
//! Invariant: what is printed says first that it was simulated, and for which machine.

mod against;
mod published;
mod row;

pub use against::{Both, Compared, compare};
pub use published::published;

pub(crate) use row::timeline;
pub use row::{Simulation, plans, table};

use crate::harness::PlannedLayer;
use crate::page::Drawings;
use crate::plan::PlanArgs;
use crate::record::SimulatedFile;
use crate::shapes::{self, Layer, LayerArgs};
use crate::{out, record, report};
use anyhow::Context;
use flux_core::machine::Machine;
use std::path::PathBuf;

/// Fewest rows that the model is meant for.
pub const LEAST_ROWS: u32 = 512;

/// Arguments of `flux-bench simulate`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) layers: LayerArgs,
    /// Ranks of the world
    #[arg(long, visible_alias = "ranks", value_name = "RANKS", default_value_t = 8)]
    pub tp: u32,
    /// The machine: h200, h100 or h100-pair-by-host, whose two GPUs have only the host's memory in
    /// common; of others, as a100-pcie, data sheets are known, and a wrong name lists them
    #[arg(long, default_value = "h200", value_parser = machine)]
    pub machine: Machine,
    /// Simulate the rows of this file of `bench --json`, and show both times of op and serial path
    #[arg(
        long,
        value_name = "FILE.json",
        conflicts_with_all = ["ms", "shapes", "tp", "ops", "drawn"],
    )]
    pub against: Option<PathBuf>,
    /// Simulate the set-ups of the FLUX paper, and show the published figures beside them
    #[arg(long, conflicts_with_all = ["against", "ms", "shapes", "tp", "ops", "machine", "drawn"])]
    pub published: bool,
    /// Write the rows to this file, as JSON; `-` is the standard output, and the table then goes to
    /// the standard error
    #[arg(long, value_name = "FILE", conflicts_with = "published")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) drawings: Drawings,
    /// Print each row's plan too
    #[arg(long, conflicts_with = "against")]
    pub plans: bool,
    #[command(flatten)]
    pub plan: PlanArgs,
}

/// The machine of a `--machine` word.
pub(crate) fn machine(word: &str) -> Result<Machine, String> {
    let found = Machine::ALL.into_iter().find(|machine| machine.name.eq_ignore_ascii_case(word));
    found.ok_or_else(|| {
        format!(
            "{word:?} is none of {}",
            Machine::ALL.map(|machine| machine.name.to_lowercase()).join(", ")
        )
    })
}

/// Simulates every shape, or every row of the file, and prints the table.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.published {
        out::print(&published()?);
        return Ok(());
    }
    let json = args.json.as_deref();
    report::check_json(json)?;
    args.drawings.check()?;
    if let Some(path) = &args.against {
        let report = record::read_ops(path)?;
        let compared = compare(&report, args.plan, &args.machine)
            .with_context(|| path.display().to_string())?;
        let table = against::table(&compared, &args.machine);
        return report::deliver(
            &table,
            json,
            &SimulatedFile::new(&args.machine, Some(path), compared),
        );
    }
    let world = shapes::world(args.tp)?;
    let layers = args.layers.layers(world, true, &[512, 1024, 2048, 4096, 8192])?;
    if !args.drawings.is_empty() {
        let call = |layer: &Layer| {
            timeline(&PlannedLayer::new(layer.clone(), args.plan, args.machine)?, &args.machine)
        };
        args.drawings.write(&layers.iter().map(call).collect::<anyhow::Result<Vec<_>>>()?)?;
    }
    let simulated = |layer| Simulation::of_layer(layer, args.plan, &args.machine);
    let rows = layers.into_iter().map(simulated).collect::<anyhow::Result<Vec<_>>>()?;
    let mut text = table(&rows, &args.machine);
    if args.plans {
        text.push('\n');
        text.push_str(&plans(&rows));
    }
    let record = rows.iter().map(|row| row.row(&args.machine)).collect();
    report::deliver(&text, json, &SimulatedFile::new(&args.machine, None, record))
}
