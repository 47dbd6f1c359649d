//! From a launcher's variables to a control plane.

use super::control::ControlPlane;
use super::environment::Environment;
use super::error::BootstrapError;
use super::process::ProcessControl;
use super::rendezvous::meet;
use std::sync::Arc;
use std::time::Instant;

/// Meets the other ranks of a launch and returns this rank's end of their control plane. Blocks.
///
/// # Errors
/// See [`BootstrapError`].
pub fn join(
    environment: &Environment,
    deadline: Instant,
) -> Result<Arc<dyn ControlPlane>, BootstrapError> {
    Ok(Arc::new(ProcessControl::start(meet(environment, deadline)?)?))
}
