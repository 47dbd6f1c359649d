//! How a machine connects its GPUs, in words for a person.
//!
//! Invariant: nothing is decided by it. What is reachable is proven by data (`probe`); this says
//! why something is not, and what to do about it. What the system does not tell is left out, never
//! guessed.

pub(crate) mod hints;
pub(crate) mod limited;
mod machine;
mod mig;
mod nccl_settings;
mod nvml;
pub(crate) mod probe;
mod sysfs;
mod words;

pub use machine::{Gpu, Topology, look};
pub(crate) use mig::is_instance;
pub use mig::{instances, unseen};
pub(crate) use nccl_settings::Settings;
pub use nvml::Fabric;
pub use sysfs::{Near, Place, nvidia_gpus};
