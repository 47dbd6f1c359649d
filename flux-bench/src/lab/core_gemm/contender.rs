//! What takes turns.

use crate::bench::in_round;

/// What is timed; the module says what each does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contender {
    /// The fastest of the algorithms that cuBLASLt proposes first.
    Gemm,
    /// The kernel on the local shape as a world of 1.
    Core,
    /// Rank 0's program without waits for peers.
    Order,
    /// Rank 0's program, every signal raised before.
    Flags,
    /// The fastest cuBLASLt algorithm with kernels of sm_80.
    Sm80Gemm,
}

impl Contender {
    /// Those of every measurement.
    pub(super) const ALWAYS: [Self; 4] = [Self::Gemm, Self::Core, Self::Order, Self::Flags];
    const WITH_SM80: [Self; 5] = [Self::Gemm, Self::Core, Self::Order, Self::Flags, Self::Sm80Gemm];

    /// Those of a measurement, with or without the last.
    pub(super) const fn all(sm80: bool) -> &'static [Self] {
        if sm80 { &Self::WITH_SM80 } else { &Self::ALWAYS }
    }

    /// The same in the order of a round.
    pub(super) fn in_round(sm80: bool, round: usize) -> Vec<Self> {
        in_round(Self::all(sm80), round)
    }
}
