//! What takes turns.

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
    /// Every one.
    pub(super) const ALL: [Self; 5] =
        [Self::Gemm, Self::Core, Self::Order, Self::Flags, Self::Sm80Gemm];

    /// Those of a measurement, with what there is of the library's.
    pub(super) fn of(library: bool, sm80: bool) -> Vec<Self> {
        let takes_part = |contender: &Self| match contender {
            Self::Gemm => library,
            Self::Core | Self::Order | Self::Flags => true,
            Self::Sm80Gemm => sm80,
        };
        Self::ALL.into_iter().filter(takes_part).collect()
    }
}
