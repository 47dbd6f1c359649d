//! The instantiations of the fused kernel.
//!
//! Invariant: a variant's numbers are those of `struct Config` in
//! `flux-kernels/cuda/core/config.cuh`; both sides compute the same bytes of shared memory.

use crate::sources::Source;
use flux_core::program::TileProgram;
use flux_core::{DType, OpKind, TileShape};
use std::fmt;

/// One instantiation: operation, element type, tile, how many rooms a tile leaves through and how
/// many stages of operands are in flight, and whether it records its time line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    op: OpKind,
    dtype: DType,
    tile: TileShape,
    rooms: u32,
    stages: u32,
    traced: bool,
}

/// Tiles that there are kernels for, with the stages that fit beside a room for each consumer's
/// part in 227 KiB of shared memory, and beside one in which they take turns: where there are
/// enough of the first, and where the second makes room for one more.
const TILES: [(TileShape, Option<u32>, Option<u32>); 27] = [
    (TileShape::new(256, 192, 64), None, Some(3)),
    (TileShape::new(192, 256, 64), None, Some(3)),
    (TileShape::new(128, 256, 64), Some(3), Some(4)),
    (TileShape::new(256, 128, 64), Some(3), None),
    (TileShape::new(128, 224, 64), Some(3), Some(4)),
    (TileShape::new(128, 192, 64), Some(4), None),
    (TileShape::new(184, 256, 64), None, Some(3)),
    (TileShape::new(176, 256, 64), None, Some(3)),
    (TileShape::new(168, 256, 64), None, Some(3)),
    (TileShape::new(160, 256, 64), None, Some(3)),
    (TileShape::new(152, 256, 64), None, Some(3)),
    (TileShape::new(144, 256, 64), None, Some(3)),
    (TileShape::new(136, 256, 64), Some(3), None),
    (TileShape::new(160, 192, 64), Some(3), Some(4)),
    (TileShape::new(144, 192, 64), Some(4), Some(4)),
    (TileShape::new(240, 128, 64), Some(3), Some(4)),
    (TileShape::new(208, 128, 64), Some(4), None),
    (TileShape::new(176, 128, 64), Some(4), None),
    (TileShape::new(152, 128, 64), Some(5), None),
    (TileShape::new(128, 128, 64), Some(5), None),
    (TileShape::new(128, 96, 64), Some(7), None),
    (TileShape::new(128, 64, 64), Some(8), None),
    (TileShape::new(64, 256, 64), Some(4), None),
    (TileShape::new(64, 192, 64), Some(6), None),
    (TileShape::new(64, 128, 64), Some(7), None),
    (TileShape::new(64, 96, 64), Some(10), None),
    (TileShape::new(64, 64, 64), Some(12), None),
];

/// Every tile that there is a kernel for.
pub fn tiles() -> impl Iterator<Item = TileShape> {
    TILES.iter().map(|(tile, ..)| *tile)
}

/// Whether a GEMM-ReduceScatter of several ranks has a kernel for such tiles where they span
/// shards: rows that are scattered leave from room for the whole tile.
pub fn is_scattered(tile: TileShape) -> bool {
    TILES.iter().any(|(t, two, _)| *t == tile && two.is_some())
}

/// Whether it has one where they do not, and are sent as partial tiles: turned ones if their
/// consumers take turns in a room, `kSlotted` of config.cuh.
pub fn is_sent(tile: TileShape) -> bool {
    TILES.iter().any(|(t, _, one)| *t == tile && (!tile.swaps_ab() || one.is_some() && are_vectors(tile)))
}

/// Whether a thread's rounded accumulators are whole vectors.
const fn are_vectors(tile: TileShape) -> bool {
    (tile.m * tile.n).is_multiple_of(8 * 128 * Variant::CONSUMERS)
}

/// There is no kernel for a tile.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no kernel for tiles of {tile}: use 256x128x64, 240x128x64, 160x192x64, 128 rows and 256, 224, 192, 128, 96 or 64 columns, or 64 and 256, 192, 128, 96 or 64; for gemm_rs of several ranks only where tiles span shards 208x128x64, 176x128x64, 152x128x64, 144x192x64 and 136x256x64, and only where they do not 256x192x64, and 256 columns and 192, 184, 176, 168, 160, 152 or 144 rows; all with 64 along k"
)]
pub struct NoSuchTile {
    /// What was asked for.
    pub tile: TileShape,
}

/// Every variant that is compiled ahead of time, for both operations and element types; the
/// [`traced`](Variant::traced) forms are compiled where they are used.
pub fn all() -> Vec<Variant> {
    let mut variants = Vec::new();
    for op in [OpKind::AllGatherGemm, OpKind::GemmReduceScatter] {
        for dtype in [DType::Bf16, DType::F16] {
            variants.extend(TILES.iter().flat_map(|&entry| Variant::with_tile(op, dtype, entry)));
        }
    }
    variants
}

impl Variant {
    /// Threads of a CTA: a warpgroup with producer, storer, mover and watcher, and two consumers.
    pub const THREADS: u32 = 384;
    const CONSUMERS: u32 = 2;

    fn with_tile(op: OpKind, dtype: DType, (tile, two, one): (TileShape, Option<u32>, Option<u32>)) -> impl Iterator<Item = Self> {
        let variant = move |rooms, stages| Self { op, dtype, tile, rooms, stages, traced: false };
        // Rows that are scattered need room for the whole tile; without them a stage more is
        // better.
        let (two, one) = match op {
            OpKind::AllGatherGemm => (two.filter(|_| one.is_none()), one),
            OpKind::GemmReduceScatter => (two, one.filter(|_| !tile.swaps_ab() || are_vectors(tile))),
        };
        [two.map(|stages| variant(2, stages)), one.map(|stages| variant(1, stages))].into_iter().flatten()
    }

    /// The variant for a program: where there are two, the one with a stage more.
    ///
    /// # Errors
    /// As of [`Self::fitting`].
    pub fn of(program: &TileProgram) -> Result<Self, NoSuchTile> {
        let fitting = Self::fitting(program)?;
        fitting.into_iter().max_by_key(|variant| variant.stages).ok_or(NoSuchTile { tile: program.tile })
    }

    /// All variants that can execute a program, at least one: the results are the same, to the bit.
    ///
    /// # Errors
    /// [`NoSuchTile`] when no kernel has this tile, or none that can do what the program asks of
    /// it.
    pub fn fitting(program: &TileProgram) -> Result<Vec<Self>, NoSuchTile> {
        let (op, dtype, tile) = (program.problem.op(), program.problem.dtype(), program.tile);
        let entry = TILES.iter().find(|(t, ..)| *t == tile).ok_or(NoSuchTile { tile })?;
        let fitting: Vec<_> = Self::with_tile(op, dtype, *entry).filter(|variant| variant.fits(program)).collect();
        if fitting.is_empty() { Err(NoSuchTile { tile }) } else { Ok(fitting) }
    }

    /// Whether it can execute a program.
    pub fn fits(&self, program: &TileProgram) -> bool {
        // Rows that go to several owners leave from a room of the whole tile.
        let scatters = self.op == OpKind::GemmReduceScatter && program.flattened;
        // Swap-AB tiles have slots only where their consumers share a room: `kSlotted` of
        // config.cuh.
        let slots = self.op == OpKind::GemmReduceScatter && !program.flattened && program.problem.world().peers() > 0;
        let of_program = (program.problem.op(), program.problem.dtype(), program.tile);
        (self.op, self.dtype, self.tile) == of_program
            && (self.rooms == Self::CONSUMERS || !scatters)
            && (self.rooms == 1 || !self.tile.swaps_ab() || !slots)
    }

    /// The same kernel, recording when each phase of each item ended: it takes a
    /// [`TraceBuffer`](crate::cuda::TraceBuffer) at every launch.
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

    /// Whether two steps along k are loaded at once: `kPairs` of config.cuh. What lies side by side
    /// in a row of `w` is asked for together, and no miss need bring more than its line.
    pub(crate) const fn loads_pairs(&self) -> bool {
        self.stages >= 6 && self.stages.is_multiple_of(2)
    }

    /// Whether consumers share a tile by columns, and not by rows: `kSplitColumns` of config.cuh.
    const fn splits_columns(&self) -> bool {
        self.tile.m == 64 || self.tile.swaps_ab() && self.tile.n.is_multiple_of(64 * Self::CONSUMERS)
    }

    /// Columns of the boxes in which a tile is stored to `y`: `kBoxCols` of config.cuh. One
    /// consumer's columns are whole boxes.
    pub(crate) const fn box_cols(&self) -> u32 {
        let cols = if self.splits_columns() { self.tile.n / Self::CONSUMERS } else { self.tile.n };
        if cols.is_multiple_of(64) {
            64
        } else if cols.is_multiple_of(32) {
            32
        } else {
            16
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

    /// Device memory that each CTA of a launch needs to itself, in bytes: where the first
    /// consumer's part of a partial tile waits until the second's has been sent.
    pub const fn epilogue_staging_bytes(&self) -> u64 {
        let sends = matches!(self.op, OpKind::GemmReduceScatter) && self.rooms == 1;
        if sends { (self.tile.m * self.tile.n) as u64 } else { 0 }
    }

    /// Dynamic shared memory of a CTA, in bytes: stages, output buffers, barriers, two words, and
    /// room to align to 1024.
    pub const fn shared_bytes(&self) -> u32 {
        let stage = (self.tile.m + self.tile.n) * self.tile.k * 2;
        let out = self.tile.m * self.tile.n * 2 * self.rooms / Self::CONSUMERS;
        // 16 bytes between rows that are scattered
        let gaps = if matches!(self.op, OpKind::GemmReduceScatter) && self.rooms == Self::CONSUMERS { self.tile.m * 16 } else { 0 };
        let (out, barriers) = (out + gaps, 2 * self.stages + 2 * Self::CONSUMERS + 6);
        self.stages * stage + out + barriers * 8 + 16 + 1024
    }

    /// Name of the kernel's entry point.
    pub fn entry(&self) -> String {
        self.to_string()
    }

    /// The translation unit that instantiates the kernel.
    pub fn source(&self) -> Source {
        let name = self.entry();
        let (bf16, rs) = (self.dtype == DType::Bf16, self.op == OpKind::GemmReduceScatter);
        let (rooms, stages, traced) = (self.rooms, self.stages, self.traced);
        let TileShape { m, n, .. } = self.tile;
        let text = format!(
            "#include \"core/fused_gemm.cuh\"\n\
             using C = flux::Config<{m}, {n}, {rooms}, {stages}, {bf16}, {rs}, {traced}>;\n\
             static_assert(C::kSharedBytes == {shared} && C::kThreads == {threads} && C::kPairs == {pairs}, \"variant.rs\");\n\
             extern \"C\" __global__ void __launch_bounds__({threads}, 1) {name}(const __grid_constant__ flux::Params p) {{\n    \
             flux::fused_gemm<C>(p);\n}}\n",
            pairs = self.loads_pairs(),
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

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::program::Schedule;
    use flux_core::{Problem, Rank, WorldSize};

    fn program(op: OpKind, m: usize, stack: bool) -> TileProgram {
        let problem = Problem::new(op, m, 2048, 4096, DType::Bf16, WorldSize::new(2).unwrap()).unwrap();
        TileProgram::build(&problem, Rank::new(0), &Schedule { stack, ..Schedule::of(TileShape::new(128, 256, 64)) }).unwrap()
    }

    #[test]
    fn rows_that_are_scattered_need_room_for_the_whole_tile() {
        let rooms = |op, stack| Variant::fitting(&program(op, 512, stack)).unwrap().iter().map(|v| v.rooms).collect::<Vec<_>>();
        assert_eq!(rooms(OpKind::GemmReduceScatter, true), [2]);
        assert_eq!(rooms(OpKind::GemmReduceScatter, false), [2, 1]);
        assert_eq!(rooms(OpKind::AllGatherGemm, true), [1]);
        let [_, in_turns] = Variant::fitting(&program(OpKind::GemmReduceScatter, 512, false)).unwrap()[..] else { unreachable!() };
        assert!(!in_turns.fits(&program(OpKind::GemmReduceScatter, 512, true)), "a launch refuses it");
        assert!(!in_turns.fits(&program(OpKind::AllGatherGemm, 512, false)), "of another op");
    }

    /// As a launch finds them: a program of each tile, spanning shards and not.
    #[test]
    fn tiles_are_scattered_and_sent_that_have_kernels_for_it() {
        let counted = tiles().map(|tile| {
            let problem = Problem::new(OpKind::GemmReduceScatter, 1024, 2048, 4096, DType::Bf16, WorldSize::new(2).unwrap()).unwrap();
            let has_kernel = |stack| {
                let program = TileProgram::build(&problem, Rank::new(0), &Schedule { stack, ..Schedule::of(tile) }).unwrap();
                Variant::of(&program).is_ok()
            };
            assert_eq!([is_scattered(tile), is_sent(tile)], [true, false].map(has_kernel), "{tile}");
            assert!(is_scattered(tile) || is_sent(tile), "{tile}");
        });
        assert_eq!(counted.count(), TILES.len());
    }

    #[test]
    fn a_stage_more_is_taken_where_it_can_be() {
        let chosen = |op, stack| Variant::of(&program(op, 512, stack)).unwrap();
        let (ag, rs, scatters) =
            (chosen(OpKind::AllGatherGemm, false), chosen(OpKind::GemmReduceScatter, false), chosen(OpKind::GemmReduceScatter, true));
        assert_eq!([ag.stages, rs.stages, scatters.stages], [4, 4, 3]);
        assert!(rs.epilogue_staging_bytes() > 0 && ag.epilogue_staging_bytes() == 0 && scatters.epilogue_staging_bytes() == 0);
    }
}
