//! The instantiations of the fused kernel.
//!
//! Invariant: the numbers of a kernel are computed here and declared in its translation unit, so
//! CUDA sources have none of their own that follow from tile or element types.

mod choice;
mod constants;
mod hopper;
mod portable;
mod source;

pub use choice::NoSuchTile;
pub(crate) use choice::forms;

use crate::nvrtc::Arch;
use crate::weights::WeightLayout;
use flux_core::tile::{CONSUMERS, Generation, Staging};
use flux_core::{DType, Numerics, OpKind, Partials, Scales, SumsTo, TileShape};
use std::fmt;

/// Threads of a warp.
const WARP: u32 = 32;
/// Threads of a warpgroup.
const WARPGROUP: u32 = 4 * WARP;

/// One instantiation, by what it is compiled for: an operation, element types, a tile, a staging of
/// finished tiles, a number of operand stages, gates, and the weights' layout. Both sums over the
/// ranks have one kernel.
///
/// These shape the mainloop or the memory of a tile. Bias, residual, activation, several weights
/// and time stamps are parameters of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    op: OpKind,
    numerics: Numerics,
    tile: TileShape,
    form: Form,
    stages: u32,
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

    /// Which kernel.
    pub const fn generation(&self) -> Generation {
        match self.form {
            Form::Hopper(_) => Generation::Hopper,
            Form::Portable if self.numerics.operand.is_quantized() => Generation::Ada,
            Form::Portable => Generation::Portable,
        }
    }

    /// The oldest PTX that has its instructions.
    pub(crate) const fn ptx(&self) -> Arch {
        if self.numerics.operand.is_quantized() { Arch::Compute89 } else { Arch::Compute80 }
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
        Self { numerics: self.numerics.with_partials(partials), ..self }
    }

    /// The same kernel with operands and outputs of this type.
    #[must_use]
    pub(crate) const fn with_dtype(self, dtype: DType) -> Self {
        Self { numerics: Numerics { operand: dtype, output: dtype, ..self.numerics }, ..self }
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

    /// Element types.
    pub const fn numerics(&self) -> Numerics {
        self.numerics
    }

    /// Extents of a tile.
    pub const fn tile(&self) -> TileShape {
        self.tile
    }

    /// Whether two steps along k are loaded at once. Adjacent lines of a row of `w` are then loaded
    /// together, so a miss need bring no more than its line. It takes a ring of whole pairs, at
    /// least three.
    pub(crate) const fn loads_pairs(&self) -> bool {
        self.stages >= 6 && self.stages.is_multiple_of(2)
    }

    /// Columns of `w` for one of `y`.
    const fn columns_per_output(&self) -> u32 {
        1 + self.gated as u32
    }

    /// Global staging memory of each CTA of a launch, in bytes. An fp32 partial tile waits there
    /// until it is sent, and the first consumer's part of another until the second's is.
    pub(crate) const fn epilogue_staging_bytes(&self) -> u64 {
        let Form::Hopper(staging) = self.form else { return 0 };
        let slot = (self.tile.m * self.tile.n) as u64 * self.numerics.partial_bytes() as u64;
        match (self.op.sums_to(), self.numerics.partials, staging) {
            (SumsTo::Rows, Partials::F32, _) => slot,
            (SumsTo::Rows, Partials::Output, Staging::Shared) => slot / CONSUMERS as u64,
            _ => 0,
        }
    }

    /// Dynamic shared memory of a CTA, in bytes.
    pub const fn shared_bytes(&self) -> u32 {
        match self.form {
            Form::Hopper(staging) => {
                self.tile.shared_bytes(staging, self.numerics, self.stages, self.op.reduces())
            }
            Form::Portable => self.tile.portable_shared_bytes(self.numerics, self.stages),
        }
    }

    /// Name of the kernel's entry point.
    pub fn entry(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Numerics { operand, scales, fast_accumulation, output, .. } = self.numerics;
        write!(f, "flux_{}_{operand}", self.op)?;
        if scales != Scales::None {
            let fast = if fast_accumulation { "fast_" } else { "" };
            write!(f, "_{scales}_{fast}{output}")?;
        }
        write!(f, "_{}_s{}", self.tile, self.stages)?;
        if self.gated {
            f.write_str("_gated")?;
        }
        if self.numerics.partials == Partials::F32 {
            f.write_str("_f32_partials")?;
        }
        if self.weights == WeightLayout::Kn {
            f.write_str("_kn")?;
        }
        match self.form {
            Form::Hopper(_) => Ok(()),
            Form::Portable => write!(f, "_{}", self.generation()),
        }
    }
}
