//! The instantiations of the fused kernel.
//!
//! Invariant: a variant's numbers are those of `struct Config` in `flux-kernels/cuda/core/config.cuh`; both sides compute the same bytes
//! of shared memory.

use crate::sources::Source;
use flux_core::program::Schedule;
use flux_core::{DType, OpKind, TileShape};
use std::fmt;

/// One instantiation: operation, element type, tile, how many stages of operands are in flight, and whether it records its time line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    op: OpKind,
    dtype: DType,
    tile: TileShape,
    stages: u32,
    traced: bool,
}

/// Tiles that there are kernels for, with the stages that fit beside a private output buffer in 227 KiB of shared memory.
const TILES: [(TileShape, u32); 7] = [
    (TileShape::new(128, 256, 64), 3),
    (TileShape::new(256, 128, 64), 3),
    (TileShape::new(128, 224, 64), 3),
    (TileShape::new(128, 192, 64), 4),
    (TileShape::new(128, 128, 64), 5),
    (TileShape::new(64, 256, 64), 4),
    (TileShape::new(64, 128, 64), 7),
];

/// There is no kernel for a tile.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no kernel for tiles of {tile}: use one of 128x256x64, 256x128x64, 128x224x64, 128x192x64, 128x128x64, 64x256x64, 64x128x64")]
pub struct NoSuchTile {
    /// What was asked for.
    pub tile: TileShape,
}

/// Every variant that is compiled ahead of time, for both operations and element types; the [`traced`](Variant::traced) forms are compiled where they
/// are used.
pub fn all() -> Vec<Variant> {
    let mut variants = Vec::new();
    for op in [OpKind::AllGatherGemm, OpKind::GemmReduceScatter] {
        for dtype in [DType::Bf16, DType::F16] {
            variants.extend(TILES.iter().map(|&(tile, stages)| Variant { op, dtype, tile, stages, traced: false }));
        }
    }
    variants
}

impl Variant {
    /// Threads of a CTA: a warpgroup with producer, storer, mover and watcher, and two consumers.
    pub const THREADS: u32 = 384;
    const CONSUMERS: u32 = 2;

    /// The variant for a schedule.
    ///
    /// # Errors
    /// [`NoSuchTile`] when no kernel has this tile.
    pub fn of(op: OpKind, dtype: DType, schedule: &Schedule) -> Result<Self, NoSuchTile> {
        let tile = schedule.tile;
        match TILES.iter().find(|(t, _)| *t == tile) {
            Some(&(_, stages)) => Ok(Self { op, dtype, tile, stages, traced: false }),
            None => Err(NoSuchTile { tile }),
        }
    }

    /// The same kernel, recording when each phase of each item ended: it takes a [`TraceBuffer`](crate::cuda::TraceBuffer) at every launch.
    #[must_use]
    pub const fn traced(self) -> Self {
        Self { traced: true, ..self }
    }

    /// Whether it records.
    pub const fn is_traced(&self) -> bool {
        self.traced
    }

    /// Which operation.
    pub const fn op(&self) -> OpKind {
        self.op
    }

    /// Element type of the operands.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Extents of a tile.
    pub const fn tile(&self) -> TileShape {
        self.tile
    }

    /// Columns of a tile that one consumer multiplies: they share a tile by rows, or by columns where it has but 64 rows.
    pub(crate) const fn consumer_cols(&self) -> u32 {
        if self.tile.m == 64 { self.tile.n / Self::CONSUMERS } else { self.tile.n }
    }

    /// Dynamic shared memory of a CTA, in bytes: stages, output buffers, barriers, a word, and room to align to 1024.
    pub const fn shared_bytes(&self) -> u32 {
        let stage = (self.tile.m + self.tile.n) * self.tile.k * 2;
        let (gathers, out) = (matches!(self.op, OpKind::AllGatherGemm), self.tile.m * self.tile.n * 2);
        // 16 bytes between rows that are scattered
        let out = if gathers { out } else { out + self.tile.m * 16 };
        let barriers = 2 * self.stages + 2 * Self::CONSUMERS + 1;
        self.stages * stage + out + barriers * 8 + 8 + 1024
    }

    /// Name of the kernel's entry point.
    pub fn entry(&self) -> String {
        self.to_string()
    }

    /// The translation unit that instantiates the kernel.
    pub fn source(&self) -> Source {
        let name = self.entry();
        let (bf16, rs) = (self.dtype == DType::Bf16, self.op == OpKind::GemmReduceScatter);
        let traced = if self.traced { ", true" } else { "" };
        let TileShape { m, n, .. } = self.tile;
        let text = format!(
            "#include \"core/fused_gemm.cuh\"\n\
             using C = flux::Config<{m}, {n}, {stages}, {bf16}, {rs}{traced}>;\n\
             static_assert(C::kSharedBytes == {shared} && C::kThreads == {threads}, \"variant.rs\");\n\
             extern \"C\" __global__ void __launch_bounds__({threads}, 1) {name}(const __grid_constant__ flux::Params p) {{\n    \
             flux::fused_gemm<C>(p);\n}}\n",
            stages = self.stages,
            shared = self.shared_bytes(),
            threads = Self::THREADS,
        );
        Source { name, text }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "flux_{}_{}_{}_s{}", self.op, self.dtype, self.tile, self.stages)?;
        if self.traced { f.write_str("_traced") } else { Ok(()) }
    }
}
