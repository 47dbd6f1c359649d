//! Why there is no world.

use flux_core::rank::MAX_WORLD;

use crate::bootstrap::BootstrapError;

/// Why a rank could not find its place.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorldError {
    /// No launcher has set its variables.
    #[error(
        "no launcher's variables are set (RANK and WORLD_SIZE, or FLUX_RANK and FLUX_WORLD_SIZE): start the program with torchrun or `flux-bench launch`, or make ranks as threads"
    )]
    NoLauncher,
    /// No communicator has that many ranks.
    #[error("a world of {size} ranks is not possible: 1 to {MAX_WORLD} are")]
    Size {
        /// The size asked for.
        size: u32,
    },
    /// A launcher's variables are wrong, or the ranks did not meet.
    #[error(transparent)]
    Bootstrap(BootstrapError),
}

impl From<BootstrapError> for WorldError {
    fn from(error: BootstrapError) -> Self {
        match error {
            BootstrapError::NoLauncher => Self::NoLauncher,
            error => Self::Bootstrap(error),
        }
    }
}
