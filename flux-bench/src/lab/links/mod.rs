//! `flux-bench lab links`: rates and latencies of this machine's links.
//!
//! Invariant: a figure is the median of repeated runs between events; where several devices move at
//! once, of the slowest one.

mod latencies;
mod measures;
mod rig;

use crate::report::{Origin, Ranks, check_json, write_json};
use crate::{launch, limits, out};
use anyhow::Context;
use measures::Meter;
use rig::Rig;
use serde::Serialize;
use std::path::PathBuf;

/// Arguments of `flux-bench lab links`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Write the table to this file, as JSON; `-` is the standard output, and the lines then go to
    /// the standard error
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Runs of each movement
    #[arg(long, visible_alias = "rounds", default_value_t = 20, value_parser = limits::samples())]
    pub samples: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Link {
    /// What moves, and how.
    pub movement: String,
    /// Bytes that one device moves; 0 for a signal.
    pub bytes: u64,
    pub us: f64,
    /// Rate of one device, in GB/s (10^9); absent for a signal.
    pub gb_per_s: Option<f64>,
}

#[derive(Serialize)]
struct LinkTable {
    schema: u32,
    #[serde(flatten)]
    origin: Origin,
    rows: Vec<Link>,
}

/// Measures, prints, writes.
pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    launch::refuse("links")?;
    flux_cuda::available().context("links are those of GPUs")?;
    check_json(args.json.as_deref())?;
    let rigs = rig::open_all()?;
    let origin = || Origin::of(true, rigs.len() as u32, Ranks::Threads);
    out::line(&format_args!("{}, {} GPUs\n", origin().device, origin().gpus));
    let mut rows = Vec::new();
    let mut report = |link: Link| {
        let rate = link.gb_per_s.map_or_else(String::new, |r| format!("{r:8.1} GB/s"));
        out::line(&format_args!(
            "{:<64} {:>10}  {:>10.2} us  {rate}",
            link.movement,
            size(link.bytes),
            link.us
        ));
        rows.push(link);
    };
    let mut meter = Meter { samples: args.samples as usize, report: &mut report };
    let all: Vec<&Rig> = rigs.iter().collect();
    measures::host_staging(&all, &mut meter)?;
    if rigs.len() > 1 {
        match rig::reach(&rigs)? {
            Ok(()) => measures::between(&all, &mut meter)?,
            Err(why) => out::line(&format_args!("between GPUs nothing is measured: {why}")),
        }
    }
    if let Some(path) = &args.json {
        let table = LinkTable { schema: crate::report::SCHEMA, origin: origin(), rows };
        write_json(path, &table)?;
    }
    Ok(())
}

fn size(bytes: u64) -> String {
    match bytes {
        0 => String::new(),
        b if b < 1 << 20 => format!("{} KiB", b >> 10),
        b => format!("{} MiB", b >> 20),
    }
}
