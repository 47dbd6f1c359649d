//! Why there is no world.

use flux_core::rank::MAX_WORLD;
use flux_core::{Rank, WorldSize};

use crate::bootstrap::BootstrapError;

/// Why a rank could not find its place.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "fields are named after what they hold")]
pub enum WorldError {
    /// No launcher has set its variables.
    #[error(
        "no launcher's variables are set, or FLUX_LAUNCHER is none: start the program with \
         `flux-bench launch`, torchrun, srun or mpirun, make ranks as threads (World::local), or \
         say who this process is (World::builder)"
    )]
    NoLauncher,
    /// No communicator has that many ranks.
    #[error("a world of {size} ranks is not possible: 1 to {MAX_WORLD} are")]
    Size { size: u32 },
    /// The world has no such rank.
    #[error("rank {rank} is not below the world size {}", world.get())]
    Rank { rank: Rank, world: WorldSize },
    /// A launcher's variables are wrong, or the ranks did not meet.
    #[error(transparent)]
    Bootstrap(BootstrapError),
}

flux_core::debug_is_text!(WorldError);

impl From<BootstrapError> for WorldError {
    fn from(error: BootstrapError) -> Self {
        match error {
            BootstrapError::NoLauncher => Self::NoLauncher,
            error => Self::Bootstrap(error),
        }
    }
}
