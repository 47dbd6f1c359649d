//! The operations.

use std::fmt;

/// The side of the GEMM with the communication.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// `y[m, n_r] = gather(x[m_r, k]) * transpose(w[n_r, k])`; rank `r` has `m_r` rows of `m` and
    /// `n_r` columns of `n`.
    AllGatherGemm,
    /// `y[m_r, n] = scatter(sum over ranks of x[m, k_r] * transpose(w[n, k_r]))`; rank `r` has
    /// `k_r` elements of `k`.
    GemmReduceScatter,
    /// `y[m, n] = sum over ranks of x[m, k_r] * transpose(w[n, k_r])`, the same bits on every rank.
    GemmAllReduce,
}

impl OpKind {
    /// Every op.
    pub const ALL: [Self; 3] = [Self::AllGatherGemm, Self::GemmReduceScatter, Self::GemmAllReduce];

    /// The name used in reports and on command lines.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllGatherGemm => "ag_gemm",
            Self::GemmReduceScatter => "gemm_rs",
            Self::GemmAllReduce => "gemm_ar",
        }
    }

    /// Whether a result is a sum over the ranks, each with a part of `k`.
    pub const fn reduces(self) -> bool {
        !matches!(self, Self::AllGatherGemm)
    }
}

impl fmt::Display for OpKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
