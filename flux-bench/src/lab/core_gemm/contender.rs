//! What takes turns.

use crate::bench::in_round;

/// What is timed; the module says what each does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contender {
    /// The fastest cuBLASLt algorithm.
    Gemm,
    /// The kernel on the local shape as a world of 1.
    Core,
    /// Rank 0's program without waits for peers.
    Order,
    /// Rank 0's program, every signal raised before.
    Flags,
}

impl Contender {
    pub(super) const ALL: [Self; 4] = [Self::Gemm, Self::Core, Self::Order, Self::Flags];

    /// All, in the order of a round.
    pub(super) fn in_round(round: usize) -> [Self; 4] {
        in_round(Self::ALL, round)
    }
}
