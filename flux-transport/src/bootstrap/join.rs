//! From a launcher's variables to a control plane.

use super::control::ControlPlane;
use super::environment::Environment;
use super::error::BootstrapError;
use super::mesh::Joining;
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
    pollster::block_on(Joining::new(environment).join(deadline))
}
