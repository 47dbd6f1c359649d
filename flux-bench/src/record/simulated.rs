//! What `flux-bench simulate --json` writes.

use crate::report::{self, Head, Origin};
use flux_core::machine::Machine;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Version of the file's format.
pub(super) const SIMULATED_SCHEMA: u32 = 1;

/// Times of a machine that need not be there; nothing of it was measured.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(from = "SimulatedFile<SimulatedRow>")]
pub(crate) struct SimulatedReport {
    /// `device` is the machine, of which no GPU was there.
    pub(crate) origin: Origin,
    pub(crate) rows: Vec<SimulatedRow>,
}

/// A row of `simulate --json`: times in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SimulatedRow {
    #[serde(flatten)]
    pub(crate) head: Head,
    pub(crate) plan: String,
    pub(crate) t_op_ms: f64,
    pub(crate) t_gemm_ms: f64,
    pub(crate) t_serial_ms: f64,
    pub(crate) on_links_ms: f64,
    /// Absent where it is not told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) speed_up: Option<f64>,
    /// Whether there is a kernel of the tile.
    pub(crate) kernel: bool,
}

/// The file, of these rows.
#[derive(Serialize, Deserialize)]
pub(crate) struct SimulatedFile<R> {
    schema: u32,
    /// Nothing of it was measured, but what a row says to be.
    simulated: bool,
    /// The record whose measured times stand in the rows, which makes this one of another kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    against: Option<String>,
    machine: String,
    commit: String,
    command: String,
    rows: Vec<R>,
}

impl<R> SimulatedFile<R> {
    /// Of this run.
    pub(crate) fn new(machine: &Machine, against: Option<&Path>, rows: Vec<R>) -> Self {
        let against = against.and_then(Path::file_name);
        Self {
            schema: SIMULATED_SCHEMA,
            simulated: true,
            against: against.map(|name| name.to_string_lossy().into_owned()),
            machine: machine.name.to_owned(),
            commit: report::commit().to_owned(),
            command: report::command_line(),
            rows,
        }
    }
}

impl From<SimulatedFile<SimulatedRow>> for SimulatedReport {
    fn from(file: SimulatedFile<SimulatedRow>) -> Self {
        let SimulatedFile { machine, commit, command, rows, .. } = file;
        let origin = Origin { device: machine, commit, command, ..Origin::default() };
        Self { origin, rows }
    }
}
