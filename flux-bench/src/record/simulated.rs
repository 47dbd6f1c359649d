//! What `flux-bench simulate --json` writes.

use crate::report::{Head, Origin};
use serde::{Deserialize, Serialize};

/// Times of a machine that need not be there; nothing of it was measured.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(from = "Written")]
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

/// As it is in the file.
#[derive(Deserialize)]
struct Written {
    machine: String,
    commit: String,
    command: String,
    rows: Vec<SimulatedRow>,
}

impl From<Written> for SimulatedReport {
    fn from(Written { machine, commit, command, rows }: Written) -> Self {
        let origin = Origin { device: machine, commit, command, ..Origin::default() };
        Self { origin, rows }
    }
}
