//! How weights lie in memory.

use flux_core::problem::Shape;
use flux_core::tile::GATE_COLUMNS;
use std::fmt;

/// How the weights of a gated op lie: rows of `w` for gates, and rows for what they multiply, the
/// ups. `y[i, j] = act(gate[i, j]) * up[i, j]` has half as many columns as `w` has rows.
///
/// With SiLU it is SwiGLU, with GELU GeGLU, with ReLU ReGLU (Shazeer, "GLU variants improve
/// transformer", arXiv 2002.05202).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GateLayout {
    /// All gates of the rank, then all ups.
    Concatenated,
    /// Gate and up of a column in turn.
    Interleaved,
}

impl GateLayout {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Concatenated, Self::Interleaved];

    /// Of `n` rows of `w`: rows from a gate to the next, and from a gate to its up.
    pub(crate) const fn steps(self, n: u32) -> (u32, u32) {
        match self {
            Self::Concatenated => (1, n / 2),
            Self::Interleaved => (2, 1),
        }
    }

    /// The shape of `y` where the product has this one: with gates it has half as many columns.
    ///
    /// ```
    /// use flux_core::problem::Shape;
    /// use flux_kernels::GateLayout;
    /// let product = Shape { rows: 4, cols: 32 };
    /// let cols = |gates| GateLayout::result_shape(gates, product).cols;
    /// assert_eq!((cols(None), cols(Some(GateLayout::Interleaved))), (32, 16));
    /// ```
    pub const fn result_shape(gates: Option<Self>, product: Shape) -> Shape {
        Shape { cols: Self::result_cols(gates, product.cols), ..product }
    }

    /// Columns of `y` for so many of the product.
    pub const fn result_cols(gates: Option<Self>, cols: u32) -> u32 {
        if gates.is_some() { cols / 2 } else { cols }
    }

    /// The rows of `w`, of `n`, with the gate and the up of a column of `y`.
    ///
    /// ```
    /// use flux_kernels::GateLayout;
    /// assert_eq!(GateLayout::ALL.map(|layout| layout.rows_of(3, 16)), [(3, 11), (6, 7)]);
    /// ```
    pub const fn rows_of(self, col: u32, n: u32) -> (u32, u32) {
        let (step, up) = self.steps(n);
        (col * step, col * step + up)
    }

    /// The row of `w`, of `n`, in column `col` of the tiles. These hold eight gates, their ups, and
    /// so on: a thread of a kernel has a gate and its up.
    pub(crate) const fn row_in_tiles(self, col: u32, n: u32) -> u32 {
        let (gate, up) =
            self.rows_of(col / (2 * GATE_COLUMNS) * GATE_COLUMNS + col % GATE_COLUMNS, n);
        if (col / GATE_COLUMNS).is_multiple_of(2) { gate } else { up }
    }
}

impl fmt::Display for GateLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Concatenated => "concatenated",
            Self::Interleaved => "interleaved",
        })
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_have_every_row_once_and_each_gate_eight_columns_before_its_up() {
        for (layout, n) in
            GateLayout::ALL.into_iter().flat_map(|layout| [16, 48, 112].map(|n| (layout, n)))
        {
            let mut rows: Vec<_> = (0..n).map(|col| layout.row_in_tiles(col, n)).collect();
            for col in 0..n / 2 {
                let at = (col / GATE_COLUMNS * 2 * GATE_COLUMNS + col % GATE_COLUMNS) as usize;
                assert_eq!(
                    (rows[at], rows[at + GATE_COLUMNS as usize]),
                    layout.rows_of(col, n),
                    "{layout}, column {col} of {n}"
                );
            }
            rows.sort_unstable();
            assert_eq!(rows, (0..n).collect::<Vec<_>>(), "{layout}");
        }
    }
}
