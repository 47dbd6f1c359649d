//! How weights lie in memory.

use std::fmt;

/// How the weights of an op lie in memory, row-major.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WeightLayout {
    /// `[n, k]`: a row for each output feature, as PyTorch keeps a linear layer's.
    #[default]
    Nk,
    /// `[k, n]`: a row for each input feature, as the gradient of a layer's input needs them.
    Kn,
}

impl WeightLayout {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Nk, Self::Kn];

    /// Rows and columns of weights for `n` output and `k` input features.
    ///
    /// ```
    /// use flux_kernels::WeightLayout;
    /// assert_eq!(WeightLayout::ALL.map(|layout| layout.extents(24, 8)), [(24, 8), (8, 24)]);
    /// ```
    pub const fn extents(self, n: u32, k: u32) -> (u32, u32) {
        match self {
            Self::Nk => (n, k),
            Self::Kn => (k, n),
        }
    }
}

impl fmt::Display for WeightLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nk => "[n, k]",
            Self::Kn => "[k, n]",
        })
    }
}
