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

/// What of a sum over the ranks a rank has in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SumsTo {
    /// The op sums nothing over the ranks.
    Nothing,
    /// The rows of its shard.
    Rows,
    /// All rows, with the same bits as on every other rank.
    All,
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

    /// Whether the GEMM reads the rows of all ranks, each with a shard of `x` and columns of `n`.
    pub const fn gathers(self) -> bool {
        matches!(self, Self::AllGatherGemm)
    }

    /// What of the sum over the ranks, each with a part of `k`, a rank has in the end.
    pub const fn sums_to(self) -> SumsTo {
        match self {
            Self::AllGatherGemm => SumsTo::Nothing,
            Self::GemmReduceScatter => SumsTo::Rows,
            Self::GemmAllReduce => SumsTo::All,
        }
    }

    /// Whether a result is a sum over the ranks.
    pub const fn reduces(self) -> bool {
        !matches!(self.sums_to(), SumsTo::Nothing)
    }
}

impl fmt::Display for OpKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
