//! The control plane: how the ranks of a world talk on the host, beside the data.
//!
//! Invariant: all ranks take the same steps, exchanges, in the same order. A step ends by its
//! deadline, or at once when a rank it needs is gone. After a failed step an end refuses further
//! ones.

mod agree;
mod error;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod hosts;
mod inquiry;
mod local;
mod plane;
mod step;
mod steps;

pub use agree::shortened;
pub(crate) use agree::{Disagreed, agree, agree_at, together};
pub use error::{ControlError, ranks};
pub(crate) use error::{REGROUPING, came_and_went};
pub use hosts::Hosts;
pub use inquiry::{Answer, Answerer, GaveUp};
pub(crate) use inquiry::{mask_of, ranks_of, record_from, record_to_bytes};
pub(crate) use local::LocalControl;
pub use local::local_planes;
pub use plane::{ControlPlane, Launch, Notice, Watcher};
pub(crate) use plane::{Given, Regrouped};
pub use step::Step;
pub(crate) use step::{Collective, MAX_PAYLOAD, STEP_BYTES};
pub(crate) use steps::Steps;
