//! What `flux-bench simulate --json` writes.

use crate::report::{Head, Origin};
use serde::Deserialize;

/// Times of a machine that need not be there; nothing of it was measured.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(from = "Written")]
pub(crate) struct SimulatedReport {
    /// `device` is the machine, of which no GPU was there.
    pub(crate) origin: Origin,
    pub(crate) rows: Vec<SimulatedRow>,
}

/// One op at one shape, in milliseconds.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct SimulatedRow {
    #[serde(flatten)]
    pub(crate) head: Head,
    pub(crate) t_op_ms: f64,
    pub(crate) t_gemm_ms: f64,
    pub(crate) t_serial_ms: f64,
    /// Absent where it is not told.
    pub(crate) speed_up: Option<f64>,
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
        let origin = Origin {
            device: machine,
            gpus: 0,
            driver: None,
            cuda: None,
            cublaslt: None,
            nvrtc: None,
            commit,
            date: String::new(),
            command,
        };
        Self { origin, rows }
    }
}
