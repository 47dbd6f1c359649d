//! How a machine connects its GPUs.
//!
//! Invariant: peer access is decided by proven data (`probe`) alone; everything else here explains
//! why something is not reachable, and guesses nothing.

pub(crate) mod hints;
pub(crate) mod limited;
mod machine;
mod mig;
mod nccl_settings;
mod nvml;
pub(crate) mod probe;
mod sysfs;
mod words;

pub(crate) use machine::{Gpu, Topology, look};
pub(crate) use mig::is_instance;
pub use mig::{instances, unseen};
pub(crate) use nccl_settings::Settings;
pub(crate) use nvml::Fabric;
pub(crate) use sysfs::Near;
pub use sysfs::nvidia_gpus;
