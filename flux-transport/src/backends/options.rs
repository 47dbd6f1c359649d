//! What a communicator is asked to be.

use flux_core::layout::WorkspaceSize;
use flux_core::signal::Epoch;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Which transport to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Select {
    /// What `FLUX_TRANSPORT` names; else the first that works on the GPUs of all ranks: nvlink (one
    /// node, proven peer access), mixed (several nodes), pcie (one host), nccl; host without GPUs.
    /// If GPUs are there and none works, connecting fails.
    #[default]
    Auto,
    /// Threads of this process, or processes of this machine, in host memory.
    Host,
    /// Peer memory of CUDA devices.
    NvLink,
    /// Peer memory between CUDA devices of a node, NCCL's messages between nodes.
    Mixed,
    /// NCCL's messages between CUDA devices, of one host or of several.
    Nccl,
    /// Pinned memory of the host, for CUDA devices of one host that do not reach each other.
    Pcie,
}

impl Select {
    /// The name used on command lines and in `FLUX_TRANSPORT`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Host => "host",
            Self::Mixed => "mixed",
            Self::NvLink => "nvlink",
            Self::Nccl => "nccl",
            Self::Pcie => "pcie",
        }
    }
}

impl fmt::Display for Select {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No transport has this name.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{name}` names no transport: auto, host, nvlink, mixed, nccl and pcie are known")]
pub struct ParseSelectError {
    name: String,
}

flux_core::debug_is_text!(ParseSelectError);

impl FromStr for Select {
    type Err = ParseSelectError;

    fn from_str(name: &str) -> Result<Self, ParseSelectError> {
        let known = [Self::Auto, Self::Host, Self::NvLink, Self::Mixed, Self::Nccl, Self::Pcie];
        known
            .into_iter()
            .find(|select| select.name() == name)
            .ok_or_else(|| ParseSelectError { name: name.to_owned() })
    }
}

/// How to connect. All ranks give the same, but for `device`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Which transport.
    pub select: Select,
    /// The CUDA device; the local rank's number unless given.
    pub device: Option<u32>,
    /// The longest wait for a peer, on device or host: above 0, at most 24 hours; 30 s by default.
    pub deadline: Duration,
    /// The epoch of the first call; for tests of its wrap.
    pub first_epoch: Epoch,
    /// Several ranks may share a device, for tests. Ranks that are threads share its queues, so
    /// kernels must push and all must fit at once; ranks that are processes take turns.
    /// [`Select::Auto`] takes nvlink alone for them. NCCL needs
    /// [`Launcher::sharing_devices`](crate::launch::Launcher::sharing_devices).
    pub shared_device: bool,
    /// Number of nodes, of consecutive ranks: rank `node * ranks of a node + local`. Data crosses
    /// nodes once for all ranks of a node. `None`: `FLUX_NODES`, else a node for each host. For
    /// [`Select::Mixed`] and [`Select::Auto`]; on the host it changes programs only.
    pub nodes: Option<u32>,
    /// Workspace to take at once.
    pub reserve: WorkspaceSize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            select: Select::Auto,
            device: None,
            deadline: Duration::from_secs(30),
            first_epoch: Epoch::FIRST,
            shared_device: false,
            nodes: None,
            reserve: WorkspaceSize::default(),
        }
    }
}

impl From<Select> for Options {
    fn from(select: Select) -> Self {
        Self { select, ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_and_its_transport_go_together() {
        for select in
            [Select::Auto, Select::Host, Select::NvLink, Select::Mixed, Select::Nccl, Select::Pcie]
        {
            assert_eq!(select.to_string().parse(), Ok(select));
        }
        let error = "pigeon".parse::<Select>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "`pigeon` names no transport: auto, host, nvlink, mixed, nccl and pcie are known"
        );
    }
}
