//! The steps that ranks take together to share memory.
//!
//! Invariant: every rank takes every step, also after it failed: it reports the failure at the next
//! step, so all end a collective alike.

use super::error::PeerMemoryError;
use crate::backends::options::Options;
use crate::bootstrap::control::{Collective, agree as all_agree};
use crate::bootstrap::world::World;
use std::time::Instant;

/// The control plane and the time until which all steps of a collective must be taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handshake<'a> {
    pub(crate) steps: Collective<'a>,
    pub(crate) deadline: Instant,
}

impl<'a> Handshake<'a> {
    pub(crate) fn of(world: &'a World, options: &Options) -> Self {
        Self { steps: world.steps(), deadline: Instant::now() + options.deadline }
    }

    /// Gives every rank every other's bytes, unless one has failed: then all fail.
    pub(crate) fn agree(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>, PeerMemoryError> {
        Ok(all_agree(self.steps, &Ok::<_, &str>(mine), self.deadline)?)
    }

    /// Tells every rank that this one has failed.
    pub(crate) fn refuse(&self, error: PeerMemoryError) -> PeerMemoryError {
        // This rank's own error says more than the others' echo of it.
        let _ = all_agree(self.steps, &Err::<&[u8], _>(&error), self.deadline);
        error
    }

    /// Waits for every rank's success, and returns this rank's value.
    pub(crate) fn succeed<T>(
        &self,
        mine: Result<T, PeerMemoryError>,
    ) -> Result<T, PeerMemoryError> {
        match mine {
            Ok(value) => self.agree(&[]).map(|_| value),
            Err(error) => Err(self.refuse(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::control::{ControlPlane, LocalControl};
    use crate::lateness::AMPLE;
    use flux_core::{Rank, WorldSize};

    #[test]
    fn one_rank_that_fails_fails_all_and_is_named() {
        let ends = LocalControl::world_of(WorldSize::new(3).unwrap());
        std::thread::scope(|scope| {
            for end in &ends {
                scope.spawn(move || {
                    let handshake = Handshake {
                        steps: Collective::new(end, 0),
                        deadline: Instant::now() + AMPLE,
                    };
                    let mine = if end.rank().get() == 1 {
                        Err(PeerMemoryError::Withdrawn { peer: 2 })
                    } else {
                        Ok(5)
                    };
                    match (end.rank().get(), handshake.succeed(mine).unwrap_err()) {
                        (1, PeerMemoryError::Withdrawn { peer: 2 }) => {}
                        (0 | 2, PeerMemoryError::Peer { peer, reason }) => {
                            assert_eq!(
                                (peer, reason),
                                (Rank::new(1), PeerMemoryError::Withdrawn { peer: 2 }.to_string())
                            );
                        }
                        (rank, other) => panic!("rank {rank}: {other}"),
                    }
                    // The ranks are still in step.
                    assert_eq!(handshake.succeed(Ok(7)).unwrap(), 7);
                });
            }
        });
    }
}
