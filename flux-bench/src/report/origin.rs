//! Where figures come from: one head for every file of results.

use super::{command_line, commit, now};
use crate::harness::gpu;
use crate::machine::{self, Ranks};
use serde::{Deserialize, Serialize};

/// What is needed to judge a run and to repeat it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Name of the GPUs, or `host` with the number of processors.
    pub device: String,
    /// Number of GPUs; 0 on the host.
    pub gpus: u32,
    pub driver: Option<String>,
    /// Version of CUDA that the driver supports.
    pub cuda: Option<String>,
    /// Version of cuBLASLt, whose GEMM the op is compared with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cublaslt: Option<String>,
    /// Version of the NVRTC that compiled the kernels, at whatever time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvrtc: Option<String>,
    pub commit: String,
    /// When the run ended, UTC, RFC 3339.
    pub date: String,
    /// Command line that repeats the run: the launcher's, or rank 0's of another launcher.
    pub command: String,
}

impl Origin {
    /// Of a run of this process that ends now, of `ranks` ranks as threads or processes.
    pub(crate) fn of(on_gpus: bool, ranks: u32, as_what: Ranks) -> Self {
        let host = || format!("host ({ranks} ranks as {as_what} on {} cores)", machine::cores());
        let gpu = || flux_cuda::device_info(0).map_or_else(|e| e.to_string(), |info| info.name);
        // A process may see its own GPU only.
        let gpus =
            if as_what == Ranks::Processes { ranks } else { ranks.min(machine::gpu_count()) };
        Self {
            device: if on_gpus { gpu() } else { host() },
            gpus: if on_gpus { gpus } else { 0 },
            driver: on_gpus.then(machine::driver).flatten(),
            cuda: on_gpus.then(machine::cuda).flatten(),
            commit: commit().to_owned(),
            date: now(),
            command: command_line(),
            ..Self::default()
        }
    }

    /// The device, behind the number of GPUs; the host and a simulated machine have none.
    pub(crate) fn machine(&self) -> String {
        match self.gpus {
            0 => self.device.clone(),
            gpus => format!("{gpus} x {}", self.device),
        }
    }

    /// The version of NCCL, for runs on GPUs.
    pub(crate) fn nccl(&self) -> Option<String> {
        (self.gpus > 0).then(machine::nccl).flatten()
    }

    /// With the versions of cuBLASLt and NVRTC, for runs on GPUs.
    #[must_use]
    pub fn with_libraries(self) -> Self {
        if self.gpus == 0 {
            return self;
        }
        Self {
            cublaslt: gpu::cublas::version().ok(),
            nvrtc: gpu::kernels::compiled_by().ok(),
            ..self
        }
    }
}
