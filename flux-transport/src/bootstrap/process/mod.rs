//! The control plane of ranks that are processes.

pub(super) mod frame;
mod inquiry;
mod monitor;
mod plane;
mod regroup;
mod shared;

pub(super) use plane::ProcessControl;
