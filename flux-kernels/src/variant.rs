//! The instantiations of the fused kernel.
//!
//! Invariant: a variant's numbers are those of `struct Config` in `config.cuh` of its generation,
//! `flux-kernels/cuda/sm90/` or `sm80/`.

mod choice;
mod source;

pub use choice::NoSuchTile;

use crate::weights::WeightLayout;
use flux_core::tile::{Generation, Staging};
use flux_core::{DType, OpKind, Partials, SumsTo, TileShape};
use std::fmt;

/// One instantiation, by what it is compiled for: an operation, an element type, a tile, a staging
/// of finished tiles, a number of operand stages, a type in which partial sums leave, gates, and the
/// weights' layout. Both sums over the ranks have one kernel.
///
/// These shape the mainloop or the memory of a tile. Bias, residual, activation, several weights and
/// time stamps are parameters of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    op: OpKind,
    dtype: DType,
    tile: TileShape,
    form: Form,
    stages: u32,
    partials: Partials,
    gated: bool,
    weights: WeightLayout,
}

/// The generation, with what only it distinguishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Form {
    /// How a finished tile is staged.
    Hopper(Staging),
    /// Results leave from registers.
    Portable,
}

impl Variant {
    /// Threads of a CTA: eight consumer warps, and four of producer, mover and those that carry
    /// results and signals.
    pub const THREADS: u32 = 384;
    const CONSUMERS: u32 = 2;

    /// Which kernel.
    pub const fn generation(&self) -> Generation {
        match self.form {
            Form::Hopper(_) => Generation::Hopper,
            Form::Portable => Generation::Portable,
        }
    }

    /// The same kernel with gates: see [`GateLayout`](crate::GateLayout), which a launch tells it.
    /// Of AllGather-GEMM and [`WeightLayout::Nk`]; another does not compile.
    #[must_use]
    pub const fn with_gates(self, gated: bool) -> Self {
        Self { gated, ..self }
    }

    /// Whether its weights are gates and ups.
    pub const fn is_gated(&self) -> bool {
        self.gated
    }

    /// The same kernel with partial sums that leave in this type; [`Partials::F32`] for a
    /// GEMM-ReduceScatter only, as another does not compile.
    #[must_use]
    pub const fn with_partials(self, partials: Partials) -> Self {
        Self { partials, ..self }
    }

    /// The same kernel of another element type.
    #[must_use]
    pub(crate) const fn with_dtype(self, dtype: DType) -> Self {
        Self { dtype, ..self }
    }

    /// The same kernel for weights that lie like this.
    #[must_use]
    pub const fn with_weights(self, weights: WeightLayout) -> Self {
        Self { weights, ..self }
    }

    /// How the weights lie.
    pub const fn weights(&self) -> WeightLayout {
        self.weights
    }

    /// The operation; GEMM-ReduceScatter also stands for GEMM-AllReduce.
    pub const fn op(&self) -> OpKind {
        self.op
    }

    /// Element type of the operands.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// In which type partial sums leave for other ranks.
    pub const fn partials(&self) -> Partials {
        self.partials
    }

    /// Extents of a tile.
    pub const fn tile(&self) -> TileShape {
        self.tile
    }

    /// Whether two steps along k are loaded at once: `kPairs` of config.cuh. Adjacent lines of a
    /// row of `w` are then loaded together, so a miss need bring no more than its line.
    pub(crate) const fn loads_pairs(&self) -> bool {
        self.stages >= 6 && self.stages.is_multiple_of(2)
    }

    /// Whether consumers split a tile by columns instead of rows: `kSplitColumns` of config.cuh.
    const fn splits_columns(&self) -> bool {
        self.tile.m == 64
            || self.tile.swaps_ab() && self.tile.n.is_multiple_of(64 * Self::CONSUMERS)
    }

    /// Columns of the boxes in which a tile is stored to `y`: `kBoxCols` of config.cuh. One
    /// consumer's columns are whole boxes.
    pub(crate) const fn box_cols(&self) -> u32 {
        let columns_per_result = 1 + self.gated as u32;
        let cols = match self.splits_columns() {
            // A block's.
            _ if self.tile.swaps_ab() => 64,
            true => self.tile.n / Self::CONSUMERS,
            false => self.tile.n,
        };
        match cols / columns_per_result {
            cols if cols.is_multiple_of(64) => 64,
            cols if cols.is_multiple_of(32) => 32,
            cols if cols.is_multiple_of(16) => 16,
            _ => 8,
        }
    }

    /// Rows of these boxes: `kBoxRows` of config.cuh, whose `kSwapAB` is [`TileShape::swaps_ab`].
    pub(crate) const fn box_rows(&self) -> u32 {
        match self.tile.swaps_ab() {
            false => 64,
            true if self.splits_columns() => self.tile.m,
            true => self.tile.m / Self::CONSUMERS,
        }
    }

    /// Global staging memory of each CTA of a launch, in bytes: `kGlobalStagingBytes` of
    /// config.cuh. An fp32 partial tile waits there until it is sent, and the first consumer's part
    /// of another until the second's is.
    pub(crate) const fn epilogue_staging_bytes(&self) -> u64 {
        match (self.op.sums_to(), self.form, self.partials) {
            (SumsTo::Rows, Form::Hopper(_), Partials::F32) => {
                (self.tile.m * self.tile.n * 4) as u64
            }
            (SumsTo::Rows, Form::Hopper(Staging::Shared), Partials::OpDType) => {
                (self.tile.m * self.tile.n) as u64
            }
            _ => 0,
        }
    }

    /// Dynamic shared memory of a CTA, in bytes.
    pub const fn shared_bytes(&self) -> u32 {
        match self.form {
            Form::Hopper(staging) => {
                self.tile.shared_bytes(staging, self.stages, self.op.reduces())
            }
            Form::Portable => self.tile.portable_shared_bytes(self.stages),
        }
    }

    /// Name of the kernel's entry point.
    pub fn entry(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "flux_{}_{}_{}_s{}", self.op, self.dtype, self.tile, self.stages)?;
        if self.gated {
            f.write_str("_gated")?;
        }
        if self.partials == Partials::F32 {
            f.write_str("_f32_partials")?;
        }
        if self.weights == WeightLayout::Kn {
            f.write_str("_kn")?;
        }
        match self.form {
            Form::Hopper(_) => Ok(()),
            Form::Portable => write!(f, "_{}", Generation::Portable),
        }
    }
}
