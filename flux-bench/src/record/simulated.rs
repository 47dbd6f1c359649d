//! What `flux-bench simulate --json` writes.

use crate::report::Origin;
use crate::simulate::SimulatedRow;
use serde::Deserialize;

/// Times of a machine that need not be there; nothing of it was measured.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(from = "Written")]
pub(crate) struct SimulatedReport {
    /// `device` is the machine, of which no GPU was there.
    pub(crate) origin: Origin,
    pub(crate) rows: Vec<SimulatedRow>,
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
