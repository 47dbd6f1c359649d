//! The control plane of ranks that are processes.

mod endpoint;
pub(super) mod frame;
mod inquiry;
mod monitor;
mod plane;
mod regroup;

pub(super) use plane::ProcessControl;
